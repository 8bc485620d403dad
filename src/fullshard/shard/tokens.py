"""A step's token count, by which `reduction="tokens"` divides sums of gradients."""

from __future__ import annotations

import torch

from ..comm import Comm, Pending, has_streams, turns_on
from ..mesh import MeshAxes
from ..watcher import RANK
from .messages import other_counts_of_batches


class TokenCount:
    """A step's token count over all ranks of a mesh, and the number of backwards that it covers.

    Costs one all-reduce of three integers per axis of the mesh, issued on construction and waited for by the first
    reduction. The host never waits for an accelerator: the sum stays on the device.

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
        for axis in axes.all:
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
