"""What a program's modules hold of PyTorch's, besides their own names: in containers, functions, classes and objects.

    WRAPPERS = {"fsdp": FullyShardedDataParallel}            a dict, list, set or tuple, keys and members
    def train(wrapper=FullyShardedDataParallel): ...         a default argument
    def maker(): cls = FullyShardedDataParallel; ...         a closure
    class Config: strategy = FullyShardedDataParallel        a class attribute, or an object's
    make = functools.partial(FullyShardedDataParallel, ...)  a partial application

Containers that can be written to stay the objects that they are; others are made anew, where they are held. A module's
names themselves are `adopt.py`'s.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
import warnings
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ..errors import PhaseError

DEEPEST = 12
"""Containers in containers, and functions in functions, that are looked through."""

LIBRARIES = frozenset({"torch", "torchgen", "functorch", "fullshard", "numpy", "sympy", "mpmath", "networkx"})
"""Packages, besides Python's own, whose modules are not looked through: PyTorch's take its classes by name alone."""

_ATOMS = (str, bytes, int, float, complex, bool, type(None), ModuleType, types.BuiltinFunctionType)


_UNION: Any = type(typing.Union[int, str])  # noqa: UP007
"""Of unions that were written so; `int | str` is a `types.UnionType`."""


def is_programs(module: Any) -> bool:
    """Whether a module of this name belongs to the program, or to a library that it uses."""
    top = module.partition(".")[0] if isinstance(module, str) else ""
    return bool(top) and top not in LIBRARIES and (top == "__main__" or top not in sys.stdlib_module_names)


def search(ours: Mapping[int, Any]) -> list[str]:
    """Look through the program's modules, and put ours where they hold something of PyTorch's.

    Args:
        ours: what to put in the place of an object, by its id.

    Returns:
        Paths of what was replaced: "module.NAME['key']".
    """
    found = Held(ours)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and is_programs(name):
            found.module(name, module)
    return found.found


class Held:
    """One search through what modules hold.

    Args:
        ours: what to put in the place of an object, by its id.

    Attributes:
        found: paths of what was replaced, "module.NAME['key']".
    """

    def __init__(self, ours: Mapping[int, Any]) -> None:
        self.ours = ours
        self.found: list[str] = []
        self._seen: dict[int, Any] = {}  # by id; held, so that no other object gets it

    def module(self, module_name: str, module: ModuleType) -> None:
        """Look through what the names of a module stand for."""
        self._items(vars(module), lambda name: f"{module_name}.{name}", 0)

    def _replaced(self, value: Any, path: str, depth: int) -> Any:
        """What is to be held in the place of `value`: itself, once it was looked through, if it can be written to."""
        if id(value) in self.ours:
            self.found.append(path)
            return self.ours[id(value)]
        kind = type(value)  # `isinstance` would ask objects that stand for others, and are made when they are asked
        if issubclass(kind, _ATOMS) or depth > DEEPEST:
            return value
        if issubclass(kind, (tuple, frozenset, types.UnionType, _UNION)):
            return self._made_anew(value, path, depth)
        if id(value) in self._seen:
            return value
        self._seen[id(value)] = value
        look = _LOOKS.get(kind) or next((way for base, way in _LOOKS.items() if issubclass(kind, base)), None)
        if look is not None:
            look(self, value, path, depth)
        elif is_programs(getattr(kind, "__module__", None)):
            self._object(value, path, depth)
        return value

    def _made_anew(self, value: Any, path: str, depth: int) -> Any:
        """A tuple, frozenset or union of other members, if there is something to replace."""
        union = isinstance(value, (types.UnionType, _UNION))
        members = typing.get_args(value) if union else tuple(value)
        names = (path if union else f"{path}[{at}]" for at in range(len(members)))
        made = [self._replaced(one, name, depth + 1) for one, name in zip(members, names, strict=True)]
        if all(new is old for new, old in zip(made, members, strict=True)):
            return value
        if union:
            return typing.Union[tuple(made)]  # noqa: UP007
        return value._make(made) if hasattr(value, "_make") else type(value)(made)

    # Each kind of thing that can be written to.

    def _dict(self, held: dict[Any, Any], path: str, depth: int) -> None:
        self._items(held, lambda key: f"{path}[{key!r}]" if isinstance(key, str) else f"{path}[...]", depth)
        if any(id(key) in self.ours or type(key) is tuple for key in dict.keys(held)):
            items = [(self._replaced(key, f"a key of {path}", depth + 1), value) for key, value in dict.items(held)]
            if any(new is not old for (new, _), old in zip(items, dict.keys(held), strict=True)):
                held.clear()
                held.update(items)

    def _items(self, held: dict[Any, Any], name: Any, depth: int) -> None:
        for key, value in list(dict.items(held)):  # past what subclasses make of it: transformers' load modules
            if not issubclass(type(value), _ATOMS):
                new = self._replaced(value, name(key), depth + 1)
                if new is not value:
                    dict.__setitem__(held, key, new)

    def _list(self, held: list[Any], path: str, depth: int) -> None:
        for at, value in enumerate(list.copy(held)):
            if (new := self._replaced(value, f"{path}[{at}]", depth + 1)) is not value:
                list.__setitem__(held, at, new)

    def _deque(self, held: deque[Any], path: str, depth: int) -> None:
        for at, value in enumerate(deque.copy(held)):
            if (new := self._replaced(value, f"{path}[{at}]", depth + 1)) is not value:
                deque.__setitem__(held, at, new)

    def _set(self, held: set[Any], path: str, depth: int) -> None:
        for value in set.copy(held):
            if (new := self._replaced(value, f"a member of {path}", depth + 1)) is not value:
                set.remove(held, value)
                set.add(held, new)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        if not is_programs(function.__module__):
            return
        path = f"{path}()"
        function.__defaults__ = self._replaced(function.__defaults__, f"defaults of {path}", depth + 1)
        if function.__kwdefaults__:
            self._dict(function.__kwdefaults__, f"defaults of {path}", depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, f"{name} in {path}", depth)
        if vars(function):
            self._dict(vars(function), path, depth)

    def _cell(self, cell: types.CellType, path: str, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty as yet
            return
        if (new := self._replaced(value, path, depth + 1)) is not value:
            cell.cell_contents = new

    def _method(self, method: Any, path: str, depth: int) -> None:
        self._replaced(method.__func__, path, depth + 1)

    def _property(self, held: property, path: str, depth: int) -> None:
        for function in (held.fget, held.fset, held.fdel):
            self._replaced(function, path, depth + 1)

    def _partial(self, held: functools.partial[Any], path: str, depth: int) -> None:
        parts = tuple(self._replaced(one, path, depth + 1) for one in (held.func, held.args, held.keywords))
        if any(new is not old for new, old in zip(parts, (held.func, held.args, held.keywords), strict=True)):
            held.__setstate__((*parts, vars(held)))  # type: ignore[attr-defined]

    def _class(self, cls: type, path: str, depth: int) -> None:
        if not is_programs(cls.__module__):
            return
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") or name in ("__init__", "__call__", "__new__", "__annotations__"):
                if (new := self._replaced(value, f"{path}.{name}", depth + 1)) is not value:
                    setattr(cls, name, new)

    def _object(self, held: Any, path: str, depth: int) -> None:
        """What an object of a program's class has as attributes."""
        attributes = getattr(held, "__dict__", None)
        if type(attributes) is dict:
            self._items(attributes, lambda name: f"{path}.{name}", depth)


