"""What the last forward was called with: shapes, dtypes and plain values, without memory or references to objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, strided

from ..containers import map_leaves
from .outputs import PLAIN


class TensorInput(SimpleNamespace):
    """A tensor without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class OtherInput(SimpleNamespace):
    """An object that is not kept, by the name of its class."""

    kind: str


class Inputs(NamedTuple):
    """The arguments of a forward, each tensor as a `TensorInput`.

    Attributes:
        autocast: the dtype of `torch.autocast` on the mesh's device; None: it was off.
    """

    args: Any
    kwargs: Any
    autocast: torch.dtype | None


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> Inputs:
    """The arguments of a forward as they are kept. Not called in a step like the last one."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if not kwargs and len(args) == 1 and type(x := args[0]) is Tensor and x.layout is strided and not x.is_nested:
        return Inputs((TensorInput(shape=x.shape, dtype=x.dtype, requires_grad=x.requires_grad),), {}, autocast)
    return Inputs(map_leaves(_without_memory, tuple(args)), map_leaves(_without_memory, dict(kwargs)), autocast)


def _without_memory(leaf: Any) -> Any:
    if type(leaf) is Tensor and leaf.layout is strided and not leaf.is_nested:
        return TensorInput(shape=leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    return leaf if isinstance(leaf, PLAIN) else OtherInput(kind=type(leaf).__name__)
