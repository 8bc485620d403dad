"""`RowShard`: the DTensor that users see in place of a parameter that is split into rows."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..comm import can_open, values_of_all
from ..containers import call_apart
from ..dtypes import KNOWN
from ..mesh import backend_of
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
    write_grad,
)
from .changes import changes_in_place, give_up_gradient, mark_view, note_change, owner_of
from .member import NAME_KEY, attributes_of
from .messages import copied_into_whole, data_of_another_shape, data_on_meta, saved_by_torch, used_while_freed

DATA_DIMS_KEY = "_fullshard_data_dims"
"""Where a `RowShard` keeps how many dims of its mesh, the first ones, are data-parallel."""


class RowShard(DTensor):
    """A sharded parameter of the rows layout: a `DTensor`, whose misuse names itself.

    It behaves as any DTensor, with three additions: where an operation mixes it with plain tensors, which happens when
    code runs a module's weights while their unit is freed, the error says so and what to do; changes in place are
    noted, so that a pending backward is not run with other weights; and gradients through `full_tensor()` are averaged
    over the ranks of the mesh, which compute different batches; `copy_` takes whole tensors.
    Gradients, and what `detach()` and `.data` give, are of this class too, since all of these are views of their unit's
    memory: pickled and copied they become plain DTensors in memory of their own.
    """  # no __slots__: what stages tensors for a checkpoint reads DTensor's

    @property
    def data(self) -> torch.Tensor:
        """As `Tensor.data`. A DTensor that is assigned has the same shape and placements."""
        with plain_access():
            found = as_row_shard(read_data(self))
        keep_mesh(found, self)
        mark_view(found, self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        same = False
        if isinstance(value, DTensor):
            same = value.placements == self.placements and value.device_mesh == self.device_mesh
        assign_data(self, value, same)

    @property
    def grad(self) -> torch.Tensor | None:
        """The sharded gradient, or None. As `Tensor.grad`, without asking `__torch_function__`."""
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
        with plain_access():
            delete_grad(self)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective.

        Args:
            grad_placements: as `DTensor.full_tensor`'s; None: the gradient that comes back is averaged over the
                data-parallel ranks, as those that forward leaves, and the same on tensor-parallel ones.
        """
        data_dims = self.__dict__.get(DATA_DIMS_KEY)
        if grad_placements is None and data_dims is not None and self.requires_grad and torch.is_grad_enabled():
            grad_placements = [
                Partial("avg") if dim < data_dims else Replicate() for dim in range(self.device_mesh.ndim)
            ]
        return full_of(self, grad_placements)

    def data_ptr(self) -> int:
        """0: a DTensor has no memory but its local tensor's. (torch's gives the offset of that one, without a base.)"""
        return 0

    def _apart(self, attributes: dict[str, Any]) -> torch.Tensor:
        """A plain DTensor of the same values in memory of its own."""
        with plain_access(), torch.no_grad():
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
        if not self.is_leaf:
            copied: torch.Tensor = super().__deepcopy__(memo)  # which raises
            return copied
        if id(self) not in memo:
            memo[id(self)] = made = self._apart(copy.deepcopy(attributes_of(self), memo))
            if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # whose copies have none
                made.grad = copy.deepcopy(self.grad, memo)
        found: torch.Tensor = memo[id(self)]
        return found

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> torch.Tensor:
        """As DTensor's, of this class: `torch.compile` asks for inputs of the class that this gives."""
        return as_row_shard(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            result = plain_call(func, types, args, kwargs or {})
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            if len(set(kinds := _kinds(func, args))) == 2:  # units of several layouts
                return call_apart(func, args, kwargs or {}, kinds)
            if name_of(args) is None:
                raise
            if func is torch.Tensor.copy_ and not isinstance(args[0], DTensor):
                raise copied_into_whole(name_of(args)) from None
            if func is not torch.Tensor.copy_ or not _copy_whole(*args[:2]):
                raise used_while_freed(getattr(func, "__name__", func), name_of(args) or "?") from error
            result = args[0]
        if changes_in_place(getattr(func, "__name__", "")):
            note_change(args[:1])
        keep_mesh(result, args[0] if args else None)
        if type(result) is DTensor and (result.grad_fn is not None or func in _VIEWS) and not is_compiling():
            as_row_shard(result)  # a transpose of a weight is misused just as the weight is
            if (name := name_of(args)) is not None:
                result.__dict__[NAME_KEY] = name
                if func in _VIEWS and type(args[0]) is RowShard:  # the unit's memory: changes in place are noted
                    mark_view(result, args[0])
        return result


def _kinds(func: Callable[..., Any], args: tuple[Any, ...]) -> list[bool]:
    """Which of the tensors are DTensors that `func` works on one by one, in a list (foreach, fused optimizers)."""
    if not getattr(func, "__name__", "").startswith(("_foreach_", "_fused_")) or not args:
        return []
    return [isinstance(each, DTensor) for each in args[0]] if isinstance(args[0], (list, tuple)) else []


def as_row_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The same object, of this class from now on if it is a DTensor."""
    if type(tensor) is DTensor:
        tensor.__class__ = RowShard
    return tensor


def full_of(tensor: DTensor, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
    """`DTensor.full_tensor` of any dtype. Over gloo by the engine's own connections, where a rank may be alone."""
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if not is_compiling() and _is_gathered_by_us(tensor):
        if not differentiable:
            return _gathered(tensor)
        wanted = grad_placements or [Replicate()] * tensor.device_mesh.ndim
        made: torch.Tensor = _Whole.apply(tensor, wanted)
        return made
    # What backends do not know is gathered as bytes, along a last dim.
    known = tensor.dtype in KNOWN or tensor.is_complex() or tensor.dtype is torch.bool
    local, width = local_part(tensor), tensor.dtype.itemsize
    if known or differentiable or type(local) is not torch.Tensor:
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
    """Whether it is split once, as `torch.chunk` would, over a gloo group that has, or may have, lines of ours."""
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


def _gathered(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, without a graph: rows of all ranks one after the other, of which the last may have fewer."""
    (at,) = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    mesh, dim = tensor.device_mesh, tensor.placements[at].dim  # type: ignore[attr-defined]
    local, rows = local_of(tensor).detach().movedim(dim, 0), tensor.shape[dim]
    padded = local.new_zeros(-(-rows // mesh.size(at)), *local.shape[1:])  # [rows of a full part, ...]
    padded[: local.shape[0]] = local
    group = mesh.get_group(at)
    whole = values_of_all(padded, group, "gloo").flatten(0, 1)[:rows].movedim(0, dim)
    alone = whole.untyped_storage().nbytes() == whole.nbytes
    return whole if alone and whole.is_contiguous() else whole.clone(memory_format=torch.contiguous_format)


class _Whole(torch.autograd.Function):
    """`full_of` with a graph: the gradient comes back as DTensor's own `full_tensor` has it."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: Sequence[Any]) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.grad_placements = tensor.device_mesh, tensor.placements, grad_placements
        return _gathered(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = DTensor.from_local(grad, ctx.mesh, ctx.grad_placements, run_check=False)
        return whole.redistribute(ctx.mesh, ctx.placements), None


_VIEWS = {
    torch.Tensor.detach,
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.Tensor.t,
    torch.t,
    torch.Tensor.transpose,
    torch.transpose,
    torch.Tensor.permute,
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.unsqueeze,
    torch.Tensor.to,
    torch.Tensor.__getitem__,
}


def _copy_whole(target: Any, source: Any) -> bool:
    """`target.copy_(source)` where `source` is the whole tensor, which every rank has; False if it is not."""
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
    """Warn if `torch.save` itself is what pickles a sharded tensor now, not `torch.distributed.checkpoint`. Once."""
    frame, modules = inspect.currentframe(), set[str]()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    if "torch.serialization" not in modules or any(name.startswith("torch.distributed.checkpoint") for name in modules):
        return
    _warned.append(True)
    warnings.warn(saved_by_torch(), stacklevel=2)


def assign_data(parameter: Any, value: Any, same_split: bool) -> None:
    """What `parameter.data = value` does to a sharded parameter: it shows `value`, and its unit takes the values over.

    torch's own setter would change the outer tensor only and leave the values as they were.

    Raises:
        ConfigError: `value` is not split as the parameter is, or one of them is on the meta device.
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
        become(parameter, value)  # the unit takes it over at its next gather
    else:
        # Never copied into the shard: programs hold views of it, such as the values that they set aside before this.
        set_local(parameter, local)  # taken over at the next gather, too, into memory of its own
