"""User-defined collectives, and reductions over a separate group, in front of another `Comm`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..mesh import Axis
from .hook import HookComm
from .messages import no_exchange, wrong_buffer
from .protocol import DONE, Comm, Forwarding, Pending, exchange_of


class _Allocates(Protocol):
    """The common part of `AllGather` and `ReduceScatter`, as `torch.distributed.fsdp` documents it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `size` that the collective communicates from or into."""


class AllGather(_Allocates, Protocol):
    """A user's all-gather, for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather input [S] of every rank of `group` into output [world * S]; returns a work to wait for, or None."""


class ReduceScatter(_Allocates, Protocol):
    """A user's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce this rank's slice of every input [world * S] into output [S]; returns a work, or None."""


class CustomComm(Forwarding):
    """A `Comm` with some of its collectives replaced.

    A user's collective communicates through memory from its own `allocate`, which costs one copy out of (gather) or
    into (reduce) that memory; the ledger does not count it.

    Args:
        inner: serves everything else.
        all_gather, reduce_scatter: the user's; None keeps `inner`'s.
        reduce_groups: by the ranks of a shard axis, a different group of the same ranks for its reductions.
    """

    def __init__(
        self,
        inner: Comm,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        reduce_groups: dict[tuple[int, ...], dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__(inner)
        self.all_gather, self.reduce_scatter = all_gather, reduce_scatter
        self.reduce_groups = reduce_groups or {}

    @property
    def replaces(self) -> bool:
        """Whether a user's collective is used."""
        return self.all_gather is not None or self.reduce_scatter is not None

    def changed(self, **changes: Any) -> Comm:
        """A copy with these replacements changed; `inner` itself if none remain."""
        replacements = {k: getattr(self, k) for k in ("all_gather", "reduce_scatter", "reduce_groups")} | changes
        return CustomComm(self.inner, **replacements) if any(replacements.values()) else self.inner

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        if self.all_gather is None:
            return self.inner.gather(axis, out, shard)
        buffer = self._allocate(self.all_gather, out)
        work = self.all_gather(buffer, shard, axis.group, async_op=True)
        return _CopiedOut(work, out, buffer)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        if self.reduce_scatter is None:
            return self.inner.reduce(self._reduce_axis(axis), out, buffer, mean)
        staged = self._allocate(self.reduce_scatter, buffer).copy_(buffer)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        group = self._reduce_axis(axis).group
        return _Holding(self.reduce_scatter(out, staged, group, op, async_op=True), staged)

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if self.reduce_scatter is not None:
            raise no_exchange(type(self.reduce_scatter).__name__)
        return exchange_of(self.inner)(self._reduce_axis(axis), out, buffer)

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        if self.reduce_scatter is None:
            return self.inner.scratch_bytes(axis, buffer)
        return buffer.numel() * buffer.element_size()

    def _reduce_axis(self, axis: Axis) -> Axis:
        if not self.reduce_groups:
            return axis
        group = self.reduce_groups.get(_ranks(axis))
        return axis if group is None else replace(axis, group=group)

    @staticmethod
    def _allocate(collective: _Allocates, like: torch.Tensor) -> torch.Tensor:
        buffer = collective.allocate(like.shape, dtype=like.dtype, device=like.device)
        expected = (tuple(like.shape), like.dtype, like.device)
        got = (tuple(buffer.shape), buffer.dtype, buffer.device) if isinstance(buffer, torch.Tensor) else buffer
        if got != expected:
            raise wrong_buffer(type(collective).__name__, expected, got)
        return buffer


class _Holding:
    """A user's collective in flight. Keeps its buffer alive until the wait."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self.work: Any = work or DONE
        self.buffer: torch.Tensor | None = buffer

    def wait(self) -> None:
        self.work.wait()
        self.buffer = None


class _CopiedOut(_Holding):
    """A gather into the user's memory, copied out at the wait."""

    def __init__(self, work: Any, out: torch.Tensor, buffer: torch.Tensor) -> None:
        super().__init__(work, buffer)
        self.out = out

    def wait(self) -> None:
        buffer = self.buffer
        super().wait()
        if buffer is not None:
            self.out.copy_(buffer)


def custom(comm: Comm, **changes: Any) -> Comm:
    """`comm` with the user's collectives or groups in front of it, behind a hook; see `CustomComm`."""
    if isinstance(comm, HookComm):
        return HookComm(custom(comm.inner, **changes), comm.state, comm.hook)
    return custom_of(comm).changed(**changes)


def custom_of(comm: Comm) -> CustomComm:
    """The user's collectives in front of `comm`, or behind its hook; without any, one that replaces nothing."""
    if isinstance(comm, HookComm):
        return custom_of(comm.inner)
    return comm if isinstance(comm, CustomComm) else CustomComm(comm)


_separate: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_separate = weakref.WeakKeyDictionary()
"""By default group, then by set of ranks."""


def separate_group(axis: Axis) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A second group of an axis' ranks, one per set of ranks; collective over them at the first call."""
    ranks = _ranks(axis)
    assert dist.group.WORLD is not None
    groups = _separate.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return {ranks: groups[ranks]}


def _ranks(axis: Axis) -> tuple[int, ...]:
    return axis.ranks or tuple(dist.get_process_group_ranks(axis.group))
