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


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number that follows from a tensor's bits: 0-dim int64. Nothing waits for the device.

    Words of 8 bytes are summed in runs of 1024, modulo 2^64, and the sums weighted by odd numbers: runs that change
    places are noticed, words that change places within one are not.
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
    """`tensor`, contiguous, as a collective that sums takes it: itself, or [2 * numel] real numbers of complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` in real numbers; of complex ones their parts along a last dim of two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
