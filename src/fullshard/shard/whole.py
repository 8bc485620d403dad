"""A whole bucket outside of training: in its storage dtype, in memory of the caller's."""

from __future__ import annotations

import torch

from ..comm import Comm
from .bucket import Bucket


def gather_whole(comm: Comm, bucket: Bucket, local: torch.Tensor) -> torch.Tensor:
    """All ranks' slices of a flat bucket side by side. Collective over the shard axis.

    Args:
        bucket: flat, with one segment.
        local: [shard_numel], laid out as the shard (the shard itself, a gradient, optimizer state), any dtype.

    Returns:
        [world * shard_numel], of which `slot.offset` is each parameter's first element.
    """
    local = local.to(bucket.axes.device)
    whole = local.new_empty(bucket.layout.gathered_numel)
    comm.gather(bucket.axes.shard, whole, local).wait()
    return whole


def whole_views(bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
    """Per member, its view of what `gather_whole` returned, of the parameter's shape and strides."""
    base = whole.storage_offset()
    return [
        whole.as_strided(member.slot.shape, member.slot.stride, base + member.slot.offset) for member in bucket.members
    ]
