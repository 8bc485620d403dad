"""How a sum of gradients over ranks becomes the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes the gradient.

    Attributes:
        mean: the collective itself averages, on every axis of more than one rank.
        before: factor applied to the buffer before the reduction.
        after: factor applied to the reduced slice.
    """

    mean: bool
    before: float = 1.0
    after: float = 1.0

    @classmethod
    def choose(cls, world: int, dtype: torch.dtype, factor: float | None, force_sum: bool) -> Scaling:
        """The average over `world` ranks, or the sum divided by `factor` if one is given.

        In float16 a sum over many ranks overflows and a division by all of them first underflows, so the division
        is split: by a power of two near the square root before, the rest after (as PyTorch's FSDP documents).
        """
        divide = float(world if factor is None else factor)
        if dtype == torch.float16:
            before = 1.0
            while world % (before * 2) == 0 and world / (before * 2) > before:
                before *= 2
            return cls(False, 1.0 / before, before / divide)
        if factor is None and not force_sum:
            return cls(True)
        return cls(False, 1.0, 1.0 / divide)
