"""Where a parameter is registered: a name on a module. All parameters are put on modules through this."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn


class Place:
    """A name on a module. The reference to the module is weak, so that a deleted model is freed at once.

    Attributes:
        name: of the parameter on its module.
        target: mapping to show a parameter with `target[name] = tensor`, and to read it with `target.get(name)`. It is
            the module's `_parameters`; a proxy if the module's class watches its attributes (`nn.LSTM` has a list of
            its weights); or the module's `__dict__`, for tensors that `named_parameters` must not see.
        outside: whether `target` is not the module's `_parameters`.
    """

    __slots__ = ("_module", "name", "outside", "target")

    def __init__(self, module: nn.Module, name: str, outside: bool = False) -> None:
        self._module = weakref.ref(module)
        self.name, self.outside = name, outside
        self.target: Any = _outside(module) if outside else _inside(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, if it is alive."""
        return self._module()

    def shown(self) -> Any:
        """The object that is registered now."""
        return self.target.get(self.name)

    @property
    def reader(self) -> Callable[[], Any]:
        """`shown` as a bound function, for callers in every step."""
        return partial(self.target.get, self.name)

    def show(self, tensor: Any) -> None:
        """Register `tensor` under the name."""
        self.target[self.name] = tensor

    @property
    def registry(self) -> dict[str, Any]:
        """The module's `_parameters`, wherever `target` is; empty if the module is gone."""
        module = self._module()
        return module._parameters if module is not None else {}

    def registered(self) -> Any:
        """The entry of the module's `_parameters` under the name, wherever `target` is."""
        return self.registry.get(self.name)

    def register(self, tensor: Any) -> None:
        """Put `tensor` into the module's `_parameters`, and remove anything shown outside of them."""
        if self.outside:
            self.withdraw()
        module = self._module()
        if module is not None:
            _inside(module)[self.name] = tensor

    def withdraw(self) -> None:
        """Remove everything shown under the name, inside and outside of `_parameters`."""
        module = self._module()
        if module is not None:
            module._parameters.pop(self.name, None)
            module.__dict__.pop(self.name, None)

    def moved_outside(self) -> Place | None:
        """Remove the name from `_parameters`; returns its place outside of them, None if the module is gone."""
        module = self._module()
        if module is None:
            return None
        module._parameters.pop(self.name, None)
        return Place(module, self.name, outside=True)

    def same_as(self, other: Place) -> bool:
        """Whether both are the same name on the same module."""
        return self.name == other.name and self._module() is other._module()


class _Attributes:
    """Stands in for `_parameters` of a module whose class watches its attributes: sets parameters as attributes.

    The reference to the module is weak.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __setitem__(self, name: str, value: Any) -> None:
        if (module := self._module()) is not None:
            self._put(module, name, value)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        setattr(module, name, value)

    def update(self, shown: dict[str, Any]) -> None:
        for name, value in shown.items():
            self[name] = value

    def get(self, name: str) -> Any:
        module = self._module()
        return module._parameters.get(name) if module is not None else None


class _InsideList(_Attributes):
    """Replaces the `_parameters` of a module that also has a list of its weights (`nn.LSTM`).

    Writes them directly: showing a parameter is not a registration, which torch's hooks would see.
    """

    __slots__ = ()

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        module._parameters[name] = value
        names: Any = module.__dict__["_flat_weights_names"]
        if name in names:
            weights: Any = module.__dict__["_flat_weights"]
            weights[names.index(name)] = value


class _OutsideList(_Attributes):
    """Replaces the `__dict__` of a module that also has a list of its weights (`nn.LSTM`)."""

    __slots__ = ()

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        module.__dict__[name] = value
        names: Any = module.__dict__["_flat_weights_names"]
        module.__dict__["_flat_weights"] = [getattr(module, weight, None) for weight in names]

    def get(self, name: str) -> Any:
        module = self._module()
        return module.__dict__.get(name) if module is not None else None


def _inside(module: nn.Module) -> Any:
    if "_flat_weights_names" in module.__dict__:
        return _InsideList(module)
    watches = type(module).__setattr__ is not nn.Module.__setattr__
    return _Attributes(module) if watches else module._parameters


def _outside(module: nn.Module) -> Any:
    return _OutsideList(module) if "_flat_weights_names" in module.__dict__ else module.__dict__


class Ignored:
    """Modules and places of parameters that a unit ignores. References to modules are weak.

    Places, because a parameter that is later materialized, replaced or deep-copied is a different object, but still
    ignored.

    Args:
        modules: ignored with everything in them.
        places: of single parameters.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), places: Iterable[Place] = ()) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._places = list(places)

    @classmethod
    def under(
        cls, tops: Iterable[nn.Module], parameters: Collection[int], modules: Iterable[nn.Module] = ()
    ) -> Ignored:
        """`modules`, and the places in `tops` of parameters with these ids."""
        owners = {id(module): module for top in tops for module in top.modules()} if parameters else {}
        names = [(owner, name, p) for owner in owners.values() for name, p in owner._parameters.items()]
        places = [Place(owner, name) for owner, name, p in names if id(p) in parameters]
        return cls(modules, places)

    @property
    def modules(self) -> list[nn.Module]:
        """The ignored modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def ids(self) -> set[int]:
        """The ids of the parameters that are ignored now."""
        ids = {id(parameter) for place in self._places if (parameter := place.registered()) is not None}
        return ids | {id(parameter) for module in self.modules for parameter in module.parameters()}

    def copied(self, memo: Mapping[int, Any]) -> Ignored:
        """The same for a deep copy; `memo` is deepcopy's, from a module's id to its copy."""
        places = [
            Place(memo[id(module)], place.name)
            for place in self._places
            if (module := place.module) is not None and id(module) in memo
        ]
        return Ignored([memo[id(module)] for module in self.modules if id(module) in memo], places)
