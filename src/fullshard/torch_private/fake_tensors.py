"""Fake tensors: shapes, dtypes and devices without memory, so that a model of any size runs on one small machine.

Public alternative: the meta device, where `scaled_dot_product_attention` takes the path that stores all scores, and
where programs that name a device fail. Test: tests/planner/test_profile.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which every new tensor is fake."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    return type(tensor) is FakeTensor
