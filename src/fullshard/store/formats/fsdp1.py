"""ShardedTensors in pickles: what PyTorch's FSDP1 saves as a SHARDED_STATE_DICT.

`torch.load(weights_only=True)` rejects them, because their pickles call `getattr`. Here pickles are decoded as data
(`store/pickles.py`), and no process group is needed.
"""

from __future__ import annotations

from operator import add, lt

import torch

from ..names import checked_shape
from ..pickles import PickledCall, PickledTensor
from .state import TensorShards

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


def sharded_tensor(call: PickledCall) -> TensorShards | None:
    """The contents of a pickled ShardedTensor; None for any other class.

    Raises:
        Exception: any, if its state differs from that of PyTorch 2.13.
    """
    if call.name != SHARDED_TENSOR:
        return None
    shards, metadata = call.state[:2]
    shape, parts = checked_shape("a tensor", metadata.attributes["size"]), []
    for shard in shards:
        tensor, box = shard.attributes["tensor"], shard.attributes["metadata"].attributes
        offsets, sizes = (checked_shape("a shard", box[key]) for key in ("shard_offsets", "shard_sizes"))
        if not isinstance(tensor, PickledTensor) or tensor.shape != sizes:
            raise TypeError("the shape of a shard differs from its metadata")
        if len(offsets) != len(shape) or any(map(lt, shape, map(add, offsets, sizes))):
            raise TypeError("a shard extends beyond its tensor")
        parts.append((offsets, tensor))
    dtype = metadata.attributes["tensor_properties"].state[0]
    if not isinstance(dtype, torch.dtype) or any(tensor.dtype != dtype for _, tensor in parts):
        raise TypeError("the dtype of a shard differs from its metadata")
    return TensorShards(shape, dtype, tuple(parts), len(metadata.attributes["shards_metadata"]))