_LOOKS: Mapping[type, Any] = {
    dict: Held._dict,
    list: Held._list,
    deque: Held._deque,
    set: Held._set,
    types.FunctionType: Held._function,
    types.MethodType: Held._method,
    staticmethod: Held._method,
    classmethod: Held._method,
    property: Held._property,
    functools.partial: Held._partial,
    type: Held._class,
}


def rebase(originals: Iterable[tuple[Any, Any]]) -> Iterator[tuple[type, type]]:
    """Give classes that a program derived from PyTorch's the base that is ours.

    Args:
        originals: PyTorch's objects, with ours.

    Yields:
        Each class that cannot have it, with PyTorch's, which stays its base.
    """
    for original, ours in originals:
        derived: list[type] = original.__subclasses__() if isinstance(original, type) else []
        for cls in derived:
            if not is_programs(cls.__module__):
                continue
            try:
                cls.__bases__ = tuple(ours if base is original else base for base in cls.__bases__)
            except TypeError:  # their instances are laid out in other ways
                yield cls, original


def in_use(ours: Container[int]) -> Iterator[str]:
    """Local variables of functions that run now and hold what was replaced: nothing can be put in their place."""
    for frame in sys._current_frames().values():
        one: types.FrameType | None = frame
        while one is not None:
            name = one.f_globals.get("__name__")
            if is_programs(name) and one.f_code.co_name != "<module>":
                for variable, value in one.f_locals.items():
                    if id(value) in ours:
                        yield f"{variable!r} in {one.f_code.co_qualname}(), {one.f_code.co_filename}:{one.f_lineno}"
            one = one.f_back


def refuse(holders: Iterable[str], lenient: bool) -> None:
    """Raise, or warn, of what goes on holding PyTorch's objects.

    Raises:
        PhaseError: there is some, and the program is not adopted leniently.
    """
    found = ", ".join(holders)
    if not found:
        return
    error = PhaseError(
        "Something of this program holds PyTorch's FSDP already, and nothing can be put in its place.",
        got=found,
        remedy="call fullshard.adopt() before it is made, first of all; or start the program by: python -m fullshard "
        "adopt SCRIPT; or adopt leniently (--lenient): it stays PyTorch's",
    )
    if not lenient:
        raise error
    warnings.warn(str(error), stacklevel=4)
