"""Values that all ranks of a group compute or gather together, outside of passes: norms, flags, sums, whole tensors."""

from __future__ import annotations

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
    """All-reduce a small tensor in place, by way of the device that `group` serves if it lies elsewhere (offloaded).

    Over gloo it goes by the engine's own connections: a rank that asks alone gets an error that says so.

    Args:
        value: of a dtype that the group's backend adds.
        op: a `dist.ReduceOp`.
        group: None: the default group.
        what: it is for, one of the watcher's `TALKS`.

    Raises:
        DivergenceError: other ranks do not ask for it, or are gone.
    """
    group = group or dist.group.WORLD
    assert group is not None
    device = device_of(group)
    moved = value if value.device.type == device.type else value.to(device)
    lines = own_lines(group)
    if lines.all_own:
        RANK.talks(what)
        Watched(all_reduce_by(op, moved, lines.apart)).wait()
    else:  # on accelerators, or where no connections can be had
        dist.all_reduce(moved, op=op, group=group)
    return value if moved is value else value.copy_(moved)


def values_of_all(mine: torch.Tensor, group: dist.ProcessGroup, backend: str | None = None) -> torch.Tensor:
    """Every rank's tensor, in the order of the group's ranks: [ranks, *shape]. Collective; connections as above.

    Args:
        mine: contiguous, of one shape and of any dtype on all ranks, where the group's tensors lie.
        backend: as of `own_lines`.

    Raises:
        DivergenceError: other ranks do not ask for it, or are gone.
    """
    size = dist.get_world_size(group)
    found = mine.new_empty(size, *mine.shape)
    if size == 1:
        return found.copy_(mine)
    lines = own_lines(group, backend)
    RANK.talks("whole values")
    work = all_gather(found.view(-1), mine.view(-1), lines.apart)()
    (Watched(work) if lines.all_own else work).wait()
    return found
