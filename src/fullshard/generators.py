"""The random generators of this process, restored after what runs once more, or on one rank only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def restored_generators() -> Iterator[None]:
    """A context that restores Python's, NumPy's and torch's generators at its end, on every device."""
    python, numpy, device = random.getstate(), np.random.get_state(), torch.accelerator.current_accelerator(True)
    devices = range(torch.accelerator.device_count()) if device is not None else ()
    try:
        with torch.random.fork_rng(devices, device_type=device.type if device is not None else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
