"""`ShardedTensor`: the tensors of FSDP1's sharded state dicts without a device mesh, and of existing checkpoints.

Private torch API: `torch.distributed._shard.sharded_tensor`. The public alternative is `DTensor`, which the wrapper
uses if made with `device_mesh=`; checkpoints of either load into both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import api as _api
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

Shard, ShardedTensor, ShardedTensorMetadata = _api.Shard, _api.ShardedTensor, _api.ShardedTensorMetadata  # type: ignore[attr-defined]


def is_sharded_tensor(value: Any) -> bool:
    """Whether `value` is a `ShardedTensor`."""
    return isinstance(value, ShardedTensor)


def chunk_sharded_tensor(whole: torch.Tensor, group: Any, ranks: Sequence[int], rank: int) -> Any:
    """`whole`, split on dim 0 as by `torch.chunk` over `ranks` (global ranks of `group`). No communication.

    Args:
        rank: this process's index in `ranks`.
    """
    sizes = [chunk.size(0) for chunk in whole.chunk(len(ranks))]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    local = None
    if rank < len(sizes):
        local = whole.narrow(0, offsets[rank], sizes[rank]).clone(memory_format=torch.contiguous_format)
    boxes = [
        ([offset, *([0] * (whole.dim() - 1))], [size, *whole.shape[1:]])
        for offset, size in zip(offsets, sizes, strict=True)
        if size
    ]
    return _sharded_tensor(whole.shape, boxes, local, group, ranks, rank)


def slices_sharded_tensor(local: torch.Tensor, group: Any, ranks: Sequence[int], rank: int) -> Any:
    """A 1-D `ShardedTensor` of which every rank holds `local` [S], in rank order. No communication."""
    numel = local.numel()
    boxes = [([index * numel], [numel]) for index in range(len(ranks))]
    return _sharded_tensor(torch.Size([numel * len(ranks)]), boxes, local, group, ranks, rank)


def _sharded_tensor(
    size: torch.Size,
    boxes: list[tuple[list[int], list[int]]],
    local: torch.Tensor | None,
    group: Any,
    ranks: Sequence[int],
    rank: int,
) -> Any:
    device = local.device if local is not None else torch.device("cpu")
    shards = []
    for index, (offset, extent) in enumerate(boxes):
        device_name = "cpu" if device.type == "cpu" else f"{device.type}:{index % torch.accelerator.device_count()}"
        shards.append(ShardMetadata(offset, extent, f"rank:{ranks[index]}/{device_name}"))  # the global rank
    local_shards = []
    if local is not None and rank < len(shards):
        local_shards = [Shard(local, shards[rank])]
    dtype = local.dtype if local is not None else torch.get_default_dtype()
    pinned = local is not None and local.is_pinned()
    metadata = ShardedTensorMetadata(shards, size, TensorProperties(dtype=dtype, pin_memory=pinned))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local_shards, metadata, process_group=group)


def gather_sharded_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """Gather a whole `ShardedTensor` on every rank. Collective over its process group.

    Args:
        value: the `ShardedTensor`.
        device: where its group communicates.
    """
    metadata = value.metadata()
    whole = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for shard in value.local_shards():
        box = whole
        for dim, (offset, size) in enumerate(
            zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        ):
            box = box.narrow(dim, offset, size)
        box.copy_(shard.tensor.detach())
    # An element is on one rank, and zero on all others: sums of bytes are exact in any dtype.
    dist.all_reduce(whole.view(-1).view(torch.uint8), group=value._process_group or dist.group.WORLD)
    return whole
