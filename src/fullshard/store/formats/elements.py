"""Elements of a tensor out of a file, by plain reads: a mapped file that becomes shorter ends the process (SIGBUS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

BUFFER = 16 * 2**20
"""Bytes that are read at once for a few elements of each row."""


def read_strided(
    fill: Callable[[int, memoryview], None],
    base: int,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Read from the first element to the last; some rows at a time where far more lies there than is asked.

    Args:
        fill: fills memory from a byte of the file on.
        base: where the elements begin in the file, in bytes.
        start, shape, stride: which of them; in elements. The result may have any stride.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    span = extent(shape, stride)
    if span > 2 * numel(shape) and span * dtype.itemsize > BUFFER:
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        rows = max(1, BUFFER // max(1, stride[0] * dtype.itemsize))
        for row in range(0, shape[0], rows):
            some = min(rows, shape[0] - row)
            first = start + row * stride[0]
            if some == 1:
                part = read_strided(fill, base, dtype, first, shape[1:], stride[1:])
            else:
                part = read_strided(fill, base, dtype, first, (some, *shape[1:]), stride)
            whole[row : row + some] = part
        return whole
    raw = torch.empty(span * dtype.itemsize, dtype=torch.uint8, device="cpu")
    fill(base + start * dtype.itemsize, memoryview(raw.numpy().data))
    return raw.view(dtype).as_strided(shape, stride)


def numel(shape: Sequence[int]) -> int:
    """Elements of a tensor: Python integers, which do not overflow."""
    product = 1
    for one in shape:
        product *= one
    return product


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last; its shape has no zero."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
