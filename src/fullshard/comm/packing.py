"""Floats as 8-bit values with a scale for each block, so that collectives send a quarter of the bytes of float32.

    a piece | scales           | values                                  | padding
            | float32, one for | 8 bits each, BLOCK of them to a scale;  | to a multiple of
            | each block       | the last block may be shorter           | 16 bytes

A block's largest magnitude becomes the largest value of the 8-bit dtype. Int8 is rounded to the nearest. A block that
contains NaN or infinity comes back without finite values, so that checks for them still work.

Block-wise quantisation: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861),
section 2.1. Of gathered weights and of reduced gradients: Wang et al. 2023, "ZeRO++" (arXiv:2306.10209), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..dtypes import LARGEST_OF_8_BITS

BLOCK = 256
"""Elements that share a scale."""
_ALIGNMENT = 16  # bytes


def packed_bytes(numel: int) -> int:
    """Bytes of a piece of `numel` elements."""
    return -(-(numel + 4 * -(-numel // BLOCK)) // _ALIGNMENT) * _ALIGNMENT


class Packing:
    """Packs fixed tensors of floats into fixed bytes, piece by piece, and unpacks them.

    Args:
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.
        floats: tensors [rows, n], each with an n of its own.
        packed: uint8 [rows, sum of `packed_bytes(n)`], on the same device.
        consumes: whether `pack` may overwrite the floats; saves its temporary memory if they are float32.
        most: elements that are scaled at once, into temporary float32 memory.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        floats: Sequence[torch.Tensor],
        packed: torch.Tensor,
        consumes: bool = False,
        most: int = 2**22,
    ) -> None:
        self._consumes = consumes
        self._largest, self._rounds = LARGEST_OF_8_BITS[dtype], not dtype.is_floating_point
        self._blocks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # [rows, blocks, n]; scales n = 1
        at = 0
        for tensor in floats:
            rows, numel = tensor.shape
            if not numel:
                continue
            blocks, rest = divmod(numel, BLOCK)
            scales = packed.narrow(1, at, 4 * (blocks + (rest > 0))).view(torch.float32).unsqueeze(2)
            values = packed.narrow(1, at + 4 * scales.shape[1], numel).view(dtype)
            step = max(most // (rows * BLOCK), 1)
            runs = [(first, min(step, blocks - first), BLOCK) for first in range(0, blocks, step)]
            for first, count, length in (*runs, *([(blocks, 1, rest)] if rest else [])):
                cut = first * BLOCK, count * length
                self._blocks.append(
                    (
                        tensor.narrow(1, *cut).view(rows, count, length),
                        values.narrow(1, *cut).view(rows, count, length),
                        scales.narrow(1, first, count),
                    )
                )
            at += packed_bytes(numel)

    def pack(self) -> None:
        """Write the bytes."""
        for floats, values, scales in self._blocks:
            scales.copy_(torch.linalg.vector_norm(floats, math.inf, 2, keepdim=True)).mul_(1 / self._largest).clamp_(
                min=torch.finfo(torch.float32).tiny
            )
            scaled = floats.div_(scales) if self._consumes and floats.dtype == torch.float32 else floats / scales
            values.copy_(scaled.round_() if self._rounds else scaled)

    def add(self, factor: float) -> None:
        """Add the unpacked bytes, times `factor`, to the floats."""
        for floats, values, scales in self._blocks:
            floats.add_(values.to(torch.float32).mul_(scales), alpha=factor)

    def unpack(self) -> None:
        """Write the floats."""
        for floats, values, scales in self._blocks:
            floats.copy_(values).mul_(scales)


def packed(floats: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The bytes (uint8, one dim) of the pieces of these lengths that make up `floats` [sum of lengths]."""
    out = torch.empty(sum(map(packed_bytes, lengths)), dtype=torch.uint8, device=floats.device)
    Packing(dtype, floats.view(1, -1).split(list(lengths), 1), out.view(1, -1)).pack()
    return out


def rounded(floats: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype, like: torch.dtype) -> torch.Tensor:
    """`floats`, as for `packed`, after packing and unpacking, in the dtype `like`."""
    out = torch.empty_like(floats, dtype=like)
    in_bytes = packed(floats, lengths, dtype).view(1, -1)
    Packing(dtype, out.view(1, -1).split(list(lengths), 1), in_bytes).unpack()
    return out
