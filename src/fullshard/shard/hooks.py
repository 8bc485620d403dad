"""Hooks that users put on sharded parameters (`register_hook`): they see a reduced gradient, and may replace it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..forms import Form, Member
from ..torch_private.attached_optimizers import KEY as ATTACHED_OPTIMIZERS
from ..torch_private.local_tensor import read_hooks, read_post_hooks
from .messages import not_a_gradient

_attributes, _ATTACHED = attrgetter("__dict__"), repeat(ATTACHED_OPTIMIZERS)


def sees_gradients(parameters: Sequence[Any]) -> bool:
    """Whether users' code runs when one of these gets a gradient: hooks of either kind, or an attached optimizer."""
    attached = map(contains, map(_attributes, parameters), _ATTACHED)
    return any(chain(map(read_hooks, parameters), map(read_post_hooks, parameters), attached))


@contextlib.contextmanager
def shown_empty(parameter: torch.Tensor) -> Iterator[None]:
    """Let a parameter of which this rank holds nothing show an empty gradient, if it shows none."""
    empty = torch.zeros_like(parameter) if parameter.numel() == 0 and parameter.grad is None else None
    if empty is not None:
        parameter.grad = empty
    try:
        yield
    finally:
        if empty is not None and parameter.grad is empty:
            parameter.grad = None


def hooked_member(form: Form, member: Member, local: torch.Tensor, dtype: torch.dtype, rank: int) -> None:
    """Run a member's hooks on this rank's part of a reduced gradient, and write what they give into it.

    Args:
        form: of the member's bucket.
        local: the part; may be empty.
        dtype: of `.grad`.
        rank: for errors.

    Raises:
        ConfigError: see `_checked`.
    """
    found = _given(member.sharded, form.view(member, local.to(dtype)), member.name, rank)
    local.copy_(form.local(member, found))


def hooked_flat(flat: torch.Tensor, names: str, reduced: torch.Tensor, dtype: torch.dtype, rank: int) -> None:
    """Run the hooks of a `FlatParameter` on the reduced slice [shard_numel]; see `hooked_member`."""
    reduced.copy_(_given(flat, reduced.to(dtype), names, rank))


def _given(parameter: torch.Tensor, grad: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """What the hooks make of `grad`, one after another; `grad` itself if they give nothing."""
    hooks: Any = parameter._backward_hooks
    for hook in list(hooks.values()):
        with torch._C._EnableTorchFunction():
            found: Any = hook(grad)
        if found is not None:
            grad = _checked(found, grad, name, rank)
    return grad


def _checked(found: Any, grad: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """What a hook gave in place of `grad`, split as that is.

    Raises:
        ConfigError: it is of another kind or shape.
    """
    split = isinstance(found, type(grad)) or (isinstance(grad, DTensor) and isinstance(found, DTensor))
    if not split or found.shape != grad.shape:
        kinds = [f"{type(each).__name__} of shape {tuple(getattr(each, 'shape', ()))}" for each in (grad, found)]
        raise not_a_gradient(name, rank, *kinds)
    if isinstance(grad, DTensor) and found.placements != grad.placements:
        found = found.redistribute(placements=grad.placements)
    checked: torch.Tensor = found
    return checked
