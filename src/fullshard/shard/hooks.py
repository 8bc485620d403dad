"""Hooks that users put on sharded parameters (`register_hook`): they see a reduced gradient, and may replace it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..torch_private.attached_optimizers import attached_to
from .bucket import Bucket
from .member import Member


def sees_gradients(parameter: torch.Tensor) -> bool:
    """Whether users' code runs when a parameter gets a gradient: hooks of either kind, or an attached optimizer."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks or after or attached_to(parameter))


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


def hooked_member(bucket: Bucket, member: Member, local: torch.Tensor, dtype: torch.dtype) -> None:
    """Run a member's hooks on this rank's part of a reduced gradient, and write what they give into it.

    Args:
        local: the part; may be empty.
        dtype: of `.grad`.

    Raises:
        ConfigError: see `_checked`.
    """
    shown = bucket.shown(local.to(dtype), member)
    found = _given(member.sharded, shown, member.name, bucket.axes.global_rank)
    local.copy_(bucket.local(found, member))


def hooked_flat(bucket: Bucket, reduced: torch.Tensor, dtype: torch.dtype) -> None:
    """Run the hooks of a bucket's `FlatParameter` on the reduced slice [shard_numel]; see `hooked_member`."""
    names = ", ".join(member.name for member in bucket.members)
    reduced.copy_(_given(bucket.flat_parameter, reduced.to(dtype), names, bucket.axes.global_rank))


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
        raise ConfigError(
            "A hook on a sharded parameter gave something else than a gradient of it.",
            parameter=name,
            rank=rank,
            expected=f"None, or {type(grad).__name__} of shape {tuple(grad.shape)}, as the gradient that it was given",
            got=f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}",
            remedy="compute what is returned from the gradient that the hook is given (torch.zeros_like(grad))",
        )
    if isinstance(grad, DTensor) and found.placements != grad.placements:
        found = found.redistribute(placements=grad.placements)
    checked: torch.Tensor = found
    return checked
