"""A tensor of which each rank has a run of elements: the sharded parameters of flat layouts.

It has the whole parameter's shape, so that code which groups parameters by `ndim` or `shape` treats them like the
originals; its values are the elements [start, stop) in memory order. Element-wise operations compute on the run;
reductions over all elements (sum, norm) are collective; any other operation that would need other ranks' elements
raises an error with the parameter's name.

`DTensor` cannot express this: with `Shard(0)` and local rows that are not `torch.chunk`'s, `full_tensor()` is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..comm import largest_value, reduce_value, values_of_all
from ..containers import call_apart
from ..errors import PhaseError
from ..layout import Layout, Slot, dense_strides, rectangles, run_on_rank
from ..mesh import Axis, MeshAxes, device_of
from ..readers import READERS, wait_for_readers
from ..torch_private.foreach_types import works_in_lists
from ..torch_private.local_tensor import delete_grad, inside, read_data, read_grad, write_grad
from ..torch_private.storage_writer import writes_safetensors
from .changes import OWNER_KEY, give_up_gradient, mark_view, note_change, written
from .corrected import covers_all
from .elementwise import is_elementwise
from .messages import copied_into_whole, not_computed_flat, pickled, reduced_in_trace, several_rectangles
from .row_shard import RowShard, assign_data, deep_copy, outside_inference

aten = torch.ops.aten
_INT = torch.iinfo(torch.int64)


@dataclass(frozen=True, eq=False)
class Run:
    """The elements of a parameter that each rank of an axis has.

    The parameter begins at `offset` of a gathered segment of which rank r has [r * S, (r + 1) * S).

    Attributes:
        name: of the parameter, for errors.
        shape, order: the parameter's shape, and its dims from outermost to innermost in memory.
        offset: the parameter's first element in the gathered segment.
        slice_numel: S.
        axis: the shard axis.
        replicas: the replicate axis, or None.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    slice_numel: int
    axis: Axis
    replicas: Axis | None = None

    @classmethod
    def of(cls, layout: Layout, slot: Slot, axes: MeshAxes) -> Run:
        """The run of a parameter of a flat layout."""
        slice_numel = layout.segments[slot.segment].slice_numel
        return cls(slot.name, slot.shape, slot.spec.order, slot.offset, slice_numel, axes.shard, axes.replicate)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def bounds(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the parameter, in memory order, on `rank`."""
        return run_on_rank(self.offset, self.numel, self.slice_numel, rank)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's run of a whole tensor of the parameter's shape, as a 1-D tensor."""
        start, stop = self.bounds(self.axis.rank)
        return full.permute(self.order).reshape(-1)[start:stop]

    def reduce(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a value over the shard axis. Collective.

        Raises:
            PhaseError: it is traced by torch.compile, whose graph would not contain the collective.
        """
        return value if self._is_alone(value) else reduce_value(value, op, self.axis.group)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The same for the largest of floating-point values, NaN where any rank's is."""
        return value if self._is_alone(value) else largest_value(value, self.axis.group)

    def _is_alone(self, value: torch.Tensor) -> bool:
        if self.axis.size > 1 and type(value) is not torch.Tensor:
            raise reduced_in_trace(self.name)
        return self.axis.size == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        return self  # immutable: integers and process groups

    @cached_property
    def split(self) -> tuple[Any, ...]:
        """Equal for runs of the same elements of parameters of the same shape, on the ranks of the same group."""
        return self.shape, self.order, self.offset, self.slice_numel, self.axis.group

    def same_as(self, other: Run) -> bool:
        """Whether the ranks of the same group have the same elements of a parameter of the same shape."""
        return self is other or self.split == other.split


@works_in_lists
class FlatShard(torch.Tensor):
    """A tensor of shape `run.shape` of which this rank has the elements of `run`, in the 1-D tensor `local`.

    Owns nothing: `local` is a view of the unit's shard (parameters), a view of its reduced slice (gradients), or a
    separate tensor (optimizer state).
    """

    _local_tensor: torch.Tensor
    _run: Run
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: torch.Tensor, run: Run, requires_grad: bool = False) -> FlatShard:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            torch.Size(run.shape),
            strides=dense_strides(run.shape, run.order),
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        self._local_tensor, self._run = local, run
        return self

    @property
    def data(self) -> torch.Tensor:
        """Like `Tensor.data`. Assign only a FlatShard of the same run."""
        view = read_data(self)
        mark_view(view, self)
        return view

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign_data(self, value, isinstance(value, FlatShard) and value._run.same_as(self._run))

    @property
    def grad(self) -> torch.Tensor | None:
        """Like `Tensor.grad`. Setting it to None also discards gradients that were accumulated without sync."""
        return read_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            give_up_gradient(self)
        write_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        give_up_gradient(self)
        delete_grad(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self._run.bounds(self._run.axis.rank)
        return f"FlatShard({self._run.name!r}, shape={self._run.shape}, elements=[{start}, {stop}), dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Run]:
        return ["_local_tensor"], self._run

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], run: Run, size: Any, stride: Any) -> FlatShard:
        return FlatShard(inner["_local_tensor"], run)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickled(self._run.name)

    def _apart(self, attributes: dict[str, Any]) -> FlatShard:
        """The same values in separate memory."""
        copied = FlatShard(self._local_tensor.detach().clone(), self._run, self.requires_grad)
        copied.__dict__.update(attributes)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return deep_copy(self, memo, self._apart)

    def to_local(self) -> torch.Tensor:
        """This rank's elements, [stop - start], sharing memory."""
        return self._local_tensor.detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, of the parameter's shape, on every rank of the shard axis. Collective.

        It is on the group's device: on the accelerator for an offloaded parameter. A gradient that flows back through
        it is averaged over the ranks, like gradients of the forward.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            whole: torch.Tensor = _FullOfRun.apply(self)
            return whole
        return _gathered(self)

    # torch.distributed.checkpoint stores rectangles; a run consists of a few of them, in memory order of dims.

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        run = self._run
        permuted = tuple(run.shape[dim] for dim in run.order)
        inverse = [run.order.index(dim) for dim in range(len(run.order))]
        chunks = []
        for block in rectangles(permuted, *run.bounds(run.axis.rank)):
            view = self._local_tensor.detach()[block.start :][: torch.Size(block.sizes).numel()].view(block.sizes)
            offsets = torch.Size([block.offsets[i] for i in inverse])
            storage = ChunkStorageMetadata(offsets, torch.Size([block.sizes[i] for i in inverse]))
            chunks.append((storage, view.permute(inverse)))
        return chunks

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        chunks = self._chunks()
        if len(chunks) > 1 and writes_safetensors():
            raise several_rectangles(fqn, self._run.axis.ranks[self._run.axis.rank], len(chunks), self._run.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(view), self.size()),
            )
            for chunk, view in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(view for chunk, view in self._chunks() if chunk.offsets == index.offset)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if changed := written(func._schema.name, args, kwargs):
            if READERS:
                wait_for_readers()
            note_change(changed)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if func in _LOCAL or torch.Tag.pointwise in func.tags or _is_of_lists(func):
            return _elementwise(func, args, kwargs)
        if torch.is_inference_mode_enabled():  # in which torch leaves composite operations (`to`) whole
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        raise _unsupported(func, args)


