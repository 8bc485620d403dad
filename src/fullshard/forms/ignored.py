"""The parameters that a unit ignores.

Stored by place, a name on a module: a parameter that is later materialized, replaced or deep-copied is a different
object, but still ignored.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .place import Place


class Ignored:
    """Modules and places of parameters that a unit ignores. References to modules are weak.

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
