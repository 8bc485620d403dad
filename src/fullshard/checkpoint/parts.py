"""Between whole values of a parameter (or of optimizer state like it) and what the ranks of a unit hold of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import CheckpointError
from ..mesh import MeshAxes
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
    parallel = member.split
    if parallel is not None:
        whole = parallel.local_of_whole(whole)
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


def joined_whole(bucket: Bucket, member: Member, view: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter from the whole of this rank's tensor-parallel part; `view` itself if it has none.

    Collective over the tensor-parallel ranks.
    """
    parallel = member.split
    if parallel is None:
        return view
    whole: torch.Tensor = parallel.unsharded(view.detach()).full_tensor()
    return whole


def split_part(bucket: Bucket, member: Member, view: torch.Tensor, use_dtensor: bool, to_cpu: bool) -> Any:
    """As `split_whole`, of a parameter that may be split over tensor-parallel ranks besides.

    Raises:
        CheckpointError: its two meshes are not parts of one mesh, so that no DTensor can say how it is split.
    """
    parallel = member.split
    if parallel is None:
        return split_whole(view, bucket.axes, use_dtensor, to_cpu)
    if not parallel.outer_placements:
        raise CheckpointError(
            "A tensor-parallel parameter has a sharded state only over one mesh of both kinds of parallelism.",
            parameter=member.name,
            remedy='make the instance with device_mesh=mesh["dp"], a part of the mesh whose other part the '
            "parameter is on; or save FULL_STATE_DICT",
        )
    world, rank = bucket.axes.shard.size, bucket.axes.shard.rank
    chunks = view.chunk(world) if view.dim() else (view,)
    local = chunks[rank] if rank < len(chunks) else view.new_empty((0, *view.shape[1:]))
    return parallel.sharded(local.clone())
