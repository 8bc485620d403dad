"""Private attributes of PyTorch's FSDP1 that libraries read on instances of the wrapper, and what they do here.

Accelerate (`Accelerator.prepare` with mixed precision) holds weights that were loaded in 16 bits in float32: for each
instance in turn that `_has_params` it looks at the dtype, device, `requires_grad` and `_fqns` of `_flat_param`, sets
its `.data` to a cast one, and says so by `_handle._orig_param_dtype = torch.float32`. Lightning looks for
`_fsdp_flattened` on an optimizer's parameters, which `FlatParameter`s have (`forms/flat_parameter.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...forms import FlatParamShardMetadata, shard_metadata
from ...runtime import runner_of
from ...shard import Bucket, Unit
from .instances import flat_of


class Handle:
    """An instance's parameters, as PyTorch's `_handle` of it.

    Args:
        unit: of the instance.
    """

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameters; set, it is theirs from now on, of those that train."""
        return _shown(self._unit).storage_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        unit = self._unit
        unit.refresh()  # takes over the `.data` of a FlatParameter
        cast, finish = unit.apply(lambda tensor: tensor.to(dtype))
        for bucket in unit.buckets:
            if bucket.storage_dtype != dtype and _may_be_cast(bucket):
                cast(bucket.members[0].sharded)
        finish()

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank holds of the instance's parameters: names, shapes, strides, sizes, first and last element."""
        bucket = _shown(self._unit)
        return shard_metadata(bucket.layout, bucket.axes.shard.rank)


class Markers:
    """What an instance has of it."""

    @property
    def _handle(self) -> Handle | None:
        """None if the instance has no parameters of its own."""
        unit = _unit_of(self)
        return Handle(unit) if unit.buckets else None

    @property
    def _has_params(self) -> bool:
        """Whether the instance has parameters of its own."""
        return bool(_unit_of(self).buckets)

    @property
    def _flat_param(self) -> Any:
        """The instance's `FlatParameter`, with `use_orig_params=True` one over the same memory; None without any."""
        unit = _unit_of(self)
        return flat_of(_shown(unit)) if unit.buckets else None


def _unit_of(instance: Any) -> Unit:
    runner = runner_of(instance)
    assert runner is not None  # every instance has one
    return runner.unit


def _may_be_cast(bucket: Bucket) -> bool:
    trains = any([member.sharded.requires_grad for member in bucket.members])
    return trains and bucket.storage_dtype.is_floating_point


def _shown(unit: Unit) -> Bucket:
    """The bucket that stands for all: of those that a library would cast up the one of fewest bits, else the first."""
    found = sorted(filter(_may_be_cast, unit.buckets), key=lambda bucket: bucket.storage_dtype.itemsize)
    return (found or unit.buckets)[0]
