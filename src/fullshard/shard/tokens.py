"""A step's count of tokens, which `reduction="tokens"` divides sums of gradients by."""

from __future__ import annotations

import torch

from ..comm import Comm, Pending, has_streams, turns_on
from ..mesh import MeshAxes
from ..watcher import RANK
from .messages import other_counts_of_batches


class TokenCount:
    """A step's count of tokens over all ranks of a mesh, and how many backwards it is for.

    One all-reduce of three integers per axis of the mesh, issued when this is made and waited for by the first
    reduction. The host never waits for an accelerator: the sum stays on the device.

    Ownership: `_sums` is allocated here, on the stream that is current, and read under any.

    Args:
        own: this rank's count over all micro-batches of the step, [1], int64, on the mesh's device.
        backwards: how many micro-batches these are.
        axes: of the root.
        comm: collectives.

    Attributes:
        backwards: how many backwards the count is for.
        left: how many of them are still to come.
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
        """The count over all ranks and micro-batches, at least 1: [1], on the device, to divide a buffer of `dtype` by.

        Returns:
            float64 for buffers of double precision, else float32, which holds counts below 2**24 exactly.

        Raises:
            DivergenceError: ranks gave numbers of micro-batches that differ; looked at on a CPU only.
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
        _, everyone, squares = self._sums.tolist()
        if squares * self._axes.world != everyone**2:  # equal only if all numbers are (Cauchy-Schwarz)
            raise other_counts_of_batches(self._axes.global_rank, self.backwards, everyone, self._axes.world)

    def let_go(self) -> None:
        """Its memory may be given to others: its all-reduce and the streams that it was read under are waited for."""
        if self._pending is not None:
            self._pending.wait()
        self._turns.take()
        self._turns.give()
