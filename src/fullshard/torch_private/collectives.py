"""Gathers, reductions and exchanges called on the process group itself, asynchronously.

Private torch API, all methods of `ProcessGroup`: `allreduce` and `broadcast`, which work for groups unknown to
`torch.distributed`; `_allgather_base`, `_reduce_scatter_base` and `alltoall_base`; and for several at once
`allgather_into_tensor_coalesced` and `reduce_scatter_tensor_coalesced`. `_allgather_base` and `_reduce_scatter_base`
are called on the group's backend (`ProcessGroup._get_backend`) if no dispatch mode is active: the group's methods would
go through torch's dispatcher, 3 us more; and within `torch._C._AutoDispatchBelowADInplaceOrView`: gloo and the fake
group cut their buffers into a slice per rank, and autograd would track every slice, 8 us more at 64 ranks. The public
alternatives are `torch.distributed.all_reduce`, `broadcast`, `all_gather_single` and `reduce_scatter_single`
(`all_gather_into_tensor` and `reduce_scatter_tensor` before torch 2.13) and `all_to_all_single`; they add 3 to 10 us of
logging and argument checks to each call, three times per unit and step. They are used for groups implemented in Python
that do not override the method: torch's own would look for a backend that these do not have.
`tests/test_private_api.py` fails when one is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # type: ignore[attr-defined]

from ..dtypes import KNOWN, as_moved, as_summed
from .dispatch_modes import copy_hidden, modes_active
from .transforms import current_transform

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old names.
_public_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_public_reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GATHER, _REDUCE, _EXCHANGE = "_allgather_base", "_reduce_scatter_base", "alltoall_base"
_GATHERS, _REDUCES = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"
_without_views: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd tracks no views or in-place changes; the engine's own buffers need no tracking."""


def _async(options: Any, op: Any = None) -> Any:
    if op is not None:
        options.reduceOp = op
    options.asyncOp = True
    return options


_SUM = _async(dist.ReduceScatterOptions(), dist.ReduceOp.SUM)
_AVG = _async(dist.ReduceScatterOptions(), dist.ReduceOp.AVG)
_REDUCE_ALL = _async(dist.AllreduceOptions(), dist.ReduceOp.SUM)
_REDUCE_ALL_AVG = _async(dist.AllreduceOptions(), dist.ReduceOp.AVG)
_PLAIN_GATHER = _async(AllgatherOptions())
_PLAIN_EXCHANGE = _async(AllToAllOptions())


def _has(group: dist.ProcessGroup, name: str) -> bool:
    """Whether `group` implements the method `name`: torch's own groups do, and classes that override it."""
    kind, of_torch = type(group), getattr(dist.ProcessGroup, name)
    return kind is dist.ProcessGroup or getattr(kind, name, of_torch) is not of_torch


Call = Callable[[], Any]
"""A collective on fixed tensors: each call starts it and returns its work."""


def _called(group: dist.ProcessGroup, name: str, *args: Any) -> Call:
    """A call of a group's method that bypasses torch's dispatcher, unless dispatch modes or a transform are active."""
    dispatched = partial(getattr(group, name), *args)
    plain = type(group) is dist.ProcessGroup and type(args[0]) is torch.Tensor and current_transform() is None
    if not plain:
        return dispatched
    method = getattr(group._get_backend(args[0].device), name, None)
    if method is None:
        return dispatched
    direct = partial(method, *args)

    def started() -> Any:
        if modes_active():
            return dispatched()
        with _without_views():
            return direct()

    return started


def all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """An all-gather of equal shards [S] of any dtype into out [world * S]."""
    if out.dtype not in KNOWN:
        out, shard = as_moved(out), as_moved(shard)
    if _has(group, _GATHER):
        return _called(group, _GATHER, out, shard, _PLAIN_GATHER)
    return partial(_public_gather, out, shard, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, mean: bool) -> Call:
    """A reduce-scatter of buffers [world * S] into out [S]."""
    if out.is_complex():
        out, buffer = as_summed(out), as_summed(buffer)
    if _has(group, _REDUCE):
        return _called(group, _REDUCE, out, buffer, _AVG if mean else _SUM)
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    return partial(_public_reduce, out, buffer, op=op, group=group, async_op=True)


