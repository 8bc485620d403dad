"""What a unit was told to leave alone.

Remembered by place, a name on a module: a parameter that is materialised, replaced or deep-copied later is another
object, and is left alone all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .place import Place


class Ignored:
    """Modules and places of parameters that a unit leaves alone. Modules are held weakly.

    Args:
        modules: left alone as they are, with all that they hold.
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
        found = [(one, name) for one in owners.values() for name, p in one._parameters.items() if id(p) in parameters]
        places = [Place(owner, name) for owner, name in found]
        return cls(modules, places)

    @property
    def modules(self) -> list[nn.Module]:
        """Those of the modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def ids(self) -> set[int]:
        """Of the parameters that are there now."""
        found = {id(parameter) for place in self._places if (parameter := place.registered()) is not None}
        return found | {id(parameter) for module in self.modules for parameter in module.parameters()}

    def copied(self, memo: Mapping[int, Any]) -> Ignored:
        """The same of a deep copy; `memo`: deepcopy's, by id of a module its copy."""
        places = [
            Place(memo[id(module)], place.name)
            for place in self._places
            if (module := place.module) is not None and id(module) in memo
        ]
        return Ignored([memo[id(module)] for module in self.modules if id(module) in memo], places)
