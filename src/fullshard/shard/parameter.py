"""The tensors that users see in place of their parameters: rows as DTensors, and what is left of the originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import ConfigError, PhaseError
from ..layout import Part, Slot
from ..mesh import MeshAxes

OWNER_KEY = "_fullshard_unit"
"""Where a parameter, sharded or unsharded, keeps a weak reference to the unit that owns it."""


plain_access = torch._C.DisableTorchFunctionSubclass
"""A context in which `RowShard.__torch_function__` is not asked: reading `.grad` costs 0.1 us in place of 2."""

_plain_call = torch._C._disabled_torch_function_impl
_grad: Any = torch.Tensor.grad  # the descriptors
read_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
"""`tensor.grad` within `plain_access`, without the property below."""
write_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
_data: Any = torch.Tensor.data


class RowShard(DTensor):
    """A sharded parameter of the rows layout: a `DTensor`, whose misuse names itself.

    It behaves as any DTensor. The only addition: where an operation mixes it with plain tensors, which happens when
    code runs a module's weights while their unit is freed, the error says so and what to do.
    """

    __slots__: list[str] = []

    @property
    def data(self) -> torch.Tensor:
        """As `Tensor.data`. Assigning a DTensor of the same shape and placements writes its values into the shard."""
        with plain_access():
            return _data.__get__(self)

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
            return _grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with plain_access():
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with plain_access():
            _grad.__delete__(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            result = _plain_call(func, types, args, kwargs or {})
            if type(result) is DTensor and (result.grad_fn is not None or func in _VIEWS):
                result.__class__ = RowShard  # a transpose of a weight is misused just as the weight is
                result.__dict__["_fullshard_name"] = _name_of(args)
            return result
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise freed_error(args, func) from error


_VIEWS = {
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


def _name_of(args: tuple[Any, ...]) -> str | None:
    """The name of the first sharded parameter among `args`, or None."""
    return next((name for a in args if (name := getattr(a, "__dict__", {}).get("_fullshard_name"))), None)


def freed_error(args: tuple[Any, ...], func: Callable[..., Any]) -> PhaseError:
    """The error for computing with a sharded parameter as if it were the whole one."""
    return PhaseError(
        f"{getattr(func, '__name__', func)} was given a plain tensor and a sharded parameter, "
        "whose unit is not gathered now.",
        parameter=_name_of(args) or "?",
        expected="a call through the unit's forward, which gathers the parameter first",
        got="a call from outside it",
        remedy="if a method other than forward uses this weight, name it with "
        "register_fsdp_forward_method(module, 'method'), or wrap the call in module.unshard() ... "
        "module.reshard(); to combine tensors on purpose make both DTensors, or use full_tensor()",
    )


class OriginalParameter(nn.Parameter):
    """What a parameter object becomes once its values have moved into a shard: any use raises.

    Ties to it are followed by later `fully_shard` calls; an optimizer that still holds it would train nothing.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = next(
            (a.__dict__.get("_fullshard_name") for a in args if type(a) in (OriginalParameter, OriginalDTensor)), None
        )
        raise ConfigError(
            "This Parameter object was replaced by its sharded form in fully_shard, and no longer holds values.",
            parameter=name or "?",
            got=f"{getattr(func, '__name__', func)} on the object from before fully_shard",
            remedy="build optimizers after fully_shard, from model.parameters(); share a weight between "
            "modules inside one module that fully_shard is applied to",
        )


class OriginalDTensor(DTensor):
    """As `OriginalParameter`, for a parameter that was a DTensor (tensor parallelism)."""

    __slots__: list[str] = []
    __torch_function__ = OriginalParameter.__torch_function__


