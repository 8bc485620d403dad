"""Operations on DTensors that are split alike, run on local tensors: element-wise ones in place, norms of lists."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Replicate

from ..comm import largest_value
from ..torch_private.local_tensor import keep_mesh, local_of, plain_access, spec_of, with_spec

_aten: Any = torch.ops.aten
_FOREACH_NORM: Any = torch._foreach_norm
_DTENSORS = repeat(DTensor)
_PLACEMENTS = attrgetter("_spec.placements")
_KIND = attrgetter("_spec.placements", "_spec.mesh", "_spec.tensor_meta.dtype")
SPLIT_OF_ROWS = attrgetter("_spec.placements", "_spec.mesh", "_spec.tensor_meta.shape", "_local_tensor.shape")
"""How a DTensor is split, to compare with another; read without its `__torch_function__`."""


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
    """Run an element-wise operation in place, or norms of a list, on the local tensors of DTensors split alike.

    The values are those of DTensor's own dispatch, which takes several times as long.

    Returns:
        What the operation returns; NotImplemented if it was not run.
    """
    name = getattr(func, "__name__", "")
    in_place = name[-1:] == "_" and is_elementwise(name)
    if not (in_place or func is _FOREACH_NORM) or not args or torch.is_grad_enabled() or is_compiling():
        return NotImplemented
    if not in_place:
        return _norms(args, kwargs)
    if name.startswith(("_fused_", "_foreach_")):
        return _lists_on_locals(func, args, kwargs, name.startswith("_fused_"))
    first = args[0]
    values = [_beside(value, first) for value in args]
    if not isinstance(first, torch.Tensor) or any([value is NotImplemented for value in values]):
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


def _lists_on_locals(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], all_change: bool) -> Any:
    """The same for operations on lists, which compare and read their tensors in C.

    Args:
        all_change: whether the operation changes every list, not only the first.
    """
    first = args[0]
    if not _are_dtensors(first) or not all(map(_is_whole_or_split, {*map(_PLACEMENTS, first)})):
        return NotImplemented
    operands = [*args, *kwargs.values()]
    lists = [*filter(_are_dtensors, operands)]
    splits = [[*map(SPLIT_OF_ROWS, each)] for each in lists] if len(lists) > 1 else []
    values = [_in_lists(value) for value in operands]
    if any([split != splits[0] for split in splits]) or any([value is NotImplemented for value in values]):
        return NotImplemented
    result = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    increment_version([*chain.from_iterable(lists)] if all_change else first)
    return None if result is None else first


def _norms(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch._foreach_norm` of a list; DTensor's dispatch is asked only once how the results are summed over ranks.

    The largest absolute value of an empty part is 0. Torch refuses to say so, on the rank that has the part: the others
    would wait for it.
    """
    tensors = args[0]
    if not _are_dtensors(tensors) or len({*map(_KIND, tensors)}) > 1 or not _is_whole_or_split(tensors[0].placements):
        return NotImplemented
    parts = [*map(local_of, tensors)]
    if {*map(type, parts)} != {torch.Tensor}:
        return NotImplemented
    one = parts[0].new_zeros(1)
    infinite = math.inf in (*args[1:], *kwargs.values())
    if infinite:
        parts = [part if part.numel() else one for part in parts]
    norms: Any = _FOREACH_NORM(parts, *args[1:], **kwargs)
    with plain_access():
        if infinite:  # of all ranks at once, with NaN
            norms, mesh = torch.stack(norms), tensors[0].device_mesh
            for dim, placement in enumerate(tensors[0].placements):
                if placement.is_shard() and mesh.size(dim) > 1:
                    norms = largest_value(norms, mesh.get_group(dim))
            norms = norms.unbind()
            first: Any = DTensor.from_local(norms[0], mesh, [Replicate()] * mesh.ndim, run_check=False)
        else:
            (first,) = _FOREACH_NORM([with_spec(one, spec_of(tensors[0]))], *args[1:], **kwargs)
        keep_mesh(first, tensors[0])
        return (*map(with_spec, norms, repeat(spec_of(first))),)


def _are_dtensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(isinstance, value, _DTENSORS))


def _in_lists(value: Any) -> Any:
    """An operand with local tensors in place of a list's DTensors; NotImplemented: it is neither a list nor a number.

    A single number may be a DTensor that every rank has. Tensors of one number each are counts of steps.
    """
    if _are_dtensors(value):
        parts = [*map(local_of, value)]
        return parts if {*map(type, parts)} == {torch.Tensor} else NotImplemented
    if isinstance(value, DTensor):
        is_known = not value.dim() and all([placement.is_replicate() for placement in value.placements])
        return local_of(value) if is_known else NotImplemented
    items = value if isinstance(value, (list, tuple)) else [value]
    is_number = not any(
        [isinstance(item, torch.Tensor) and (item.dim() or isinstance(item, DTensor)) for item in items]
    )
    return value if is_number else NotImplemented


@functools.cache
def _is_whole_or_split(placements: tuple[Any, ...]) -> bool:
    """Whether no placement is `Partial`, whose elements are sums that no rank has."""
    return not any(placement.is_partial() for placement in placements)
