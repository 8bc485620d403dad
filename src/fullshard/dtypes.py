"""Tensors as collectives take them. Backends know few dtypes: not complex numbers, small integers, 8-bit floats.

What is only moved is moved as bytes where its dtype is not known everywhere; what is summed is summed as real numbers.
"""

from __future__ import annotations

import torch

KNOWN = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""Dtypes that every backend moves and sums."""


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous, as a collective that only moves it takes it: itself, or its bytes [numel * itemsize]."""
    return tensor if tensor.dtype in KNOWN else tensor.view(-1).view(torch.uint8)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` in integers of its width: what compares equal is equal bit by bit, NaN too."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_summed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous, as a collective that sums takes it: itself, or [2 * numel] real numbers of complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` in real numbers; of complex ones their parts along a last dim of two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