def retire(original: nn.Parameter, name: str, successor: torch.Tensor) -> None:
    """Free `original`'s values and make every further use of the object raise.

    `successor_of` still tells what took its place.
    """
    original.grad = None
    if type(original) is not nn.Parameter and not isinstance(original, DTensor):  # a subclass with inner tensors
        original.__dict__.clear()
        original.__class__ = OriginalParameter
        original.__dict__.update({"_fullshard_name": name, "_fullshard_successor": successor})
        return
    nothing = torch.empty(0, dtype=original.dtype, device=original.device)
    if isinstance(original, DTensor):
        set_local(original, nothing)
        original.__class__ = OriginalDTensor  # type: ignore[assignment]
    else:
        original.data = nothing
        original.__class__ = OriginalParameter
    original.__dict__["_fullshard_name"] = name
    original.__dict__["_fullshard_successor"] = successor


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sharded parameter that took `parameter`'s place (or that of the one which did), or `parameter` itself."""
    while (successor := parameter.__dict__.get("_fullshard_successor")) is not None:
        parameter = successor
    return parameter


def rows_tensor(local: torch.Tensor, slot: Slot, axes: MeshAxes, apart: bool = False) -> DTensor:
    """This rank's chunk `local` (a view of the shard) as a DTensor of the whole parameter.

    Args:
        apart: `local` may be on another device than the mesh (offloaded): `from_local` would move it there.
    """
    if apart and not local.is_meta:
        stand_in = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=axes.device)
        made: Any = rows_tensor(stand_in, slot, axes)
        set_local(made, local)
        return made.detach()  # a new wrapper, which takes the device of `local`
    placement = Shard(slot.spec.dim)
    placements = (placement,) if axes.replicate is None else (Replicate(), placement)
    # Shape and stride are given because chunks may be uneven; no check, hence no communication.
    return DTensor.from_local(
        local, axes.mesh, placements, run_check=False, shape=torch.Size(slot.shape), stride=slot.stride
    )


def rows_parameter(tensor: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> nn.Parameter:
    """A trainable (or frozen) `RowShard` of the DTensor `tensor`, with the original parameter's own attributes."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    parameter.__class__ = RowShard  # type: ignore[assignment]
    parameter.__dict__.update(attributes)
    return parameter


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What users set on a parameter (`p.no_decay = True`), without what Fullshard keeps there."""
    ours = ("_local_tensor", "_run")
    return {k: v for k, v in parameter.__dict__.items() if k not in ours and not k.startswith("_fullshard")}


def identity_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What a tensor that takes `parameter`'s place must be given: its owner, its name, and what users set on it."""
    kept = {k: v for k, v in parameter.__dict__.items() if k.startswith("_fullshard")}
    return {**attributes_of(parameter), **kept}


def part_view(shard: torch.Tensor, part: Part) -> torch.Tensor:
    """`part` of a parameter as a view of this rank's shard [shard_numel]."""
    return shard.as_strided(part.shape, part.stride, shard.storage_offset() + part.offset)


def assign_data(parameter: Any, value: Any, same_split: bool) -> None:
    """What `parameter.data = value` does to a sharded parameter: the values go into its shard.

    torch's own setter would change the outer tensor only and leave the values as they were.

    Raises:
        ConfigError: `value` is not split as the parameter is.
    """
    if not same_split or tuple(value.shape) != tuple(parameter.shape):
        raise ConfigError(
            "A sharded parameter's .data was set to a tensor that is not its shard.",
            parameter=_name_of((parameter,)) or "?",
            expected=f"{type(parameter).__name__} of shape {tuple(parameter.shape)}, split the same way",
            got=f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}",
            remedy="assign a result of this parameter (p.data = p.data * 2), or load whole tensors with "
            "load_state_dict",
        )
    local = value._local_tensor.detach()
    if (local.dtype, local.device) == (parameter.dtype, parameter.device):
        with torch.no_grad():
            local_of(parameter).copy_(local)
    else:
        set_local(parameter, local)  # the unit takes it over at its next gather


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor inside a sharded parameter: the very object, to tell whether it was replaced.

    Private torch API: `DTensor._local_tensor`. The public `to_local()` makes a new tensor object at each call and
    takes 5 us, so identity could not be checked every step.
    """
    return parameter._local_tensor  # type: ignore[attr-defined]


def set_local(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make `parameter` a view of `local`; see `local_of`. Both hold the same shape and dtype."""
    parameter._local_tensor = local  # type: ignore[attr-defined]