def exchange(out: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-to-all of equal slices, of any dtype: slice r of every buffer goes to rank r; returns the work."""
    out, buffer = as_moved(out), as_moved(buffer)
    if _has(group, _EXCHANGE):
        return group.alltoall_base(out, buffer, [], [], _PLAIN_EXCHANGE)
    return dist.all_to_all_single(out, buffer, group=group, async_op=True)


def swap(out: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, rank: int) -> Any:
    """Start to send `sent` to the other rank of a group of two, and to receive `out` from it; returns the work.

    An all-to-all without this rank's own slice, which gloo would copy.

    Args:
        rank: this rank in the group.
    """
    out, sent = as_moved(out), as_moved(sent)
    splits = [0, out.numel()] if rank == 0 else [out.numel(), 0]
    if _has(group, _EXCHANGE):
        return group.alltoall_base(out, sent, splits, splits, _PLAIN_EXCHANGE)
    return dist.all_to_all_single(out, sent, splits, splits, group=group, async_op=True)


def swap_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, rank: int) -> Call:
    """An all-gather of two shards [S] of any dtype into out [2 * S]: by a swap, and a copy of this rank's own shard."""
    slices: list[torch.Tensor] = []  # views of `out`, by rank, created when it first has memory

    def started() -> Any:
        if not slices:
            slices.extend(out.view(2, -1))
        copy_hidden(slices[rank], shard)
        return swap(slices[1 - rank], shard, group, rank)

    return started


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, mean: bool) -> Any:
    """Start an all-reduce in place; returns the work."""
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    if type(group) is not dist.ProcessGroup:
        return dist.all_reduce(as_summed(tensor), op=op, group=group, async_op=True)
    return group.allreduce([as_summed(tensor)], _REDUCE_ALL_AVG if mean else _REDUCE_ALL)


def all_reduce_by(op: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-reduce in place by any `dist.ReduceOp`; returns the work."""
    if type(group) is not dist.ProcessGroup:
        return dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return group.allreduce([tensor], _async(dist.AllreduceOptions(), op))


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> Any:
    """Start a broadcast from the group's rank `source`; returns the work."""
    if type(group) is not dist.ProcessGroup:
        return dist.broadcast(as_moved(tensor), group_src=source, group=group, async_op=True)
    options = _async(dist.BroadcastOptions())
    options.rootRank = source
    return group.broadcast([as_moved(tensor)], options)


def all_gather_many(outs: list[torch.Tensor], shards: list[torch.Tensor], group: dist.ProcessGroup) -> list[Call]:
    """Several all-gathers, in one call if the group supports that: as bytes if their dtypes differ."""
    if len(outs) > 1 and _has(group, _GATHERS):
        alike = len({out.dtype for out in outs}) == 1
        moved: Callable[[torch.Tensor], torch.Tensor] = as_moved if alike else methodcaller("view", torch.uint8)
        pairs = [*map(moved, outs)], [*map(moved, shards)]
        return [partial(group.allgather_into_tensor_coalesced, *pairs, _PLAIN_GATHER)]
    return [all_gather(out, shard, group) for out, shard in zip(outs, shards, strict=True)]


def reduce_scatter_many(
    outs: list[torch.Tensor], buffers: list[torch.Tensor], group: dist.ProcessGroup, mean: bool
) -> list[Call]:
    """Several reduce-scatters, in one call if the group supports that."""
    if len(outs) > 1 and _has(group, _REDUCES):
        pairs = [as_summed(out) for out in outs], [as_summed(buffer) for buffer in buffers]
        return [partial(group.reduce_scatter_tensor_coalesced, *pairs, _AVG if mean else _SUM)]
    return [reduce_scatter(out, buffer, group, mean) for out, buffer in zip(outs, buffers, strict=True)]
