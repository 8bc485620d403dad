"""Between whole values of a parameter (or of optimizer state like it) and what the ranks of a unit hold of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm import MeshAxes
from ..shard import Bucket, Member
from .sharded_tensor import chunk_sharded_tensor, gather_sharded_tensor, is_sharded_tensor


def whole_of(value: Any, device: torch.device) -> torch.Tensor:
    """A whole plain tensor: `value` itself, or gathered from a `DTensor`, `FlatShard` or `ShardedTensor` (collective).

    Args:
        device: where ranks communicate.
    """
    if is_sharded_tensor(value):
        return gather_sharded_tensor(value, device)
    if hasattr(value, "full_tensor"):
        whole: torch.Tensor = value.full_tensor()
        return whole.detach()
    plain: torch.Tensor = value.detach()
    return plain


def cut_for(bucket: Bucket, member: Member, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole value, 1-D, in memory order; shares memory with `whole` where it can."""
    part = bucket.layout.part(member.slot, bucket.axes.shard.rank)
    memory = whole.permute(member.slot.spec.order).reshape(-1)
    return memory[part.start : part.start + part.numel]


def split_whole(whole: torch.Tensor, axes: MeshAxes, use_dtensor: bool, to_cpu: bool) -> Any:
    """A whole value split on dim 0 over the shard axis, as `torch.chunk`, in memory of its own. No communication.

    Returns:
        A `DTensor` or a `ShardedTensor`; a plain copy if nothing is to be split: 0-d, or one rank.
    """
    if to_cpu:
        whole = whole.cpu()
    if whole.dim() == 0 or axes.shard.size == 1:
        return whole.clone()
    if not use_dtensor:
        return chunk_sharded_tensor(whole, axes.shard)
    chunks = whole.chunk(axes.shard.size)
    rank = axes.shard.rank
    local = chunks[rank].clone() if rank < len(chunks) else whole.new_empty((0, *whole.shape[1:]))
    placements = [Shard(0)] if axes.replicate is None else [Replicate(), Shard(0)]
    return DTensor.from_local(
        local, axes.mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
