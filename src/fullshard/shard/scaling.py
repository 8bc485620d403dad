"""How a sum of gradients over ranks becomes the gradient. `docs/gradients.md` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

REDUCTIONS = ("mean", "sum", "tokens")
"""What `reduction=` may be: the mean over ranks, their sum, or the sum divided by a step's count of tokens."""


class Rules(Protocol):
    """What a reduction is told; the fields of `runtime.settings.ReduceSettings` of these names."""

    @property
    def reduction(self) -> str: ...

    @property
    def divide_factor(self) -> float | None: ...

    @property
    def force_sum(self) -> bool: ...

    @property
    def check_nonfinite(self) -> bool: ...


class Total(Protocol):
    """A number that sums are divided by, which the host need not know."""

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """[1], on the device, to divide a buffer of `dtype` by."""


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes the gradient.

    Attributes:
        mean: the collective itself averages, on every axis of more than one rank.
        before: factor applied to the buffer before the reduction.
        after: factor applied to the reduced slice.
        divides_buffer, divides_slice: [1], float32 or float64, on the device; None: nothing. With one dim, so that a
            buffer of 16 bits is divided in that precision: a count of tokens does not fit into 8 or 11 bits.
    """

    mean: bool
    before: float = 1.0
    after: float = 1.0
    divides_buffer: torch.Tensor | None = None
    divides_slice: torch.Tensor | None = None


MEAN = Scaling(True)
"""The collective averages."""


def scaling_of(comm: Any, world: int, dtype: torch.dtype, rules: Rules, total: Total | None) -> Scaling:
    """How a sum of `dtype` over the `world` ranks of a bucket becomes the gradient.

    In float16 a sum over many ranks overflows and a division by all of them first underflows, so the division is split:
    by a power of two near the square root before, the rest after (as PyTorch's FSDP documents). The sum over a rank's
    tokens is brought to the size of a mean first.

    Args:
        comm: collectives; a hook scales by itself.
        total: what sums are divided by; None: nothing.
    """
    half, factor = dtype == torch.float16, rules.divide_factor
    if getattr(comm, "scales_itself", False):
        return MEAN
    before = _power_near_root(world) if half else 1.0
    if rules.reduction == "mean":
        if factor is None and not rules.force_sum and not half:
            return MEAN
        return Scaling(False, 1.0 / before, before / float(world if factor is None else factor))
    if total is None:
        return Scaling(False)
    divisor, share = total.total(dtype), before / world
    return (
        Scaling(False, after=share, divides_buffer=divisor * share) if half else Scaling(False, divides_slice=divisor)
    )


def _power_near_root(world: int) -> float:
    """The largest power of two that divides `world` and is at most about its square root."""
    power = 1.0
    while world % (power * 2) == 0 and world / (power * 2) > power:
        power *= 2
    return power
