"""Collectives by `torch.distributed`: gloo, NCCL and any other backend of a process group.

Streams. Every collective is issued asynchronously from the compute stream (an offloaded shard's gather from the stream
that copied it, `lanes.py`): the backend runs it on its own stream, which first waits for the work queued on the compute
stream so far, and `Work.wait()` makes the compute stream wait for it. So all buffers come from and return to the
compute stream's memory pool in program order: frees are deterministic, nothing is recorded on other streams, and two
gathered units alternate in the same two blocks. A collective issued before a unit's kernels overlaps with them.

gloo. Its reduce-scatter is an all-reduce of the whole buffer followed by a slice: twice the bytes needed. An
all-to-all exchange followed by a local sum moves each byte once and measured 1.9 times as fast on 2 and 2 to 5 times
on 4 ranks (docs/decisions/0003-gloo-reduce.md). The sum runs in rank order, so the result does not depend on timing.
Its all-reduce passes slices around a ring twice: a few numbers take one step if every rank sends them to all others.
Two ranks swap slices, also to gather, since gloo's own collectives copy and relay more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..dtypes import as_summed
from ..mesh import Axis
from ..torch_private.collectives import (
    all_gather,
    all_gather_many,
    all_reduce,
    broadcast,
    exchange,
    reduce_scatter,
    reduce_scatter_many,
    swap,
    swap_gather,
)
from .protocol import DONE, Costs, Pending
from .watched import watched, watched_calls

# Seconds for a collective on two ranks and for each further rank, bytes per second of a copy. A gather around a ring of
# p ranks takes p - 1 steps (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
# in MPICH", IJHPCA 19, 2005, section 4). The first of gloo's is measured, over loopback; the others are estimates.
_CPU_COSTS = (300e-6, 50e-6, 4e9)
_ACCELERATOR_COSTS = (10e-6, 2e-6, 1e12)


_FEW = 1 << 20
"""Bytes that a rank sends at most for an all-reduce of integers in a single step."""


def line_of(axis: Axis) -> dist.ProcessGroup:
    """The group that carries the engine's collectives over an axis."""
    return axis.lines.data if axis.backend == "gloo" else axis.group


class TorchComm:
    """`torch.distributed` collectives.

    Args:
        local_shortcut: whether an axis of one rank uses a local copy instead of a collective.
    """

    kind = "torch"
    communicates = True

    def __init__(self, *, local_shortcut: bool = True) -> None:
        self.local_shortcut = local_shortcut

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        (start,) = self._gathers(axis, [out], [shard])
        return start()

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        (start,) = self._reductions(axis, [out], [buffer], mean)
        return start()

    def plan_gathers(
        self, axis: Axis, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> list[Callable[[], Pending]]:
        """See `Comm`. Calls the `gather` of a subclass that overrides it."""
        if type(self).gather is not TorchComm.gather:
            return [partial(self.gather, axis, out, shard) for out, shard in zip(outs, shards, strict=True)]
        return self._gathers(axis, list(outs), list(shards))

    def plan_reductions(
        self, axis: Axis, outs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], mean: bool
    ) -> list[Callable[[], Pending]]:
        """See `Comm`, and `plan_gathers`."""
        if type(self).reduce is not TorchComm.reduce:
            return [partial(self.reduce, axis, out, buffer, mean) for out, buffer in zip(outs, buffers, strict=True)]
        return self._reductions(axis, list(outs), list(buffers), mean)

    def _gathers(self, axis: Axis, outs: list[torch.Tensor], shards: list[torch.Tensor]) -> list[Callable[[], Pending]]:
        pairs = zip(outs, shards, strict=True)
        if axis.size == 1 and self.local_shortcut:
            return [partial(_copy, out, shard) for out, shard in pairs]
        if axis.backend == "gloo" and axis.size == 2:
            return [watched_calls(axis, swap_gather(out, shard, line_of(axis), axis.rank)) for out, shard in pairs]
        if axis.backend in ("gloo", "fake"):  # issuing several at once saves nothing there
            return [watched_calls(axis, all_gather(out, shard, line_of(axis))) for out, shard in pairs]
        return all_gather_many(outs, shards, line_of(axis))

    def _reductions(
        self, axis: Axis, outs: list[torch.Tensor], buffers: list[torch.Tensor], mean: bool
    ) -> list[Callable[[], Pending]]:
        pairs = zip(outs, buffers, strict=True)
        if axis.size == 1 and self.local_shortcut:
            return [partial(_copy, out, buffer) for out, buffer in pairs]
        if axis.backend == "gloo":
            kind = _Swap if axis.size == 2 else _Exchange
            return [partial(kind, axis, as_summed(out), as_summed(buffer), mean) for out, buffer in pairs]
        if axis.backend == "fake":
            return [reduce_scatter(out, buffer, line_of(axis), mean) for out, buffer in pairs]
        return reduce_scatter_many(outs, buffers, line_of(axis), mean)

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        work = exchange(out, buffer, line_of(axis))
        return watched(axis, work) if work and axis.backend != "fake" else DONE

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        if axis.size == 1 and self.local_shortcut:
            return DONE
        if axis.backend != "gloo":
            return all_reduce(tensor, axis.group, mean) or DONE
        if axis.size > 2 and tensor.dtype == torch.int64 and not mean and tensor.nbytes * axis.size <= _FEW:
            return _Numbers(axis, tensor)
        work = all_reduce(tensor, line_of(axis), mean)
        return watched(axis, work) if work else DONE

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        if axis.size == 1 and self.local_shortcut:
            return DONE
        work = broadcast(tensor, line_of(axis), source)
        return watched(axis, work) if work else DONE

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        if axis.backend != "gloo" or axis.size == 1:
            return 0
        return buffer.nbytes if axis.size > 2 else buffer.nbytes // 2

    def costs(self, axis: Axis) -> Costs:
        """On accelerators parameters share one collective, until measurements there show that several are faster."""
        cpu = axis.backend == "gloo"
        first, further, bandwidth = _CPU_COSTS if cpu else _ACCELERATOR_COSTS
        return Costs(first + further * max(axis.size - 2, 0), bandwidth, shares=not cpu)


