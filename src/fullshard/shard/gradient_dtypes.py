"""In which dtypes a unit's gradients are reduced and shown.

The rule is the one that torch 2.15 documents, on every torch. Without a `reduce_dtype` gradients are reduced in the
parameter's `grad_dtype`. Where the user did not set that, it is the parameter's own dtype, whatever the unit computes
in; `grad_dtype = None` keeps the dtype that the gradient comes in. Where the parameters of a unit differ, they are
reduced in the promoted dtype.
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
    """What the user settled for a unit.

    Attributes:
        reduce: of reductions; None: see the module's docstring, or `as_computed`.
        as_computed: without `reduce`, the dtype that the unit computes in: the wrapper's rule, and that of PyTorch's
            `fully_shard` before torch 2.15.
        keeps_computed: whether `.grad` keeps the compute dtype.
    """

    reduce: torch.dtype | None = None
    as_computed: bool = False
    keeps_computed: bool = False

    def settle(self, buckets: Sequence[Bucket]) -> list[tuple[torch.dtype, torch.dtype]]:
        """Per bucket, the dtype of its reductions and that of `.grad`.

        Raises:
            ConfigError: parameters of one bucket have different `grad_dtype`s.
        """
        asked = [_asked(bucket) for bucket in buckets]
        own = [_own(bucket, dtype) for bucket, dtype in zip(buckets, asked, strict=True)]
        settled = []
        for bucket, dtype, wanted in zip(buckets, asked, own, strict=True):
            reduce = self.reduce
            if bucket.storage_dtype.is_complex:  # real numbers would lose the imaginary parts
                reduce = wanted
            elif reduce is None and self.as_computed:
                reduce = bucket.compute_dtype
            elif reduce is None and (wanted.itemsize == 1 or not wanted.is_floating_point):
                reduce = wanted  # never trains: has no promotion with others
            elif reduce is None:
                reduce = wanted
                for other, theirs in zip(buckets, own, strict=True):
                    if other.trains and other.axes is bucket.axes and theirs is not wanted and not theirs.is_complex:
                        reduce = torch.promote_types(reduce, theirs)
            shown = dtype or bucket.storage_dtype if dtype is not _ANY else reduce
            if self.keeps_computed and dtype in (None, _ANY):
                shown = bucket.compute_dtype
            settled.append((reduce, shown))
        return settled


_ANY = "any"
"""What users say by `grad_dtype = None`: gradients stay in the dtype that they come in."""


def _asked(bucket: Bucket) -> Any:
    """The `grad_dtype` that the user set on a bucket's parameters: a dtype, `_ANY`, or None where none is set."""
    names: dict[Any, list[str]] = {}
    for member in bucket.members:
        explicit, dtype = explicit_grad_dtype(member.sharded)
        names.setdefault((dtype or _ANY) if explicit else None, []).append(member.name)
    if len(names) > 1:
        raise several_grad_dtypes(names)
    return next(iter(names))


def _own(bucket: Bucket, asked: Any) -> torch.dtype:
    """The dtype in which a bucket's gradients would be reduced if it were alone."""
    if asked is _ANY:
        return bucket.compute_dtype
    own: torch.dtype = asked or bucket.storage_dtype
    return own
