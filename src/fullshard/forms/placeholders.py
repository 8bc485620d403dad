"""Parameters without values of their own, any use of which raises: originals that were sharded, and stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..torch_private.fake_tensors import is_fake
from ..torch_private.local_tensor import has_memory, plain_access, set_local, write_data
from .member import NAME_KEY, SUCCESSOR_KEY, Member, successor_of
from .messages import hidden_now, replaced_in_sharding


def _called(func: Any) -> str:
    """The name of a method, or of an attribute if `func` is its getter or setter."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def _name_among(args: tuple[Any, ...], *classes: type) -> str:
    """The name of the first parameter of these classes among `args`."""
    parameter = next((arg for arg in args if type(arg) in classes), None)
    return "?" if parameter is None else successor_of(parameter).__dict__.get(NAME_KEY) or "?"


class OriginalParameter(nn.Parameter):
    """The class of a parameter object whose values have moved into a shard: any use raises.

    Later `fully_shard` calls follow ties to it; an optimizer that still refers to it would train nothing.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise replaced_in_sharding(_name_among(args, OriginalParameter, OriginalDTensor), _called(func))


class OriginalDTensor(DTensor):
    """Like `OriginalParameter`, for a parameter that was a DTensor (tensor parallelism)."""

    __slots__: list[str] = []
    __torch_function__ = OriginalParameter.__torch_function__


def retire(original: nn.Parameter, name: str, successor: torch.Tensor) -> None:
    """Free `original`'s values and make any further use of the object raise.

    `successor_of` still returns its replacement.
    """
    original.grad = None
    if isinstance(original, DTensor):
        set_local(original, torch.empty(0, dtype=original.dtype, device=original.device))
        original.__class__ = OriginalDTensor  # type: ignore[assignment]
    else:
        if type(original) is not nn.Parameter:  # a subclass, which may have inner tensors
            original.__dict__.clear()
        if not hasattr(original, "__tensor_flatten__") and has_memory(original) and not is_fake(original):
            with plain_access():
                write_data(original, torch.empty(0, dtype=original.dtype, device=original.device))
        original.__class__ = OriginalParameter
    original.__dict__.update({NAME_KEY: name, SUCCESSOR_KEY: successor})


class HiddenParameter(nn.Parameter):
    """Stand-in on a module for a parameter that lies in a `FlatParameter` and is not gathered now.

    Has its shape, dtype and device; any other use raises.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func in _HARMLESS or name in ("size", "dim", "numel", "__repr__", "ndimension"):
            with plain_access():
                if name == "__repr__":
                    return f"HiddenParameter(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
                return func(*args, **(kwargs or {}))
        raise hidden_now(_called(func), _name_among(args, HiddenParameter))


_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "grad", "is_cuda")
}


def stand_in_for(member: Member, dtype: torch.dtype, device: torch.device) -> HiddenParameter:
    """Make the stand-in for a member: its shape, dtype and device over memory of a single element."""
    element = torch.empty((), dtype=dtype, device=device)
    stand_in: Any = torch.Tensor._make_subclass(
        HiddenParameter, element.expand(member.slot.shape), member.sharded.requires_grad
    )
    stand_in.__dict__[NAME_KEY] = member.name
    stand_in.__dict__[SUCCESSOR_KEY] = member.sharded
    return stand_in
