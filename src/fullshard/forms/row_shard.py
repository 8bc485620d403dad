"""`RowShard`: the DTensor that users see for a parameter that is split into rows."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..comm import can_open, reduce_value, values_of_all
from ..containers import call_apart
from ..dtypes import KNOWN
from ..mesh import backend_of
from ..readers import READERS, wait_for_readers
from ..torch_private.foreach_types import works_in_lists
from ..torch_private.local_tensor import (
    become,
    delete_grad,
    keep_mesh,
    local_of,
    local_part,
    plain_access,
    plain_call,
    read_data,
    read_grad,
    set_local,
    shares_storage,
    write_grad,
)
from .changes import give_up_gradient, mark_view, note_change, owner_of, written
from .corrected import corrected
from .elementwise import on_locals
from .member import NAME_KEY, attributes_of
from .messages import (
    copied_into_whole,
    data_of_another_shape,
    data_on_meta,
    read_by_constructor,
    saved_by_torch,
    used_while_freed,
)

DATA_DIMS_KEY = "_fullshard_data_dims"
"""Attribute of a `RowShard`: the number of leading dims of its mesh that are data-parallel."""


@works_in_lists
class RowShard(DTensor):
    """A sharded parameter of the rows layout: a `DTensor` with helpful errors.

    It behaves like any DTensor, with five additions: if an operation mixes it with plain tensors, which happens when
    code uses a module's weights while their unit is freed, the error explains this and the remedy; in-place changes are
    recorded, so that a pending backward does not run with other weights; gradients through `full_tensor()` are averaged
    over the ranks of the mesh, which compute different batches; `copy_` accepts whole tensors; and a single value that
    Python reads (`p.norm().item()`) is that of all ranks, not this rank's part.
    Gradients, results of operations and deep copies are of this class, too; what is pickled becomes a plain DTensor.
    """  # no __slots__: code that stages tensors for a checkpoint reads DTensor's

    @property
    def data(self) -> torch.Tensor:
        """Like `Tensor.data`. Assign only a DTensor of the same shape and placements."""
        with plain_access():
            view = as_row_shard(read_data(self))
        keep_mesh(view, self)
        mark_view(view, self)
        return view

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        same = False
        if isinstance(value, DTensor):
            same = value.placements == self.placements and value.device_mesh == self.device_mesh
        assign_data(self, value, same)

    @property
    def grad(self) -> torch.Tensor | None:
        """The sharded gradient, or None. As `Tensor.grad`, without a call of `__torch_function__`."""
        with plain_access():
            return read_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            give_up_gradient(self)
        with plain_access():
            write_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        give_up_gradient(self)
        with plain_access():
            delete_grad(self)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective.

        Args:
            grad_placements: as for `DTensor.full_tensor`; None to average the gradient that flows back over the
                data-parallel ranks, like gradients of the forward, and replicate it on tensor-parallel ranks.
        """
        data_dims = self.__dict__.get(DATA_DIMS_KEY)
        if grad_placements is None and data_dims is not None and self.requires_grad and torch.is_grad_enabled():
            grad_placements = [
                Partial("avg") if dim < data_dims else Replicate() for dim in range(self.device_mesh.ndim)
            ]
        return full_of(self, grad_placements)

    def data_ptr(self) -> int:
        """0: a DTensor has no memory besides its local tensor's. (torch returns the local's offset, without a base.)"""
        return 0

    def _apart(self, attributes: dict[str, Any]) -> torch.Tensor:
        """A plain DTensor with the same values in separate memory."""
        with plain_access(), outside_inference():
            plain = self.detach().clone()
        keep_mesh(plain, self)
        plain.requires_grad_(self.requires_grad)
        plain.__dict__.update(attributes)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _warned and local_of(self).numel() != self.numel():
            _warn_of_file()
        return self._apart(attributes_of(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return deep_copy(self, memo, lambda attributes: as_row_shard(self._apart(attributes)))

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> torch.Tensor:
        """Like DTensor's, but returns this class, which `torch.compile` then expects of inputs."""
        return as_row_shard(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTS:
            return plain_call(func, types, args, kwargs or {})
        if torch.is_inference_mode_enabled() and _may_leave_inference(args):
            with outside_inference():
                return cls.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        changed = written(name, args, kwargs)
        if changed and READERS:
            wait_for_readers()
        if (result := on_locals(func, args, kwargs or {})) is not NotImplemented:
            if changed:
                note_change(changed)
            return result
        if name in _READS and args and args[0].numel() == 1 and args[1:] != ("",):  # an empty format is for debugging
            return func(_whole_to_read(args), *args[1:], **(kwargs or {}))
        if (result := corrected(func, types, args, kwargs or {})) is not NotImplemented:
            keep_mesh(result, args[0] if args else None)
            return as_row_shard(result)
        if changed and args and changed[0] is args[0] and isinstance(args[0], torch.Tensor) and not is_compiling():
            args = _combined(*args)
        result = _computed(func, types, args, kwargs or {})
        if changed:
            note_change(changed)
        if not is_compiling():
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if type(tensor) is DTensor and _leads_on(name, tensor, args, kwargs or {}):
                    _become_row_shard(tensor, args)
        return result


def _whole_to_read(args: tuple[Any, ...]) -> torch.Tensor:
    """The value of all ranks, of a single element, which Python reads."""
    with torch.no_grad(), plain_access():
        if not isinstance(detached := args[0].detach(), DTensor):  # torch.tensor turns off dispatch to DTensor
            raise read_by_constructor(name_of(args))
        return full_of(detached)


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode, in which torch cannot create views of tensor subclasses; nothing is differentiated."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _may_leave_inference(args: tuple[Any, ...]) -> bool:
    """Whether an operation on a sharded tensor can run outside of inference mode: no operand was created in it."""
    if is_compiling() or not args or not isinstance(args[0], DTensor):
        return False
    with plain_access():
        return not any([isinstance(value, torch.Tensor) and value.is_inference() for value in args])


def _computed(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor makes of an operation; its error about plain tensors says that a unit is freed."""
    try:
        result = plain_call(func, types, args, kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        if len(set(kinds := _kinds(func, args))) == 2:  # units of several layouts
            return call_apart(func, args, kwargs, kinds)
        if name_of(args) is None:
            raise
        if func is torch.Tensor.copy_ and not isinstance(args[0], DTensor):
            raise copied_into_whole(name_of(args)) from None
        if func is not torch.Tensor.copy_ or not _copy_whole(*args[:2]):
            raise used_while_freed(getattr(func, "__name__", func), name_of(args) or "?") from error
        result = args[0]
    keep_mesh(result, args[0] if args else None)
    return result


def _combined(target: torch.Tensor, *values: Any) -> tuple[Any, ...]:
    """Arguments of an operation that writes to `target`; whole where ranks have parts, which DTensor refuses."""
    if not isinstance(target, DTensor):
        return target, *[v.full_tensor() if isinstance(v, DTensor) and v.numel() == 1 else v for v in values]
    everywhere = [Replicate()] * target.device_mesh.ndim
    if _is_partial(target):
        if target.requires_grad:
            return target, *values
        become(target, target.redistribute(placements=everywhere))
    return target, *[v.redistribute(placements=everywhere) if _is_partial(v) else v for v in values]


def _is_partial(value: Any) -> bool:
    """Whether ranks have parts of each element, to be combined."""
    return isinstance(value, DTensor) and any([placement.is_partial() for placement in value.placements])


def _kinds(func: Callable[..., Any], args: tuple[Any, ...]) -> list[bool]:
    """Per tensor, whether it is a DTensor, if `func` works on a list (foreach, fused optimizers); else empty."""
    if not getattr(func, "__name__", "").startswith(("_foreach_", "_fused_")) or not args:
        return []
    return [isinstance(tensor, DTensor) for tensor in args[0]] if isinstance(args[0], (list, tuple)) else []


def _leads_on(name: str, result: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of an operation on a sharded parameter has this class: any but new memory, and lists.

    So `p.grad.abs().max().item()` is that of all ranks. State of optimizers stays a plain DTensor.
    """
    if name.startswith(("new_", "_foreach_")) or name.endswith("_like"):
        return result.grad_fn is not None
    return not any([result is value for value in (*args, *kwargs.values())])  # changed in place


def _become_row_shard(result: Any, args: tuple[Any, ...]) -> None:
    """Give the result of an operation on a sharded parameter this class: a transposed weight can be misused alike."""
    as_row_shard(result)
    if (name := name_of(args)) is not None:
        result.__dict__[NAME_KEY] = name
        if type(args[0]) is RowShard and shares_storage(local_of(result), local_of(args[0])):
            mark_view(result, args[0])  # the unit's memory: record in-place changes


def deep_copy(tensor: Any, memo: dict[int, Any], apart: Callable[[dict[str, Any]], torch.Tensor]) -> torch.Tensor:
    """Implement `copy.deepcopy` of a sharded tensor, as that of plain ones: with attributes, refused for a non-leaf.

    Args:
        apart: returns the same values in separate memory, with these attributes.
    """
    if not tensor.is_leaf:
        refused: torch.Tensor = torch.Tensor.__deepcopy__(tensor, memo)  # which raises
        return refused
    if id(tensor) not in memo:
        copied = memo[id(tensor)] = apart(copy.deepcopy(attributes_of(tensor), memo))
        if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):  # copies of Parameters have no grad
            copied.grad = copy.deepcopy(tensor.grad, memo)
    result: torch.Tensor = memo[id(tensor)]
    return result


def as_row_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Change the class of `tensor` to this one if it is a plain DTensor; returns the same object."""
    if type(tensor) is DTensor:
        tensor.__class__ = RowShard
    return tensor


def split_alike(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in the placements of `like`: a gradient that every rank has, as of a penalty on a single row."""
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        return tensor.redistribute(placements=like.placements)
    return tensor


def full_of(tensor: DTensor, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
    """`DTensor.full_tensor` for any dtype. Over gloo uses the engine's connections, as a rank may call it alone."""
    if torch.is_inference_mode_enabled() and not is_compiling():
        with outside_inference():
            return full_of(tensor)
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if not is_compiling() and _is_gathered_by_us(tensor):
        if not differentiable:
            return _gathered(tensor)
        placements = grad_placements or [Replicate()] * tensor.device_mesh.ndim
        with_graph: torch.Tensor = _FullOfRows.apply(tensor, placements)
        return with_graph
    if not is_compiling() and not differentiable:
        _meet(tensor)
    # Dtypes that backends do not support are gathered as bytes, along an additional last dim.
    supported = tensor.dtype in KNOWN or tensor.is_complex() or tensor.dtype is torch.bool
    local, width = local_part(tensor), tensor.dtype.itemsize
    if supported or differentiable or type(local) is not torch.Tensor:
        whole: torch.Tensor = DTensor.full_tensor(tensor, grad_placements=grad_placements)
        return whole
    parts = DTensor.from_local(
        local.unsqueeze(-1).view(torch.uint8),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size([*tensor.shape, width]),
        stride=(*[step * width for step in tensor.stride()], 1),
    )
    return parts.full_tensor().contiguous().view(tensor.dtype).squeeze(-1)


def _is_gathered_by_us(tensor: DTensor) -> bool:
    """Whether it is split once, as by `torch.chunk`, over a gloo group for which the engine can open lines."""
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    mesh = tensor.device_mesh
    if len(split) != 1 or type(tensor.placements[split[0]]) is not Shard or mesh.get_coordinate() is None:
        return False
    local, group = local_of(tensor), mesh.get_group(split[0])
    return (
        type(local) is torch.Tensor
        and local.device.type == mesh.device_type
        and can_open(group, mesh.size(split[0]), backend_of(group, mesh.device_type))
    )


def _meet(tensor: DTensor) -> None:
    """Wait for the ranks that share the tensor: a rank that reads it alone (`if rank == 0`) gets an error that says so.

    Over gloo only. What follows is a collective of torch's own, in which it would wait without a word.
    """
    mesh = tensor.device_mesh
    if type(local_of(tensor)) is not torch.Tensor or mesh.get_coordinate() is None:
        return
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(dim) == 1:
            continue
        group = mesh.get_group(dim)
        if can_open(group, mesh.size(dim), backend_of(group, mesh.device_type)):
            reduce_value(
                torch.zeros(1, dtype=torch.int64, device="cpu"), dist.ReduceOp.SUM, group, "a sharded tensor's value"
            )


def _gathered(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, without a graph: the rows of all ranks, concatenated; the last ranks may have fewer rows."""
    (at,) = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    mesh, dim = tensor.device_mesh, tensor.placements[at].dim  # type: ignore[attr-defined]
    local, rows = local_of(tensor).detach().movedim(dim, 0), tensor.shape[dim]
    padded = local.new_zeros(-(-rows // mesh.size(at)), *local.shape[1:])  # [rows of a full part, ...]
    padded[: local.shape[0]] = local
    group = mesh.get_group(at)
    whole = values_of_all(padded, group, "gloo").flatten(0, 1)[:rows].movedim(0, dim)
    owns_storage = whole.untyped_storage().nbytes() == whole.nbytes
    return whole if owns_storage and whole.is_contiguous() else whole.clone(memory_format=torch.contiguous_format)


class _FullOfRows(torch.autograd.Function):
    """`full_of` with a graph: the gradient flows back as in DTensor's own `full_tensor`."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: Sequence[Any]) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.grad_placements = tensor.device_mesh, tensor.placements, grad_placements
        return _gathered(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = DTensor.from_local(grad, ctx.mesh, ctx.grad_placements, run_check=False)
        return whole.redistribute(ctx.mesh, ctx.placements), None


_NAMES = "device dtype shape layout ndim requires_grad is_leaf is_cpu is_cuda is_sparse"
_FACTS = {getattr(torch.Tensor, name).__get__ for name in _NAMES.split()}
"""Non-tensor attributes; direct access takes a third of the time."""

_READS = {f"__{name}__" for name in ("bool", "float", "int", "index", "complex", "format")}
_READS |= {"item", "tolist", "numpy", "is_nonzero"}
"""Names of functions that hand a tensor's values to Python; others may have replaced the functions."""


def _copy_whole(target: Any, source: Any) -> bool:
    """`target.copy_(source)` for a `source` that is the whole tensor, on every rank; returns False if it is not."""
    if not isinstance(target, RowShard) or isinstance(source, DTensor) or tuple(source.shape) != tuple(target.shape):
        return False
    # src_data_rank=None: every rank takes its own part, without communication.
    with plain_access():
        whole = source.detach()
        cut = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        local_of(target).copy_(local_of(cut))
    return True


def name_of(args: tuple[Any, ...]) -> str | None:
    """The name of the first sharded parameter among `args`, or None."""
    return next((name for a in args if (name := getattr(a, "__dict__", {}).get(NAME_KEY))), None)


_warned: list[bool] = []


def _warn_of_file() -> None:
    """Warn, once, if `torch.save` pickles a sharded tensor and is not called by `torch.distributed.checkpoint`."""
    frame, modules = inspect.currentframe(), set[str]()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    if "torch.serialization" not in modules or any(name.startswith("torch.distributed.checkpoint") for name in modules):
        return
    _warned.append(True)
    warnings.warn(saved_by_torch(), stacklevel=2)


def assign_data(parameter: Any, value: Any, same_split: bool) -> None:
    """Implement `parameter.data = value` of a sharded parameter: it shows `value`, and its unit adopts the values.

    torch's own setter would change only the outer tensor and leave the values unchanged.

    Raises:
        ConfigError: `value` is not split like the parameter, or only one of them is on the meta device.
    """
    if not same_split or tuple(value.shape) != tuple(parameter.shape):
        raise data_of_another_shape(
            name_of((parameter,)) or "?", type(parameter).__name__, tuple(parameter.shape), value
        )
    if value.is_meta != parameter.is_meta:
        raise data_on_meta(name_of((parameter,)) or "?", parameter.device.type, value.device.type)
    local = value._local_tensor.detach()
    note_change((parameter,))
    if (unit := owner_of(parameter)) is not None:
        unit.touched.assigned = True
    if (local.dtype, local.device) != (parameter.dtype, parameter.device):
        become(parameter, value)  # the unit adopts it at its next gather
    else:
        # Not copied into the shard, of which programs may have views, such as values saved before this assignment.
        set_local(parameter, local)  # adopted at the next gather, too, into separate memory
