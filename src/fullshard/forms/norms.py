"""Norms of whole tensors whose elements are split into runs over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..comm import reduce_value
from ..torch_private.local_tensor import inside
from .run import Run


def norms(shards: list[Any], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norms of the whole tensors of these shards: local norms, then one all-reduce per axis."""
    local = [inside(s) for s in shards]
    neutral = math.inf if order == -math.inf or order < 0 else 0.0  # of no elements
    empty = [torch.full((), neutral, dtype=(dtype or t.dtype).to_real(), device=t.device) for t in local]
    results = [
        torch.linalg.vector_norm(t, order, dtype=dtype) if t.numel() else e for t, e in zip(local, empty, strict=True)
    ]
    by_axis: dict[int, list[int]] = {}
    for i, shard in enumerate(shards):
        if (run := getattr(shard, "_run", None)) is not None:
            by_axis.setdefault(id(run.axis.group), []).append(i)
    for members in by_axis.values():
        run = shards[members[0]]._run
        stacked = torch.stack([results[i] for i in members])
        if math.isinf(order):
            stacked = _reduced(run, stacked, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
        elif order == 0:  # the number of nonzero elements
            stacked = _reduced(run, stacked, dist.ReduceOp.SUM)
        else:
            stacked = _reduced(run, stacked**order, dist.ReduceOp.SUM) ** (1.0 / order)
        for i, value in zip(members, stacked.unbind(), strict=True):
            results[i] = value
    return results


def _reduced(run: Run, value: torch.Tensor, op: Any) -> torch.Tensor:
    return reduce_value(value, op, run.axis.group) if run.axis.size > 1 else value
