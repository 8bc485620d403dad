"""The dtypes in which a unit's gradients are reduced and shown.

The rule is that of torch 2.15's documentation, on every version of torch. Without a `reduce_dtype`, gradients are
reduced in the parameter's `grad_dtype`. If the user did not set that, it is the parameter's own dtype, whatever the
unit computes in; `grad_dtype = None` keeps the dtype in which the gradient arrives. If the parameters of a unit differ,
their gradients are reduced in the promoted dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..forms import explicit_grad_dtype
from .bucket import Bucket
from .messages import several_grad_dtypes
from .plan_bucket import BuildSettings

_ANY = "any"
"""Stands for `grad_dtype = None`: gradients keep the dtype in which they arrive."""


def gradient_dtypes(buckets: Sequence[Bucket], settings: BuildSettings) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return, for each bucket of a unit, the dtype of its reductions and that of `.grad`.

    Raises:
        ConfigError: parameters of one bucket have different `grad_dtype`s.
    """
    requested = [_requested(bucket) for bucket in buckets]
    alone = [_dtype_alone(bucket, dtype) for bucket, dtype in zip(buckets, requested, strict=True)]
    dtypes = []
    for bucket, dtype, own in zip(buckets, requested, alone, strict=True):
        reduce = settings.policy.reduce_dtype
        if bucket.storage_dtype.is_complex:  # real numbers would lose the imaginary parts
            reduce = own
        elif reduce is None and settings.reduces_as_computed:
            reduce = bucket.compute_dtype
        elif reduce is None:
            reduce = own
            if own.itemsize > 1 and own.is_floating_point:  # others never train, and have no promoted dtype
                for other, theirs in zip(buckets, alone, strict=True):
                    if other.trains and other.axes is bucket.axes and theirs is not own and not theirs.is_complex:
                        reduce = torch.promote_types(reduce, theirs)
        if settings.keeps_compute_dtype and dtype in (None, _ANY):
            shown = bucket.compute_dtype
        else:
            shown = reduce if dtype is _ANY else dtype or bucket.storage_dtype
        dtypes.append((reduce, shown))
    return dtypes


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
