"""Tensors inside the arguments and outputs of a forward: tuples, lists, dicts, dataclasses, nested at any depth.

Rebuilds a container only if a tensor in it changed, and then keeps its type: named tuples, dict subclasses (such as the
outputs of Hugging Face models) and frozen dataclasses included. Objects of other types are leaves.

Lists, dicts and dataclasses that a user passes to a call are never rebuilt, because the call may write to them: see
`Borrowed`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

_nothing: deque[object] = deque(maxlen=0)
drain: Callable[[Iterable[object]], object] = _nothing.extend
"""Exhausts an iterator, in C: `drain(map(call, functions))` calls all of them."""
NONES = repeat(None)
"""An endless iterator of None: `map(is_, values, NONES)`."""


def call_apart(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kinds: Sequence[bool]
) -> list[Any] | None:
    """Call a function that treats the positions of its lists independently, once per kind of position.

    Args:
        func: takes lists, and returns a list of results of the same length, or None.
        args, kwargs: lists as long as `kinds`; other values are passed unchanged.
        kinds: per position, which of two kinds it is.

    Returns:
        The results by position; None if there are none.
    """
    results: dict[int, Any] = {}

    def chosen(value: Any, places: Sequence[int]) -> Any:
        return [value[at] for at in places] if isinstance(value, (list, tuple)) and len(value) == len(kinds) else value

    for kind in set(kinds):
        places = [at for at, each_kind in enumerate(kinds) if each_kind is kind]
        chosen_kwargs = {name: chosen(value, places) for name, value in kwargs.items()}
        outputs = func(*[chosen(value, places) for value in args], **chosen_kwargs)
        if outputs is not None:
            results.update(zip(places, outputs, strict=True))
    return [results[at] for at in range(len(kinds))] if results else None


def leaves_in(value: Any) -> Iterator[Any]:
    """All leaves of `value`, in order of appearance: tensors, and objects of other types."""
    items = _items(value)
    if items is None:
        yield value
    else:
        for _, item in items:
            yield from leaves_in(item)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order of appearance."""
    for leaf in leaves_in(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, borrowed: Borrowed | None = None) -> Any:
    """`value` with `fn` applied to every tensor in it; the same object if `fn` changed nothing.

    Writes to no container except those in `borrowed`.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    items = _items(value)
    if items is None:
        return value
    changes = {}
    for key, item in items:
        new = map_tensors(fn, item, borrowed)
        if new is not item:
            changes[key] = new
    if not changes or (borrowed is not None and borrowed.write(value, changes)):
        return value
    return _rebuilt(value, changes)


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """A copy of `value` with `fn` applied to all of its leaves, including those that are not tensors."""
    items = _items(value)
    return fn(value) if items is None else _rebuilt(value, {key: map_leaves(fn, item) for key, item in items})


def map_own(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`map_tensors` for an argument as passed: only tensors and tensors in tuples; other containers are the user's."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if not isinstance(value, tuple):
        return value
    items = [map_own(fn, item) for item in value]
    changes = {index: new for index, (new, item) in enumerate(zip(items, value, strict=True)) if new is not item}
    return _rebuilt(value, changes) if changes else value


def _rebuilt(value: Any, changes: dict[Any, Any]) -> Any:
    """A copy of a container with some of its items replaced."""
    if type(value) is dict:
        return {**value, **changes}
    if isinstance(value, (tuple, list)):
        items = [changes.get(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for key, item in changes.items():
        _put(result, key, item)
    return result


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Keys and items of a container; None for anything else."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _put(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, (dict, list)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)


_SIMPLE = frozenset(
    (torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
)


def borrowed_from(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Borrowed | None:
    """All of a call's arguments that the call can write to; None if there are none."""
    values: list[Any] = []
    ahead = [*args, *kwargs.values()] if kwargs else list(args)
    for value in ahead:  # grows during the loop
        if type(value) not in _SIMPLE:
            if isinstance(value, tuple):
                ahead += value
            elif not isinstance(value, torch.Tensor):
                values.append(value)
    return Borrowed(values) if values else None