def _is_of_lists(func: Any) -> bool:
    """Whether `func` is an element-wise operation on lists of tensors."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith(("_foreach_", "_fused_")) and is_elementwise(name)


def _first_run(args: Any) -> Run | None:
    """The run of the first FlatShard among `args`, including nested lists."""
    for arg in args:
        if isinstance(arg, FlatShard):
            return arg._run
        if isinstance(arg, (list, tuple)) and (run := _first_run(arg)) is not None:
            return run
    return None


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `func` on the runs; tensors that it returns become FlatShards of the same run."""
    if any(isinstance(arg, (list, tuple)) and any(map(_is_flat, arg)) for arg in args):
        return _elementwise_lists(func, args, kwargs)
    run = _first_run((*args, *kwargs.values()))
    assert run is not None
    changed = written(func._schema.name, args, kwargs)
    if not all(map(_is_flat, changed)):
        _refuse_parameters((*args, *kwargs.values()))
    outputs = func(*[_local(a, run, func) for a in args], **{k: _local(v, run, func) for k, v in kwargs.items()})
    if changed:  # return the argument itself
        return changed[0]
    return FlatShard(outputs, run) if isinstance(outputs, torch.Tensor) else outputs


def _elementwise_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [a for a in args if isinstance(a, (list, tuple)) and any(map(_is_flat, a))]
    runs = [_first_run(column) for column in zip(*lists, strict=False)]
    for tensor, column in zip(written(func._schema.name, args, kwargs), zip(*lists, strict=False), strict=False):
        if not _is_flat(tensor):
            _refuse_parameters(column)

    def local_list(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [_local(v, runs[i], func) if i < len(runs) and runs[i] else v for i, v in enumerate(value)]

    # Units of other layouts have DTensors, which torch cannot mix with FlatShards in the same call.
    flat = [run is not None for run in runs]
    outputs = call_apart(func, [*map(local_list, args)], {k: local_list(v) for k, v in kwargs.items()}, flat)
    if outputs is None:
        return None
    return [FlatShard(out, run) if run is not None else out for out, run in zip(outputs, runs, strict=True)]


def _refuse_parameters(operands: Iterable[Any]) -> None:
    """Refuse to change this rank's run of a whole tensor by parameters, as in averages of weights.

    By gradients it is allowed: an optimizer may have loaded the state of one process, whose other elements do not
    matter on this rank.
    """
    for operand in operands:
        if _is_flat(operand) and OWNER_KEY in operand.__dict__:
            raise copied_into_whole(operand._run.name)


def _is_flat(value: Any) -> bool:
    return isinstance(value, FlatShard)


def _local(value: Any, run: Run | None, func: Any) -> Any:
    """The run's part of an operand, which is a FlatShard of the same run, a whole tensor, or a single number."""
    if run is None or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FlatShard):
        if not value._run.same_as(run):
            raise _unsupported(func, (value,), f"operands are split differently: {run.name} and {value._run.name}")
        return value._local_tensor
    if tuple(value.shape) == run.shape and value.dim():
        return run.cut(value)
    if value.numel() == 1:
        return value.reshape(()) if value.dim() > 1 else value
    raise _unsupported(func, (), f"an operand of shape {tuple(value.shape)} beside {run.name} of shape {run.shape}")


