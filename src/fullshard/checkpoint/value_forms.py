"""Values of parameters, and of optimizer state of their shape: local parts, whole values, and their saved forms.

local    this rank's part of a parameter: 1-D in flat layouts, rows in the rows layout
shown    a local part as users see it: `DTensor`, `FlatShard`, or plain 1-D for the wrapper
whole    all ranks' parts together
"""

from __future__ import annotations

import cmath
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
from ..shard import Bucket
from ..torch_private.local_tensor import inside
from ..torch_private.sharded_tensor import chunk_sharded_tensor, gather_sharded_tensor, is_sharded_tensor


@dataclass(frozen=True)
class StateForm:
    """The form of the values in a state dict.

    Attributes:
        kind: "whole" tensors; "sharded" tensors, readable on any number of ranks; "local": this rank's memory as it
            is; "names": empty tensors, without communication, from instances of the wrapper only.
        dtensor: sharded values of the wrapper are `DTensor`s rather than `ShardedTensor`s.
        to_cpu: values are copied to host memory.
        rank0_only: only rank 0 gets values.
    """

    kind: Literal["whole", "sharded", "local", "names"] = "whole"
    dtensor: bool = False
    to_cpu: bool = False
    rank0_only: bool = False

    def wanted(self, rank: int) -> bool:
        """Whether `rank` gets values."""
        return not self.rank0_only or rank == 0


def is_part(value: Any, member: Member) -> bool:
    """Whether a value of any form is this rank's part of it, split as the parameter is."""
    sharded: Any = member.sharded
    if isinstance(value, FlatShard):
        return isinstance(sharded, FlatShard) and value._run.same_as(sharded._run)
    if not isinstance(value, DTensor) or not isinstance(sharded, DTensor) or value.shape != sharded.shape:
        return False
    return value.placements == sharded.placements and value.device_mesh == sharded.device_mesh


def local_of(bucket: Bucket, value: Any, member: Member) -> torch.Tensor:
    """This rank's local part of a value in any form, to be read only.

    Collective unless the value is whole, or split as the parameter is.

    Args:
        value: of the parameter's shape.
    """
    if is_part(value, member):
        return inside(value)
    whole = whole_of(value, bucket.axes.device)
    if not bucket.form.plain:
        chunk: torch.Tensor = rows_on_rank(whole, bucket.axes.shard).clone()
        return chunk
    shape, stride = member.part.shape, member.part.stride
    local = torch.empty_strided(shape, stride, dtype=whole.dtype, device=bucket.shard_device)
    if member.part.numel:
        local.copy_(bucket.cut(whole, member))
    return local


def joined(bucket: Bucket, member: Member, view: torch.Tensor) -> torch.Tensor:
    """A whole value from this rank's tensor-parallel part of it: `view` itself where there is no such parallelism.

    Collective over the tensor-parallel ranks.
    """
    if member.split is None or view.is_meta or not bucket.form.plain:
        return view
    return full_of(member.split.unsharded(view.detach()))


# Whole values.


