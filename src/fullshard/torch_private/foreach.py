"""Many small copies in one dispatcher call.

Private torch API: `torch._foreach_copy_`, `torch._foreach_add_`, `torch._foreach_zero_`, `torch._foreach_mul_`,
`torch._chunk_cat`. The public alternative is a Python loop over `copy_`, `add_`, `zero_`, `mul_`, about 1.5 us per
tensor slower; `tests/test_private_api.py` fails when these are gone.

On accelerators a call is one kernel only if both tensors of every pair have the same strides and no gaps; a single
different pair makes it a kernel per pair. So plans separate the pairs once (`same_form`), and copy them in two calls.
Rank-major data, with chunks of many tensors in turn, is copied by one kernel as columns of a matrix, in both
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch


def same_form(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy between these can be part of one kernel for many pairs."""
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return target.stride() == source.stride() and bool(dense(target)) and bool(dense(source))


def copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], object]:
    """A function that does `copy_all` of these non-empty lists at each call."""
    return partial(torch._foreach_copy_, targets, sources)


def copies_to(targets: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], object]:
    """A function that does `copy_all` of its argument to these targets; the list is not empty."""
    return partial(torch._foreach_copy_, targets)


def columns_out(matrix: torch.Tensor, widths: Sequence[int], to: list[torch.Tensor]) -> Callable[[], object]:
    """A function that copies the columns of `matrix` [n, sum(widths)] to tensors [n, width], all without gaps."""
    return partial(torch.split_with_sizes_copy, matrix, list(widths), 1, out=to)


def columns_in(matrix: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
    """A function that copies non-empty tensors of one dtype into columns of `matrix`: n chunks of dim 0, with a cast.

    A tensor whose rows do not divide evenly is padded with zeros.
    """
    return partial(torch._chunk_cat, dim=0, num_chunks=matrix.shape[0], out=matrix)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`targets[i].copy_(sources[i])` for all i, with casts."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`targets[i].add_(sources[i])` for all i, in the targets' dtype."""
    if targets:
        torch._foreach_add_(targets, sources)


def zero_all(targets: list[torch.Tensor]) -> None:
    """`targets[i].zero_()` for all i."""
    if targets:
        torch._foreach_zero_(targets)


def zeroes(targets: list[torch.Tensor]) -> Callable[[], object]:
    """A function that does `zero_all` of this non-empty list at each call."""
    return partial(torch._foreach_zero_, targets)


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """`tensors[i].mul_(factor)` for all i."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