class Borrowed:
    """The arguments that a call can write to: lists, dicts, dataclasses, and objects of other types.

    The caller also refers to them, and reads them after the call, so they are never replaced by copies. If a tensor in
    a list, dict or dataclass has to be replaced during the call (a cast, a copy on the device), it is replaced in the
    container itself, and `give_back` restores the original wherever the replacement still is, with the changes that
    the call made in it. Lives only as long as the call, because it refers to tensors.

    Attributes:
        values: the outermost arguments.
    """

    __slots__ = ("_containers", "_originals", "_versions", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self._containers: dict[int, Any] = {}  # by id, at any depth
        for value in values:
            self._add(value)
        self._originals: dict[int, tuple[Any, Any]] = {}  # by id of a replacement: the replacement and its original
        self._versions: dict[int, int] = {}  # versions of tensors in replacements, by id

    def _add(self, value: Any) -> None:
        items = _items(value)
        if items is not None and id(value) not in self._containers:
            if not isinstance(value, tuple):
                self._containers[id(value)] = value
            for _, item in items:
                self._add(item)

    def write(self, container: Any, changes: dict[Any, Any]) -> bool:
        """Replace items of a container in place; False if it is not one of these, or cannot be changed."""
        if id(container) not in self._containers:
            return False
        for key, new in changes.items():
            original = container[key] if isinstance(container, (dict, list)) else getattr(container, key)
            try:
                _put(container, key, new)
            except TypeError:  # an immutable class of lists or dicts: no call writes to it
                return False
            self._originals[id(new)] = (new, original)
            self._versions |= {id(t): t._version for t in tensors_in(new) if not t.is_inference()}
        return True

    def give_back(self) -> None:
        """Restore the originals that `write` replaced, with the in-place changes made to the replacements since."""
        if not self._originals:
            return
        originals, self._originals = self._originals, {}
        back = {key: self._original(new, original) for key, (new, original) in originals.items()}
        for container in self._containers.values():
            for key, item in list(_items(container) or ()):
                if id(item) in back:
                    _put(container, key, back[id(item)])

    def _original(self, new: Any, original: Any) -> Any:
        """The object to restore for `new`, which replaced `original`."""
        if new is original:
            return original
        if isinstance(new, torch.Tensor):
            return _with_changes(new, original) if self._may_have_changed(new, original) else original
        changes = {}
        for (key, replacement), (_, item) in zip(_items(new) or (), _items(original) or (), strict=False):
            restored = self._original(replacement, item)
            if restored is not item:
                changes[key] = restored
        return _rebuilt(original, changes) if changes else original

    def _may_have_changed(self, new: torch.Tensor, original: torch.Tensor) -> bool:
        if new.is_inference():  # torch counts no versions of these; a comparison between devices would wait
            return new.device == original.device
        return new._version != self._versions.get(id(new), new._version)


def _with_changes(new: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`original` with the elements in which its copy `new` (of a different dtype or device) was changed in place.

    A new tensor if `original` needs a gradient, as autograd may have saved it, or if it cannot be changed in place.
    """
    if new.shape != original.shape:
        return new
    same = (original.to(new.device, new.dtype) == new).to(original.device)
    changed = torch.where(same, original, new.to(original.device, original.dtype))
    if not (original.requires_grad and torch.is_grad_enabled()):
        with contextlib.suppress(RuntimeError):
            return original.copy_(changed)
    return changed


def cast_floating(dtype: torch.dtype, value: Any, borrowed: Borrowed | None = None) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; integers and masks stay as they are."""
    if type(value) is torch.Tensor:
        return _cast(dtype, value)
    if type(value) is tuple and len(value) == 1 and type(value[0]) is torch.Tensor:  # most forwards' arguments
        return (_cast(dtype, value[0]),)
    if type(value) is dict and not value:
        return value
    return map_tensors(partial(_cast, dtype), value, borrowed)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
