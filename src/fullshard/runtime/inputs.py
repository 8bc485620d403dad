"""The arguments of the last forward: shapes, dtypes and plain values, without memory or references to objects."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, strided

from .outputs import PLAIN

_PLAIN = (*PLAIN, torch.Size)


class TensorInput(SimpleNamespace):
    """A tensor without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class OtherInput(SimpleNamespace):
    """Stands for any other object: the name of its class."""

    kind: str


class Inputs(NamedTuple):
    """The arguments of a forward, each tensor as a `TensorInput`.

    Attributes:
        autocast: the dtype of `torch.autocast` on the mesh's device; None: it was off.
    """

    args: Any
    kwargs: Any
    autocast: torch.dtype | None


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Inputs | None:
    """The arguments of a forward, without memory; None if they cannot be read.

    Called only if shapes, dtypes or keywords differ from those of the last forward, or an argument is not a tensor.
    """
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    try:
        return Inputs(_without_memory(tuple(args)), _without_memory(dict(kwargs)), autocast)
    except Exception:  # a user's class, or a container inside itself: inputs only serve explanations
        return None


def _without_memory(value: Any) -> Any:
    """A value without memory. Instances of users' classes may hold more than their items, except in new dataclasses."""
    kind = type(value)
    if kind is Tensor and value.layout is strided and not value.is_nested:
        return TensorInput(shape=value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
    if isinstance(value, _PLAIN):
        return value
    if kind in (dict, OrderedDict) and all(isinstance(key, PLAIN) for key in value):
        return kind((key, _without_memory(item)) for key, item in value.items())
    if kind in (list, tuple) or (kind.__bases__ == (tuple,) and hasattr(kind, "_make")):
        return getattr(kind, "_make", kind)(map(_without_memory, value))
    if dataclasses.is_dataclass(kind) and not isinstance(value, (dict, list, tuple, nn.Module)):
        new = object.__new__(kind)
        for field in dataclasses.fields(kind):
            if hasattr(value, field.name):
                object.__setattr__(new, field.name, _without_memory(getattr(value, field.name)))
        return new
    return OtherInput(kind=kind.__name__)