def _copy(out: torch.Tensor, shard: torch.Tensor) -> Pending:
    """The collective of a single rank."""
    out.copy_(shard)
    return DONE


class _Exchange:
    """A reduce-scatter in two steps: every rank receives its slice of every buffer, then sums them in rank order.

    Owns `received` [world * S] from issue to wait.
    """

    __slots__ = ("mean", "out", "received", "work", "world")

    def __init__(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> None:
        self.out, self.mean, self.world = out, mean, axis.size
        self.received: torch.Tensor | None = torch.empty_like(buffer)
        self.work = watched(axis, exchange(self.received, buffer, line_of(axis)))

    def wait(self) -> None:
        if self.received is None:
            return
        self.work.wait()
        torch.sum(self.received.view(self.world, -1), 0, out=self.out)
        if self.mean:
            self.out.mul_(1.0 / self.world)
        self.received = self.work = None


class _Numbers(_Exchange):
    """An all-reduce of a few integers, in place: every rank sends them to all others and sums what it receives.

    Owns `sent` [world * n] until the wait, too.
    """

    __slots__ = ("sent",)

    def __init__(self, axis: Axis, tensor: torch.Tensor) -> None:
        self.sent: torch.Tensor | None = tensor.view(-1).repeat(axis.size)
        super().__init__(axis, tensor.view(-1), self.sent, mean=False)

    def wait(self) -> None:
        super().wait()
        self.sent = None


class _Swap:
    """The same over two ranks, without a copy of the slice that a rank has itself: it is summed from the buffer.

    Owns `received` [S] from issue to wait.
    """

    __slots__ = ("mean", "out", "own", "received", "work")

    def __init__(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> None:
        slices = buffer.view(2, -1)
        self.out, self.mean = out, mean
        self.own: Any = slices[axis.rank]
        self.received: torch.Tensor | None = torch.empty_like(out)
        self.work = watched(axis, swap(self.received, slices[1 - axis.rank], line_of(axis), axis.rank))

    def wait(self) -> None:
        if self.received is None:
            return
        self.work.wait()
        torch.add(self.own, self.received, out=self.out)
        if self.mean:
            self.out.mul_(0.5)
        self.received = self.work = self.own = None
