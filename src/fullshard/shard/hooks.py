"""Users' hooks on sharded parameters (`register_hook`): they see a reduced gradient, and may replace it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..forms import kind_and_shape
from ..torch_private.attached_optimizers import KEY as ATTACHED_OPTIMIZERS
from ..torch_private.local_tensor import read_hooks, read_post_hooks
from .messages import not_a_gradient

_attributes, _ATTACHED = attrgetter("__dict__"), repeat(ATTACHED_OPTIMIZERS)


def sees_gradients(parameters: Sequence[Any]) -> bool:
    """Whether users' code runs when any of these gets a gradient: hooks of either kind, or an attached optimizer."""
    attached = map(contains, map(_attributes, parameters), _ATTACHED)
    return any(chain(map(read_hooks, parameters), map(read_post_hooks, parameters), attached))


@contextlib.contextmanager
def shown_empty(parameter: torch.Tensor) -> Iterator[None]:
    """Show an empty gradient on a parameter of which this rank has no part, if `.grad` is None."""
    empty = torch.zeros_like(parameter) if parameter.numel() == 0 and parameter.grad is None else None
    if empty is not None:
        parameter.grad = empty
    try:
        yield
    finally:
        if empty is not None and parameter.grad is empty:
            parameter.grad = None


def run_hooks(parameter: torch.Tensor, grad: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """Run a sharded parameter's hooks on a gradient, in order; returns `grad` itself if they return nothing.

    Args:
        parameter: the parameter.
        grad: its reduced gradient, in the form that users see; may be empty.
        name, rank: for errors.

    Raises:
        ConfigError: see `_checked`.
    """
    hooks: Any = parameter._backward_hooks
    for hook in list(hooks.values()):
        with torch._C._EnableTorchFunction():
            result: Any = hook(grad)
        if result is not None:
            grad = _checked(result, grad, name, rank)
    return grad


def _checked(result: Any, grad: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """Return a hook's replacement for `grad`, sharded like `grad`.

    Raises:
        ConfigError: it has a different class or shape.
    """
    split = isinstance(result, type(grad)) or (isinstance(grad, DTensor) and isinstance(result, DTensor))
    if not split or result.shape != grad.shape:
        raise not_a_gradient(name, rank, kind_and_shape(grad), kind_and_shape(result))
    if isinstance(grad, DTensor) and result.placements != grad.placements:
        result = result.redistribute(placements=grad.placements)
    checked: torch.Tensor = result
    return checked
