"""Stand-ins on modules for parameters that lie in a `FlatParameter`, while it is not gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..torch_private.local_tensor import plain_access
from .member import NAME_KEY, SUCCESSOR_KEY, Member, successor_of
from .messages import hidden_now
from .retired import called


class HiddenParameter(nn.Parameter):
    """Stand-in on a module for a parameter that lies in a `FlatParameter` and is not gathered now.

    Has its shape, dtype and device; any other use raises.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func in _HARMLESS or name in ("size", "dim", "numel", "__repr__", "ndimension"):
            with plain_access():
                if name == "__repr__":
                    return f"HiddenParameter(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
                return func(*args, **(kwargs or {}))
        raise hidden_now(
            called(func),
            next((successor_of(a).__dict__.get(NAME_KEY) for a in args if isinstance(a, HiddenParameter)), "?"),
        )


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
