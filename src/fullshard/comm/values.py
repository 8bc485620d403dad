"""Reduce and gather values over the ranks of a group outside of passes: norms, flags, sums, whole tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import device_of
from ..torch_private.collectives import all_gather, all_reduce_by
from ..watcher import RANK
from .meeting import own_lines
from .watched import Watched


def reduce_value(
    value: torch.Tensor, op: Any, group: dist.ProcessGroup | None, what: str = "values of all ranks"
) -> torch.Tensor:
    """All-reduce a small tensor in place, through the device of `group` if it lies elsewhere (offloading).

    Over gloo it uses the engine's own connections: a rank that makes the call alone gets an error that says so.

    Args:
        value: of a dtype that the group's backend can reduce.
        op: a `dist.ReduceOp`.
        group: None for the default group.
        what: the purpose, one of the watcher's `TALKS`.

    Raises:
        DivergenceError: other ranks do not make this call, or are gone.
    """
    group = group or dist.group.WORLD
    assert group is not None
    device = device_of(group)
    moved = value if value.device.type == device.type else value.to(device)
    lines = own_lines(group)
    if lines.all_own:
        RANK.talks(what)
        Watched(all_reduce_by(op, moved, lines.apart)).wait()
    else:  # on accelerators, or where no connections are possible
        dist.all_reduce(moved, op=op, group=group)
    return value if moved is value else value.copy_(moved)


def largest_value(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of all ranks' floating-point values, element by element; NaN where any rank's is.

    Collectives may leave NaN out. Collective; connections as above.
    """
    is_nan = value.isnan()
    both = torch.stack([value.masked_fill(is_nan, -math.inf), is_nan.to(value.dtype)])
    largest, nans = reduce_value(both, dist.ReduceOp.MAX, group).unbind()
    return largest.masked_fill(nans > 0, math.nan)


def values_of_all(
    local: torch.Tensor, group: dist.ProcessGroup, backend: str | None = None, what: str = "whole values"
) -> torch.Tensor:
    """Gather every rank's tensor, in the group's rank order: [ranks, *shape]. Collective; connections as above.

    Args:
        local: contiguous, of the same shape and dtype on all ranks, on the group's device.
        backend: see `own_lines`.
        what: the purpose, one of the watcher's `TALKS`.

    Raises:
        DivergenceError: other ranks do not make this call, or are gone.
    """
    size = dist.get_world_size(group)
    gathered = local.new_empty(size, *local.shape)
    if size == 1:
        return gathered.copy_(local)
    lines = own_lines(group, backend)
    RANK.talks(what)
    work = all_gather(gathered.view(-1), local.view(-1), lines.apart)()
    (Watched(work) if lines.all_own else work).wait()
    return gathered
