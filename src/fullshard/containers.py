"""Tensors inside what users pass to and return from a forward: tuples, lists, dicts, dataclasses, any nesting.

Rebuilds a container only where a tensor in it changed, and then keeps its type: named tuples, dict subclasses
(such as the outputs of Hugging Face models) and frozen dataclasses included. Objects of other types are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def leaves_in(value: Any) -> Iterator[Any]:
    """Whatever in `value` is not a container, in order of appearance: tensors, and objects of other types."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name, None))
    else:
        yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order of appearance."""
    for leaf in leaves_in(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; the same object where `fn` changed nothing.

    The original containers are never written to.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return _map_dict(fn, value)
    if isinstance(value, (tuple, list)):
        return _map_sequence(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value


def _map_dict(fn: Callable[[torch.Tensor], torch.Tensor], value: dict[Any, Any]) -> Any:
    changed = {}
    for key, item in value.items():
        new = map_tensors(fn, item)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _map_sequence(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    items = [map_tensors(fn, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            old = getattr(value, field.name)
            new = map_tensors(fn, old)
            if new is not old:
                changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)
    return result


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; integers and masks stay as they are."""
    return map_tensors(partial(_cast, dtype), value)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
