"""Views of tensors for collectives. Backends support few dtypes: no complex numbers, small integers, 8-bit floats.

Collectives that only move data move bytes if not every backend supports the dtype; those that sum use real numbers.
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
"""Dtypes that every backend can move and sum."""


LARGEST_OF_8_BITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Dtypes of 8 bits into which floats can be packed, with their largest value."""


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous `tensor` for collectives that only move data: itself, or its bytes [numel * itemsize]."""
    return tensor if tensor.dtype in KNOWN else tensor.view(-1).view(torch.uint8)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` as integers of the same width, to compare bit by bit, including NaN."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum of a tensor's bits: 0-dim int64, computed without waiting for the device.

    Words of 8 bytes are summed in runs of 1024, modulo 2^64, and the sums weighted by odd numbers: this detects runs
    that are swapped, but not words that are swapped within a run.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    words = octets[: octets.numel() // 8 * 8].view(torch.int64)
    whole = words.numel() // _RUN * _RUN
    sums = [words[:whole].view(-1, _RUN).sum(1), words[whole:].sum().view(1), octets[words.numel() * 8 :].sum().view(1)]
    runs = torch.cat(sums)
    return (runs * (torch.arange(runs.numel(), device=flat.device) * 2 + 0x9E3779B1)).sum()


_RUN = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_summed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous `tensor` for collectives that sum: itself, or for complex numbers [2 * numel] real numbers."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` as real numbers; for complex numbers their parts along an additional last dim of two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
