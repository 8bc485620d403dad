"""Fake tensors: shapes, dtypes and devices without memory, so that a model of any size runs on one small machine.

Public alternative: the meta device, where `scaled_dot_product_attention` takes the path that stores all scores, and
where programs that name a device fail. Test: tests/planner/test_profile.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A context in which every new tensor is fake. What an operation raises is not also logged, with a traceback."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _LOG.disabled = was_disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    return type(tensor) is FakeTensor


def forget_value(leaf: object) -> None:
    """Drop the known value (`torch.tensor([3.0])`) of a fake tensor and of its views, so that only shapes remain.

    torch runs operations on known values for real, collectives included.
    """
    if type(leaf) is FakeTensor and leaf.constant is not None:
        leaf.fake_mode.fake_tensor_converter.invalidate_constant_aliases(leaf.constant)
