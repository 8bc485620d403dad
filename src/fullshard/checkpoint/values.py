"""Values of parameters, and of optimizer state like them: what a rank holds, the whole, and what files keep.

    part     this rank's part of a parameter in a buffer laid out as its bucket's shard
    local    the same part on its own: 1-D for flat layouts, rows for rows
    shown    a local part as users see it: `DTensor`, `FlatShard`, or plain 1-D for the wrapper
    whole    all ranks' parts together

The only file of this package that reads buckets: everything else asks the functions here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..comm import object_from
from ..dtypes import as_moved
from ..errors import CheckpointError
from ..forms import FlatShard, Member, full_of, rows_on_rank
from ..mesh import MeshAxes
from ..shard import Bucket, Unit
from ..torch_private.sharded_tensor import (
    chunk_sharded_tensor,
    gather_sharded_tensor,
    is_sharded_tensor,
    slices_sharded_tensor,
)
from .fit import check_shape


@dataclass(frozen=True)
class Form:
    """What the values of a state dict are.

    Attributes:
        kind: whole tensors; sharded ones, readable on any number of ranks; this rank's memory as it lies; or, from
            instances of the wrapper, names with empty tensors, without communication.
        dtensor: sharded values of the wrapper are `DTensor`s rather than `ShardedTensor`s.
        to_cpu: values are copied to host memory.
        rank0_only: the first rank gets values, the others nothing.
    """

    kind: Literal["whole", "sharded", "local", "names"] = "whole"
    dtensor: bool = False
    to_cpu: bool = False
    rank0_only: bool = False

    def wanted(self, rank: int) -> bool:
        """Whether `rank` gets values."""
        return not self.rank0_only or rank == 0


# One parameter of a bucket.


def part(bucket: Bucket, buffer: torch.Tensor, member: Member, begin: int = 0) -> torch.Tensor:
    """This rank's part of `member` in `buffer`, whose first element is element `begin` of the shard. Shares memory."""
    if not begin or type(buffer) is not torch.Tensor:
        return bucket.part(buffer, member)
    local = member.part
    at = buffer.storage_offset() + (local.offset - begin if local.numel else 0)
    return buffer.as_strided(local.shape, local.stride, at)


def cut(bucket: Bucket, whole: torch.Tensor, member: Member) -> torch.Tensor:
    """This rank's local part of a whole value, in memory of its own where the shard is. No communication.

    Raises:
        CheckpointError: the value has another shape than the parameter.
    """
    check_shape(member.name, member.shape, whole.shape)
    if not bucket.form.plain:
        chunk: torch.Tensor = rows_on_rank(whole, bucket.axes.shard).clone()
        return chunk
    shape, stride = member.part.shape, member.part.stride
    local = torch.empty_strided(shape, stride, dtype=whole.dtype, device=bucket.shard_device)
    if member.part.numel and not whole.is_meta:
        local.copy_(bucket.cut(whole, member))
    return local


def fit(bucket: Bucket, value: Any, member: Member) -> torch.Tensor:
    """This rank's local part of a value in any form, to be read only. Collective unless whole, or split likewise."""
    sharded: Any = member.sharded
    if isinstance(value, FlatShard) and isinstance(sharded, FlatShard) and value._run.same_as(sharded._run):
        return value._local_tensor
    if isinstance(value, DTensor) and isinstance(sharded, DTensor) and value.shape == sharded.shape:
        if value.placements == sharded.placements and value.device_mesh == sharded.device_mesh:
            return value._local_tensor
    return cut(bucket, whole_of(value, bucket.axes.device), member)


def says_whole(member: Member) -> bool:
    """Whether the shown form tells the whole's shape and can be made whole: of `fully_shard`, not of the wrapper."""
    return hasattr(member.sharded, "full_tensor")


# A bucket.


def views_of(unit: Unit) -> Iterator[tuple[torch.Tensor, int, int, list[Member]]]:
    """Tensors that optimizers update in place of parameters: each over [begin, begin + length) of a bucket's shard."""
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        for view in gradients.delivery.views:
            if view.tensor is not None:
                yield view.tensor, view.offset, view.length, [bucket.members[i] for i in view.members]


