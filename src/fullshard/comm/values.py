"""Small values that all ranks of a group compute together, outside of passes: norms, flags, sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..mesh import device_type_of, lines_of
from ..torch_private.collectives import all_reduce_by
from ..watcher import RANK
from .watched import Watched


def reduce_value(
    value: torch.Tensor, op: Any, group: dist.ProcessGroup | None, what: str = "values of all ranks"
) -> torch.Tensor:
    """All-reduce a small tensor in place, by way of the device that `group` serves if it lies elsewhere (offloaded).

    Over gloo it goes by the engine's own connections, if they are open: a rank that asks alone is told so.

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
    kind = device_type_of(group)
    moved = value if value.device.type == kind else value.to(kind)
    lines = lines_of(group, tuple(dist.get_process_group_ranks(group)))
    if lines.is_open:
        RANK.talks(what)
        Watched(all_reduce_by(op, moved, lines.apart)).wait()
    else:
        dist.all_reduce(moved, op=op, group=group)
    return value if moved is value else value.copy_(moved)
