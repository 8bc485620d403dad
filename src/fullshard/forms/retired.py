"""Parameter objects whose values have moved into a shard: any use raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..torch_private.local_tensor import set_local
from .member import NAME_KEY, SUCCESSOR_KEY, successor_of
from .messages import replaced_in_sharding


def called(func: Any) -> str:
    """The name of a method, or of an attribute if `func` is its getter or setter."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


class OriginalParameter(nn.Parameter):
    """The class of a parameter object whose values have moved into a shard: any use raises.

    Later `fully_shard` calls follow ties to it; an optimizer that still refers to it would train nothing.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        retired = next((a for a in args if type(a) in (OriginalParameter, OriginalDTensor)), None)
        name = None if retired is None else successor_of(retired).__dict__.get(NAME_KEY)
        raise replaced_in_sharding(name or "?", called(func))


class OriginalDTensor(DTensor):
    """Like `OriginalParameter`, for a parameter that was a DTensor (tensor parallelism)."""

    __slots__: list[str] = []
    __torch_function__ = OriginalParameter.__torch_function__


def retire(original: nn.Parameter, name: str, successor: torch.Tensor) -> None:
    """Free `original`'s values and make any further use of the object raise.

    `successor_of` still returns its replacement.
    """
    original.grad = None
    if type(original) is not nn.Parameter and not isinstance(original, DTensor):  # a subclass with inner tensors
        original.__dict__.clear()
        original.__class__ = OriginalParameter
        original.__dict__.update({NAME_KEY: name, SUCCESSOR_KEY: successor})
        return
    empty = torch.empty(0, dtype=original.dtype, device=original.device)
    if isinstance(original, DTensor):
        set_local(original, empty)
        original.__class__ = OriginalDTensor  # type: ignore[assignment]
    else:
        original.data = empty
        original.__class__ = OriginalParameter
    original.__dict__[NAME_KEY] = name
    original.__dict__[SUCCESSOR_KEY] = successor