def joined(bucket: Bucket, member: Member, view: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter from the whole of this rank's tensor-parallel part; `view` itself if it has none.

    Collective over the tensor-parallel ranks.
    """
    if member.split is None or view.is_meta or not bucket.form.plain:
        return view
    return full_of(member.split.unsharded(view.detach()))


# Whole values.


def whole_of(value: Any, device: torch.device) -> torch.Tensor:
    """A whole plain tensor from one in any form. Collective if the value is split.

    Args:
        value: a tensor, `DTensor`, `FlatShard` or `ShardedTensor`, or anything like a tensor that `copy_` takes.
        device: where ranks communicate.
    """
    if is_sharded_tensor(value):
        return gather_sharded_tensor(value, device)
    if isinstance(value, DTensor):
        return full_of(value).detach()
    if hasattr(value, "full_tensor"):
        whole: torch.Tensor = value.full_tensor()
        return whole.detach()
    if not isinstance(value, torch.Tensor):  # weights that are read when they are copied
        return torch.empty(tuple(value.shape), dtype=getattr(value, "dtype", None), device=device).copy_(value)
    return value.detach()


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor of at least one dim, in any form."""
    if is_sharded_tensor(value):
        return len(value.size()) > 0
    tensor_like = isinstance(value, torch.Tensor) or hasattr(value, "__torch_function__")
    return tensor_like and len(getattr(value, "shape", ())) > 0


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor in any form; None if `value` is not a tensor."""
    shape = value.size() if is_sharded_tensor(value) else getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def same(first: Any, second: Any) -> bool:
    """Whether two plain values or tensors are equal, whatever containers they are in; NaN is equal to NaN."""
    pair = (first, second)
    if all(isinstance(one, (torch.Tensor, int, float, complex)) for one in pair):
        mine, other = (torch.as_tensor(value, device="cpu").detach() for value in pair)
        equal = (mine == other) | (mine.isnan() & other.isnan()) if mine.shape == other.shape else mine.new_zeros(1)
        result = bool(equal.all())
    elif all(isinstance(one, Mapping) for one in pair):
        result = first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    elif all(isinstance(one, (list, tuple)) for one in pair):
        result = len(first) == len(second) and all(map(same, first, second))
    else:
        result = not any(isinstance(one, torch.Tensor) for one in pair) and bool(first == second)
    return result


def kept(value: torch.Tensor, form: Form) -> torch.Tensor:
    """A copy of a whole value, on the device that `form` asks for."""
    moved = value.detach().cpu() if form.to_cpu else value.detach()
    return moved.clone() if moved.data_ptr() == value.data_ptr() else moved


def saved_form(bucket: Bucket, member: Member, view: torch.Tensor, form: Form, wanted: bool = True) -> Any:
    """What a state dict keeps of a whole value, in memory of its own: the whole, or the parts of it on dim 0.

    Collective over the tensor-parallel ranks, wanted or not; if not, the result is None.

    Parts are as `torch.chunk`'s; nothing is split where the value is 0-d or the shard axis has one rank.

    Raises:
        CheckpointError: a parameter's two meshes are not parts of one, so that no DTensor can say how it is split.
    """
    if form.kind == "whole":
        whole = joined(bucket, member, view)
        return kept(whole, form) if wanted else None
    axes, parallel = bucket.axes, member.split
    if form.to_cpu and parallel is None:
        view = view.cpu()
    if parallel is None and (view.dim() == 0 or axes.shard.size == 1):
        return view.clone()
    if parallel is None and not form.dtensor:
        return chunk_sharded_tensor(view, axes.shard.group, axes.shard.ranks, axes.shard.rank)
    chunks = view.chunk(axes.shard.size) if view.dim() else (view,)
    local = chunks[axes.shard.rank].clone() if axes.shard.rank < len(chunks) else view.new_empty((0, *view.shape[1:]))
    if parallel is None:
        placements = [Shard(0)] if axes.replicate is None else [Replicate(), Shard(0)]
        stride = view.contiguous().stride()
        return DTensor.from_local(local, axes.mesh, placements, run_check=False, shape=view.shape, stride=stride)
    if not parallel.outer_placements:
        raise CheckpointError(
            "A tensor-parallel parameter has a sharded state only over one mesh of both kinds of parallelism.",
            parameter=member.name,
            remedy='make the instance with device_mesh=mesh["dp"], a part of the mesh whose other part the '
            "parameter is on; or save FULL_STATE_DICT",
        )
    return parallel.sharded(local)


def slices_of(bucket: Bucket) -> Any:
    """All ranks' shards as one `ShardedTensor`, sharing memory. No communication."""
    axis = bucket.axes.shard
    return slices_sharded_tensor(bucket.shard.detach(), axis.group, axis.ranks, axis.rank)


def slice_in(bucket: Bucket, value: Any, name: str) -> torch.Tensor:
    """This rank's shard from a result of `slices_of`.

    Raises:
        CheckpointError: its length is not that of the bucket's shard.
    """
    slices = value.local_shards() if is_sharded_tensor(value) else [value]
    shard: torch.Tensor = slices[0].tensor if slices and hasattr(slices[0], "tensor") else value
    if tuple(shard.shape) != tuple(bucket.shard.shape):
        raise CheckpointError(
            "A LOCAL state dict fits only the same model, wrapped the same way, on as many ranks.",
            parameter=name,
            expected=f"a slice of shape {tuple(bucket.shard.shape)}",
            got=f"shape {tuple(shard.shape)}",
            remedy="save FULL or SHARDED state dicts to load on other ranks",
        )
    return shard.detach()


def like_plain(parameter: Any, value: Any, device: torch.device) -> torch.Tensor:
    """A value, in memory of its own, in the form of a parameter that no unit shards. Collective if it is split."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        return value.detach().clone()
    whole = whole_of(value, device)
    if isinstance(parameter, DTensor) and whole.shape == parameter.shape:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return whole.clone()


# Values that only the first rank has.


def first_rank(axes: MeshAxes) -> int:
    """This process's rank as far as "rank 0 only" goes: on the shard axis, or among replicas if nothing is split."""
    return axes.shard.rank if axes.shard.size > 1 or axes.replicate is None else axes.replicate.rank


class Sent:
    """A tensor that rank 0 has and the others get when they use it: one at a time is whole.

    Every rank must use the same ones in the same order. `nn.Module.load_state_dict` takes it as it is.

    Attributes:
        shape, dtype: of the tensor.
        axes: the ranks; rank 0 sends to the first rank of every replica, and those to their shard axis.
        value: the tensor, on rank 0; else None.
    """

    is_meta = False

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self.axes: Any = None
        self.value: torch.Tensor | None = None

    def full_tensor(self) -> torch.Tensor:
        """The tensor, on the device where ranks communicate. Collective."""
        axes = self.axes
        whole = torch.empty(self.shape, dtype=self.dtype, device=axes.device)
        if self.value is not None:
            whole.copy_(self.value)
        for axis in _ways(axes):
            dist.broadcast(as_moved(whole), group_src=0, group=axis.group)
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Only as an operand: the tensor is sent, and takes this one's place."""
        return func(*[arg.full_tensor() if isinstance(arg, Sent) else arg for arg in args], **(kwargs or {}))


def _ways(axes: MeshAxes) -> Iterator[Any]:
    if axes.replicate is not None and axes.replicate.size > 1 and axes.shard.rank == 0:
        yield axes.replicate
    if axes.shard.size > 1:
        yield axes.shard


def from_rank0(tree: Any, axes: MeshAxes) -> Any:
    """Rank 0's nested dicts on every rank, tensors in them as `Sent`. Collective, and so is every use of those."""
    is_first = axes.shard.rank == 0 and (axes.replicate is None or axes.replicate.rank == 0)
    plan = _planned(tree) if is_first else None
    for axis in _ways(axes):
        plan = object_from(0, plan, axis.group, "whole values")
    _complete(plan, tree if is_first else None, axes)
    return plan


def _planned(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _planned(value) for key, value in tree.items()}
    return Sent(tree) if isinstance(tree, torch.Tensor) and tree.dim() > 0 else tree


def _complete(plan: Any, tree: Any, axes: MeshAxes) -> None:
    if isinstance(plan, dict):
        for key, value in plan.items():
            _complete(value, None if tree is None else tree[key], axes)
    elif isinstance(plan, Sent):
        plan.axes, plan.value = axes, tree
