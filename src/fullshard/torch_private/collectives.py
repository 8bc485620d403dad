"""Gathers, reductions and exchanges called on the process group itself, asynchronously.

Private torch API: `ProcessGroup._allgather_base`, `_reduce_scatter_base` and `alltoall_base`. The public alternatives
are `torch.distributed.all_gather_single`, `reduce_scatter_single` (`all_gather_into_tensor`, `reduce_scatter_tensor`
before torch 2.13) and `all_to_all_single`; they add 3 to 10 us of logging and argument checks to each call, three times
per unit and step, and are what is used where a method is missing. `tests/test_private_api.py` says when one goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renames these two and warns about the old names; 2.11 knows only the old ones.
_public_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_public_reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HAS_DIRECT = all(hasattr(dist.ProcessGroup, m) for m in ("_allgather_base", "_reduce_scatter_base", "alltoall_base"))
"""Whether the private methods are there."""


def _options(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_SUM, _AVG = _options(dist.ReduceOp.SUM), _options(dist.ReduceOp.AVG)


def all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-gather of equal shards [S] into out [world * S]; returns the work."""
    if HAS_DIRECT:
        return group._allgather_base(out, shard)
    return _public_gather(out, shard, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, mean: bool) -> Any:
    """Start a reduce-scatter of buffers [world * S] into out [S]; returns the work."""
    if HAS_DIRECT:
        return group._reduce_scatter_base(out, buffer, _AVG if mean else _SUM)
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    return _public_reduce(out, buffer, op=op, group=group, async_op=True)


def exchange(out: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-to-all of equal slices: slice r of every buffer goes to rank r; returns the work."""
    if HAS_DIRECT:
        return group.alltoall_base(out, buffer, [], [])
    return dist.all_to_all_single(out, buffer, group=group, async_op=True)