def whole_of(value: Any, device: torch.device) -> torch.Tensor:
    """A whole plain tensor from a value in any form. Collective if the value is split.

    Args:
        value: a tensor, `DTensor`, `FlatShard` or `ShardedTensor`, or anything tensor-like that `copy_` accepts.
        device: the device on which ranks communicate.
    """
    if is_sharded_tensor(value):
        return gather_sharded_tensor(value, device)
    if isinstance(value, DTensor):
        return full_of(value).detach()
    if hasattr(value, "full_tensor"):
        whole: torch.Tensor = value.full_tensor()
        return whole.detach()
    if not isinstance(value, torch.Tensor):  # lazy weights, read when they are copied
        return torch.empty(tuple(value.shape), dtype=getattr(value, "dtype", None), device=device).copy_(value)
    return value.detach()


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor of at least one dim, in any form."""
    return hasattr(value, "__torch_function__") and bool(shape_of(value))


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor in any form; None if `value` is not a tensor."""
    shape = value.size() if is_sharded_tensor(value) else getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal: numbers, tensors, containers of them (NaN equals NaN), or any other objects."""
    pair = (first, second)
    tensors = [value.detach().cpu() for value in pair if isinstance(value, torch.Tensor)]
    if len(tensors) == 2:
        a, b = tensors
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if tensors:
        other = second if isinstance(first, torch.Tensor) else first
        is_number = isinstance(other, (int, float, complex)) and tensors[0].dim() == 0
        return is_number and same(tensors[0].item(), _rounded(other, tensors[0].dtype))
    if all(isinstance(value, Mapping) for value in pair):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if all(isinstance(value, (list, tuple)) for value in pair):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second) or all(isinstance(value, (float, complex)) and cmath.isnan(value) for value in pair)


def _rounded(number: complex, dtype: torch.dtype) -> Any:
    """A Python number as a tensor of `dtype` has it; ints unchanged."""
    fits = isinstance(number, float) and dtype.is_floating_point
    return torch.tensor(number, dtype=dtype, device="cpu").item() if fits else number


def copied(value: torch.Tensor, form: StateForm) -> torch.Tensor:
    """A copy of a whole value, on the device that `form` asks for."""
    moved = value.detach().cpu() if form.to_cpu else value.detach()
    return moved.clone() if moved.data_ptr() == value.data_ptr() else moved


def saved_form(bucket: Bucket, member: Member, view: torch.Tensor, form: StateForm, wanted: bool) -> Any:
    """A whole value as a state dict has it, in its own memory: whole, or split on dim 0 as by `torch.chunk`.

    Collective over the tensor-parallel ranks, wanted or not; None if it is not wanted. A value that is 0-d, or whose
    shard axis has only one rank, is not split.

    Raises:
        CheckpointError: a parameter's two meshes do not belong to one mesh, so no DTensor can describe how it is split.
    """
    if form.kind == "whole":
        whole = joined(bucket, member, view)
        return copied(whole, form) if wanted else None
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
            "The sharded state of a tensor-parallel parameter requires one mesh for both kinds of parallelism.",
            parameter=member.name,
            remedy='wrap with device_mesh=mesh["dp"], from the same mesh as the parameter\'s mesh["tp"]; or save '
            "FULL_STATE_DICT",
        )
    return parallel.sharded(local)


def slice_in(bucket: Bucket, value: Any, name: str) -> torch.Tensor:
    """This rank's shard from a value of a LOCAL state dict.

    Raises:
        CheckpointError: its length differs from that of the bucket's shard.
    """
    slices = value.local_shards() if is_sharded_tensor(value) else [value]
    shard: torch.Tensor = slices[0].tensor if slices and hasattr(slices[0], "tensor") else value
    if tuple(shard.shape) != tuple(bucket.shard.shape):
        raise CheckpointError(
            "LOCAL_STATE_DICT can only be loaded into the same model, wrapped the same way, on the same number of "
            "ranks.",
            parameter=name,
            expected=f"a slice of shape {tuple(bucket.shard.shape)}",
            got=f"shape {tuple(shard.shape)}",
            remedy="save FULL or SHARDED state dicts to load on a different number of ranks",
        )
    return shard.detach()


def like_plain(parameter: Any, value: Any, device: torch.device) -> torch.Tensor:
    """A copy of a value in the form of a parameter that is in no unit. Collective if the value is split."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        return value.detach().clone()
    whole = whole_of(value, device)
    if isinstance(parameter, DTensor) and whole.shape == parameter.shape:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return whole.clone()


# Values that only rank 0 has.


@dataclass(eq=False)
class Sent:
    """A tensor that only rank 0 has, sent to other ranks on use, so that only one whole tensor exists at a time.

    Every rank must use the same tensors in the same order. `nn.Module.load_state_dict` accepts it as a tensor.

    Attributes:
        shape, dtype: of the tensor.
        axes: the ranks; rank 0 sends to the first rank of every replica, and these send along their shard axis.
        value: the tensor, on rank 0; None on other ranks.
    """

    shape: torch.Size
    dtype: torch.dtype
    axes: Any = None
    value: torch.Tensor | None = None
    is_meta = False

    def full_tensor(self) -> torch.Tensor:
        """The tensor, on the device where ranks communicate. Collective."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.axes.device)
        if self.value is not None:
            whole.copy_(self.value)
        for axis in _sending_axes(self.axes):
            dist.broadcast(as_moved(whole), group_src=0, group=axis.group)
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func` with the tensor itself, once it was sent; only for positional arguments."""
        return func(*[arg.full_tensor() if isinstance(arg, Sent) else arg for arg in args], **(kwargs or {}))


def _sending_axes(axes: MeshAxes) -> Iterator[Any]:
    """The axes along which this rank takes part when rank 0 sends, in order."""
    if axes.replicate is not None and axes.replicate.size > 1 and axes.shard.rank == 0:
        yield axes.replicate
    if axes.shard.size > 1:
        yield axes.shard


def from_rank0(tree: Any, axes: MeshAxes) -> Any:
    """Rank 0's nested dicts on every rank, with a `Sent` for each tensor. Collective, and so is every use of these."""
    is_first = axes.shard.rank == 0 and (axes.replicate is None or axes.replicate.rank == 0)
    placeholders = _with_placeholders(tree) if is_first else None
    for axis in _sending_axes(axes):
        placeholders = object_from(0, placeholders, axis.group, "whole values")
    _complete(placeholders, tree if is_first else None, axes)
    return placeholders


def _with_placeholders(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _with_placeholders(value) for key, value in tree.items()}
    return Sent(tree.shape, tree.dtype) if isinstance(tree, torch.Tensor) and tree.dim() > 0 else tree


def _complete(placeholders: Any, tree: Any, axes: MeshAxes) -> None:
    """Set the ranks of every `Sent`, and on rank 0 its value."""
    if isinstance(placeholders, dict):
        for key, value in placeholders.items():
            _complete(value, None if tree is None else tree[key], axes)
    elif isinstance(placeholders, Sent):
        placeholders.axes, placeholders.value = axes, tree
