"""The dtypes in which a unit's gradients are reduced and shown.

The rule is that of torch 2.15's documentation, on every version of torch. Without a `reduce_dtype`, gradients are
reduced in the parameter's `grad_dtype`. If the user did not set that, it is the parameter's own dtype, whatever the
unit computes in; `grad_dtype = None` keeps the dtype in which the gradient arrives. If the parameters of a unit differ,
their gradients are reduced in the promoted dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..forms import explicit_grad_dtype
from .bucket import Bucket
from .messages import several_grad_dtypes


@dataclass(frozen=True)
class GradientDtypes:
    """The user's settings for a unit.

    Attributes:
        reduce: dtype of reductions; None: see the module's docstring, or `as_computed`.
        as_computed: whether, without `reduce`, the compute dtype is used: the wrapper's rule, and that of PyTorch's
            `fully_shard` before torch 2.15.
        keeps_computed: whether `.grad` keeps the compute dtype.
    """

    reduce: torch.dtype | None = None
    as_computed: bool = False
    keeps_computed: bool = False

    def settle(self, buckets: Sequence[Bucket]) -> list[tuple[torch.dtype, torch.dtype]]:
        """Return, for each bucket, the dtype of its reductions and that of `.grad`.

        Raises:
            ConfigError: parameters of one bucket have different `grad_dtype`s.
        """
        requested = [_requested(bucket) for bucket in buckets]
        alone = [_dtype_alone(bucket, dtype) for bucket, dtype in zip(buckets, requested, strict=True)]
        settled = []
        for bucket, dtype, own_dtype in zip(buckets, requested, alone, strict=True):
            reduce = self.reduce
            if bucket.storage_dtype.is_complex:  # real numbers would lose the imaginary parts
                reduce = own_dtype
            elif reduce is None and self.as_computed:
                reduce = bucket.compute_dtype
            elif reduce is None and (own_dtype.itemsize == 1 or not own_dtype.is_floating_point):
                reduce = own_dtype  # never trains, and has no promoted dtype with others
            elif reduce is None:
                reduce = own_dtype
                for other, theirs in zip(buckets, alone, strict=True):
                    if other.trains and other.axes is bucket.axes and theirs is not own_dtype and not theirs.is_complex:
                        reduce = torch.promote_types(reduce, theirs)
            shown = dtype or bucket.storage_dtype if dtype is not _ANY else reduce
            if self.keeps_computed and dtype in (None, _ANY):
                shown = bucket.compute_dtype
            settled.append((reduce, shown))
        return settled


_ANY = "any"
"""Stands for `grad_dtype = None`: gradients keep the dtype in which they arrive."""


def _requested(bucket: Bucket) -> Any:
    """Return the `grad_dtype` that the user set on a bucket's parameters: a dtype, `_ANY`, or None if unset."""
    names: dict[Any, list[str]] = {}
    for member in bucket.members:
        explicit, dtype = explicit_grad_dtype(member.sharded)
        names.setdefault((dtype or _ANY) if explicit else None, []).append(member.name)
    if len(names) > 1:
        raise several_grad_dtypes(names)
    return next(iter(names))


def _dtype_alone(bucket: Bucket, requested: Any) -> torch.dtype:
    """Return the dtype in which a bucket's gradients would be reduced if it were the only one."""
    if requested is _ANY:
        return bucket.compute_dtype
    dtype: torch.dtype = requested or bucket.storage_dtype
    return dtype
