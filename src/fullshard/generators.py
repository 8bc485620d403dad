"""The random generators of this process: their state, and a context that restores it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Generators:
    """The random generators of this process: Python's, NumPy's, torch's, and the accelerator's.

    Their state is plain values and tensors, which can be sent and saved.
    """

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": [version, torch.tensor(internal, dtype=torch.int64, device="cpu"), gauss],
            "numpy": [str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        }
        return state | torch_states()

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise any exception if `load_state_dict` would."""
        device = _accelerator()
        of_device = None if device is None else torch.Generator(device).set_state
        self._fill(state_dict, random.Random(), np.random.RandomState(), torch.Generator("cpu"), of_device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        device = _accelerator()
        of_device = None if device is None else torch.get_device_module(device).set_rng_state
        self._fill(state_dict, random, np.random, torch.default_generator, of_device)

    @staticmethod
    def _fill(state_dict: dict[str, Any], python: Any, numpy: Any, of_torch: torch.Generator, of_device: Any) -> None:
        version, internal, gauss = state_dict["python"]
        python.setstate((version, tuple(internal.tolist()), gauss))
        name, keys, position, has_gauss, cached = state_dict["numpy"]
        numpy.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        of_torch.set_state(state_dict["torch"])
        if of_device is not None and "accelerator" in state_dict:
            of_device(state_dict["accelerator"])


def torch_states() -> dict[str, torch.Tensor]:
    """The states of torch's generators: the host's, and the accelerator's if there is one."""
    states, device = {"torch": torch.get_rng_state()}, _accelerator()
    if device is not None:
        states["accelerator"] = torch.get_device_module(device).get_rng_state()
    return states


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


@contextmanager
def restored_generators() -> Iterator[None]:
    """A context that restores Python's, NumPy's and torch's generators at its end, on every device."""
    python, numpy, device = random.getstate(), np.random.get_state(), _accelerator()
    devices = range(torch.accelerator.device_count()) if device is not None else ()
    try:
        with torch.random.fork_rng(devices, device_type=device.type if device is not None else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
