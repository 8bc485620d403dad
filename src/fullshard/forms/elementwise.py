"""Which operations are element-wise; those in place on DTensors that are split alike, run on their local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from ..torch_private.local_tensor import local_of, spec_of

_aten: Any = torch.ops.aten


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether an operation computes each element from the same element of its operands, at each position of lists.

    Args:
        name: "mul_", "_foreach_mul_", "_fused_adamw_", ...
    """
    if name.startswith("_fused_"):
        return True
    single = name.removeprefix("_foreach_").rstrip("_")
    if name.startswith("_foreach_") and single in ("copy", "zero", "max"):
        return single != "max"  # with a single operand it reduces over all elements
    packet = getattr(_aten, single, None) if single and not name.startswith("__") else None
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    tags = [getattr(packet, overload).tags for overload in overloads]
    return any(torch.Tag.pointwise in each and torch.Tag.nondeterministic_seeded not in each for each in tags)


def on_locals(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an element-wise operation in place on the local tensors of its DTensors, if these are split alike.

    The values are those of DTensor's own dispatch, which takes 15 to 20 us per operation: optimizers call ten of them
    per parameter and step. Its dispatch of `_foreach_` operations takes no longer than this would: they are left to it.

    Returns:
        What the operation returns; NotImplemented if it was not run.
    """
    name = getattr(func, "__name__", "")
    if name[-1:] != "_" or not args or not is_elementwise(name) or torch.is_grad_enabled() or is_compiling():
        return NotImplemented
    if name.startswith("_fused_"):
        return _fused_on_locals(func, args, kwargs)
    first = args[0]
    if not isinstance(first, torch.Tensor):
        return NotImplemented
    values = [_beside(value, first) for value in args]
    if any([value is NotImplemented for value in values]):
        return NotImplemented
    if kwargs and any([isinstance(value, torch.Tensor) for value in kwargs.values()]):
        return NotImplemented
    func(*values, **kwargs)
    increment_version(first)
    return first


def _beside(value: Any, first: Any) -> Any:
    """The local tensor of a DTensor that is split like `first`; other values unchanged; NotImplemented: neither."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor) or not isinstance(first, DTensor):
        return NotImplemented
    local, spec, other = local_of(value), spec_of(value), spec_of(first)
    if value is first:
        alike = _is_whole_or_split(spec.placements)
    else:
        alike = spec.shape == other.shape and local.shape == local_of(first).shape
        alike = alike and spec.placements == other.placements and spec.mesh == other.mesh
    return local if alike and type(local) is torch.Tensor else NotImplemented


def _fused_on_locals(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = args[0]
    changed: list[Any] = []
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        several = isinstance(value, (list, tuple))
        tensors = [item for item in (value if several else [value]) if isinstance(item, torch.Tensor)]
        if not any([isinstance(tensor, DTensor) or tensor.dim() for tensor in tensors]):
            values.append(value)  # numbers, counts of steps
            continue
        if not several or len(value) != len(first):
            return NotImplemented
        locals_ = [*map(_beside, value, first)]
        if {*map(type, locals_)} != {torch.Tensor}:
            return NotImplemented
        changed += value
        values.append(locals_)
    func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    increment_version(changed)
    return None


@functools.cache
def _is_whole_or_split(placements: tuple[Any, ...]) -> bool:
    """Whether no placement is `Partial`, whose elements are sums that no rank has."""
    return not any(placement.is_partial() for placement in placements)
