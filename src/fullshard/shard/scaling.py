"""How a sum of gradients over ranks is scaled. `docs/gradients.md` has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import Comm, Pending, has_streams, turns_on
from ..mesh import MeshAxes
from ..watcher import RANK
from .messages import other_counts_of_batches

REDUCTIONS = ("mean", "sum", "tokens")
"""Values of `reduction=`: the mean over ranks, the sum, or the sum divided by the step's token count."""


class TokenCount:
    """A step's token count over all ranks of a mesh, and the number of backwards that it covers.

    Costs one all-reduce of three integers per axis of `MeshAxes.spanning`, issued on construction and waited for by the
    first reduction. The host never waits for an accelerator: the sum stays on the device.

    Ownership: `_sums` is allocated here, on the current stream, and read under any stream.

    Args:
        own: this rank's count over all micro-batches of the step, [1], int64, on the mesh's device.
        backwards: number of these micro-batches.
        axes: the root's axes.
        comm: collectives.

    Attributes:
        backwards: number of backwards that the count covers.
        left: number of them that have not run yet.
    """

    def __init__(self, own: torch.Tensor, backwards: int, axes: MeshAxes, comm: Comm) -> None:
        self.backwards = self.left = backwards
        self._axes, self._compares = axes, comm.communicates and axes.shard.backend != "fake"
        self._turns = turns_on(axes.device)
        numbers = [torch.full_like(own, backwards), torch.full_like(own, backwards**2)]
        self._sums = torch.cat([own, *numbers])  # [3], int64: tokens, micro-batches, their square
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self._pending: Pending | None = None
        for axis in axes.spanning:
            if axis.size > 1:
                if self._pending is not None:
                    self._pending.wait()
                RANK.talks("counts of tokens")
                self._pending = comm.all_reduce(axis, self._sums, False)

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the count over all ranks and micro-batches, at least 1, as a divisor for a buffer of `dtype`.

        Returns:
            [1], on the device: float64 for double-precision buffers, else float32, which is exact below 2**24.

        Raises:
            DivergenceError: ranks counted different numbers of micro-batches; checked on a CPU only.
        """
        self._turns.take()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._compares and not has_streams(self._axes.device):
                self._compare()
        kind = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        if kind not in self._by_dtype:
            self._by_dtype[kind] = self._sums[:1].clamp(min=1).to(kind)
        return self._by_dtype[kind]

    def _compare(self) -> None:
        _, total, squares = self._sums.tolist()
        if squares * self._axes.world != total**2:  # equal only if all ranks' numbers are equal (Cauchy-Schwarz)
            raise other_counts_of_batches(self._axes.global_rank, self.backwards, total, self._axes.world)

    def let_go(self) -> None:
        """Wait for the all-reduce and for the streams that read the count, so that its memory can be reused."""
        if self._pending is not None:
            self._pending.wait()
        self._turns.take()
        self._turns.give()


@dataclass(frozen=True)
class ReduceSettings:
    """How a unit's gradients are reduced.

    Attributes:
        sync: reduce after backward; False keeps gradients unsharded, without communication.
        all_reduce: also reduce over the replicate axis; False: over the shard axis only, for now.
        reduction: "mean" over ranks, "sum", or "tokens": the sum divided by the step's token count.
        divide_factor: divides the sum over ranks; None: the number of ranks. Only with "mean", as is `force_sum`.
        force_sum: sum and scale separately, instead of the backend's averaging.
        hook: called with each reduced slice [shard_numel] before it becomes `.grad`.
        fill_unused: parameters that no rank used get zeros, and the unit takes part in every reduction.
        max_in_flight: number of units whose reduction buffers may be alive at once.
        check_nonfinite: record which of this rank's gradients are not finite, before they are reduced.
        tokens: the step's token count, set on the root; None: not set yet.
        usual: whether reductions start and end the usual way; see `runtime/usual.py`.
    """

    sync: bool = True
    all_reduce: bool = True
    reduction: str = "mean"
    divide_factor: float | None = None
    force_sum: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    fill_unused: bool = False
    max_in_flight: int = 1
    check_nonfinite: bool = False
    tokens: TokenCount | None = None
    usual: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        asks = self.hook is not None or self.fill_unused or self.check_nonfinite or self.reduction == "tokens"
        object.__setattr__(self, "usual", self.sync and self.all_reduce and not asks)

    @property
    def fact(self) -> str:
        """The part of these settings that ranks compare; empty if it is the default."""
        reduction = "" if self.reduction == "mean" else f", reduction {self.reduction}"
        divided = "" if self.divide_factor is None else f", divided by {self.divide_factor:g}"
        return f"{reduction}{divided}{', with sums forced' if self.force_sum else ''}"


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks is scaled to the gradient.

    Attributes:
        mean: the collective itself averages, on every axis with more than one rank.
        before: factor applied to the buffer before the reduction.
        after: factor applied to the reduced slice.
        divides_buffer, divides_slice: [1], float32 or float64, on the device; None: no division. They have one dim so
            that a 16-bit buffer is divided in their precision: a token count does not fit into 8 or 11 bits.
    """

    mean: bool
    before: float = 1.0
    after: float = 1.0
    divides_buffer: torch.Tensor | None = None
    divides_slice: torch.Tensor | None = None


MEAN = Scaling(True)
"""The collective averages."""


def scaling_of(comm: Any, world: int, dtype: torch.dtype, rules: ReduceSettings, total: TokenCount | None) -> Scaling:
    """Return how to scale a sum of `dtype` over the `world` ranks of a bucket.

    In float16 a sum over many ranks overflows, and dividing by all of them first underflows, so the division is split:
    by a power of two near the square root before, by the rest after (as PyTorch's FSDP documents). A rank's sum over
    tokens is first scaled to the size of a mean.

    Args:
        comm: collectives; a communication hook does its own scaling.
        world: number of ranks.
        dtype: dtype of the reduction.
        rules: the unit's settings.
        total: the token count that divides sums; None: no division.
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
    """Return the least power of two that is at least the square root of `world`."""
    power = 1.0
    while power * power < world:
        power *= 2
    return power