def _unsupported(func: Any, args: Any, why: str | None = None) -> PhaseError:
    run = _first_run(args)
    return not_computed_flat(func, run.name if run else None, why)


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    if torch.is_inference_mode_enabled():
        with outside_inference():  # torch cannot create a view otherwise
            view = FlatShard(args[0]._local_tensor.detach(), args[0]._run)
    else:
        view = FlatShard(args[0]._local_tensor.detach(), args[0]._run)
    mark_view(view, args[0])
    return view


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    if tuple(args[1]) != args[0]._run.shape:
        raise _unsupported(func, args)
    return _detach(func, args, kwargs)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, FlatShard):
        target._local_tensor.copy_(_local(source, target._run, func))
        return target
    raise copied_into_whole(source._run.name)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor.new_x(size)`: split like the tensor if it has the same shape, else plain."""
    shard, size, rest = args[0], tuple(args[1]), args[2:]
    run, local = shard._run, shard._local_tensor
    if size == run.shape and func is not aten.new_empty_strided.default:
        return FlatShard(func(local, local.shape, *rest, **kwargs), run)
    plain: torch.Tensor = func(local, size, *rest, **kwargs)
    return plain


def _whole(func: Any, args: tuple[Any, ...], dim: Any = None, keepdim: bool = False) -> tuple[Run, Any]:
    """The run of a tensor that is reduced over all elements, and a function that gives the result its shape."""
    run: Run = args[0]._run
    if not covers_all(dim, len(run.shape)):
        raise _unsupported(func, args, "a reduction along some dims only")
    return run, lambda value: value.reshape([1] * len(run.shape)) if keepdim else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums on the way to a result of this dtype do not overflow: 16-bit floats as float32."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    dtype = kwargs.pop("dtype", None)
    run, shaped = _whole(func, *_bound(args), **kwargs)
    local = args[0]._local_tensor
    if func not in (aten.mean.default, aten.mean.dim):
        total: torch.Tensor = shaped(run.reduce(local.sum(dtype=dtype)))
        return total
    mean: torch.Tensor = shaped(run.reduce(local.sum(dtype=_wide(dtype or local.dtype))) / run.numel)
    return mean.to(dtype or local.dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The largest or smallest element; of truth values: whether any, or all, are true."""
    run, shaped = _whole(func, *_bound(args), **kwargs)
    largest, local = "max" in func.__name__ or "any" in func.__name__, args[0]._local_tensor
    dtype = local.dtype
    if func in (aten.all.default, aten.any.default):
        local, dtype = local.bool(), torch.uint8 if dtype is torch.uint8 else torch.bool
    if not local.is_floating_point():
        local = local.long()  # which every backend reduces
    if not local.numel():
        limits = (-math.inf, math.inf) if local.is_floating_point() else (_INT.min, _INT.max)
        limits = limits if "max" in func.__name__ or "min" in func.__name__ else (0, 1)
        local = local.new_full((1,), limits[0 if largest else 1])
    value = local.max() if largest else local.min()
    result: torch.Tensor = shaped(_extreme_of_ranks(value, run, largest))
    return result.to(dtype)


def _extreme_of_ranks(value: torch.Tensor, run: Run, largest: bool) -> torch.Tensor:
    """The largest or smallest values of all ranks."""
    if not value.is_floating_point():
        return run.reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    return run.largest(value) if largest else -run.largest(-value)


def _count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    run, _ = _whole(func, *_bound(args), **kwargs)
    return run.reduce(args[0]._local_tensor.count_nonzero())


def _variance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    correction = kwargs.pop("correction", None)
    run, shaped = _whole(func, *_bound(args), **kwargs)
    local = args[0]._local_tensor.to(_wide(args[0].dtype))
    squares = (local - run.reduce(local.sum()) / run.numel).square().sum()
    variance = shaped(run.reduce(squares) / max(run.numel - (1 if correction is None else correction), 0))
    result: torch.Tensor = variance.sqrt() if func is aten.std.correction else variance
    return result.to(args[0].dtype)


def _bound(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `_whole` among those of a reduction: itself, the dims, and whether they are kept."""
    return args, *args[1:3]


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The order of a norm."""
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    _, shaped = _whole(func, args, *args[2:4], **{key: kwargs[key] for key in ("dim", "keepdim") if key in kwargs})
    result: torch.Tensor = shaped(_norms([args[0]], _order(args, kwargs), kwargs.get("dtype"))[0])
    return result


def _norms(shards: list[Any], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norms of whole tensors, FlatShards or plain: local norms, then a single all-reduce per axis."""
    local = [inside(shard) for shard in shards]
    neutral = math.inf if order == -math.inf or order < 0 else 0.0  # of no elements
    norms = [
        torch.linalg.vector_norm(t, order, dtype=dtype)
        if t.numel()
        else torch.full((), neutral, dtype=(dtype or t.dtype).to_real(), device=t.device)
        for t in local
    ]
    by_axis: dict[int, list[int]] = {}
    for i, shard in enumerate(shards):
        if isinstance(shard, FlatShard):
            by_axis.setdefault(id(shard._run.axis.group), []).append(i)
    for indices in by_axis.values():
        run: Run = shards[indices[0]]._run
        stacked = torch.stack([norms[i] for i in indices])
        if math.isinf(order):
            stacked = _extreme_of_ranks(stacked, run, order > 0)
        elif order == 0:  # the number of nonzero elements
            stacked = run.reduce(stacked)
        else:
            powers = run.reduce(stacked.to(_wide(stacked.dtype)) ** order)
            stacked = (powers ** (1.0 / order)).to(stacked.dtype)
        for i, norm in zip(indices, stacked.unbind(), strict=True):
            norms[i] = norm
    return norms


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return _norms(list(args[0]), _order(args, kwargs), kwargs.get("dtype"))


def _foreach_powsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    order = _order(args, kwargs)
    if not 0 < order < math.inf:
        raise _unsupported(func, args)
    return [norm**order for norm in _norms(list(args[0]), order, kwargs.get("dtype"))]


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill with the whole tensor's random numbers, so that values do not depend on the number of ranks.

    Every rank draws for the whole parameter, which takes its memory for a moment, and keeps its run: with the same seed
    on every rank the result equals that of an unsharded model.
    """
    shard, rest = args[0], args[1:]
    run, local = shard._run, shard._local_tensor
    whole = torch.empty(run.shape, dtype=local.dtype, device=local.device)
    func(whole, *rest, **kwargs)
    local.copy_(run.cut(whole))
    return shard


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    run = next(a._run for a in args if isinstance(a, FlatShard))
    local = [_local(a, run, func) for a in args]
    differs = torch.tensor(float(not torch.equal(*local)), device=local[0].device)
    return not bool(run.reduce(differs))


_LOCAL = {
    aten.clone.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.lift_fresh.default,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
}
_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), _detach),
    aten.view.default: _view,
    aten.copy_.default: _copy,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new,
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _sum),
    **dict.fromkeys((aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _extreme),
    **dict.fromkeys((aten.all.default, aten.any.default), _extreme),
    **dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _count),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _variance),
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    **({aten._foreach_powsum.Scalar: _foreach_powsum} if hasattr(aten, "_foreach_powsum") else {}),
    aten.equal.default: _equal,
    aten.normal_.default: _random,
    aten.uniform_.default: _random,
    aten.bernoulli_.float: _random,
    aten.exponential_.default: _random,
    aten.random_.default: _random,
}


def _gathered(shard: FlatShard) -> torch.Tensor:
    """The whole tensor, without a graph."""
    run, axis = shard._run, shard._run.axis
    local = shard._local_tensor.detach()
    if axis.size > 1:
        local = local.to(device_of(axis.group))
    longest = max(stop - start for start, stop in map(run.bounds, range(axis.size)))
    padded = local.new_zeros(longest)
    padded[: local.numel()] = local
    gathered = values_of_all(padded, axis.group, axis.backend)
    parts = [gathered[r, : stop - start] for r in range(axis.size) for start, stop in [run.bounds(r)]]
    full = torch.cat(parts) if run.numel else local.new_empty(0)
    return full.as_strided(run.shape, dense_strides(run.shape, run.order))


class _FullOfRun(torch.autograd.Function):
    """`full_tensor()` with a graph: averages the gradient over all ranks and keeps this rank's run."""

    @staticmethod
    def forward(ctx: Any, shard: FlatShard) -> torch.Tensor:
        ctx.run = shard._run
        return _gathered(shard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> FlatShard:
        run: Run = ctx.run
        total, world = grad.contiguous().clone(), 1
        for axis in (run.axis, run.replicas):
            if axis is not None and axis.size > 1:
                total, world = reduce_value(total, dist.ReduceOp.SUM, axis.group), world * axis.size
        return FlatShard(run.cut(total.div_(world)).clone(), run)


SHARDED_TYPES = {RowShard, FlatShard}
"""The classes of sharded parameters, and of tensors sharded like them (gradients, state, values in state dicts)."""
