"""The generators of random numbers: Python's, numpy's, and torch's of the host and of the accelerator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(number: int) -> None:
    """Seed every generator."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def states() -> dict[str, torch.Tensor]:
    """Those of torch's generators, by device type."""
    found, device = {"cpu": torch.get_rng_state()}, accelerator()
    if device is not None:
        found[device.type] = torch.get_device_module(device.type).get_rng_state()
    return found


def restore(found: dict[str, torch.Tensor]) -> None:
    """Put back what `states` gave."""
    for kind, state in found.items():
        torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(kind).set_rng_state(state)


@contextmanager
def kept() -> Iterator[None]:
    """Puts all states back afterwards, on all devices."""
    python, numpy, device = random.getstate(), np.random.get_state(), accelerator()
    devices = range(torch.accelerator.device_count()) if device is not None else ()
    try:
        with torch.random.fork_rng(devices, device_type=device.type if device is not None else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def accelerator() -> torch.device | None:
    """The one of this machine that can be used; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)
