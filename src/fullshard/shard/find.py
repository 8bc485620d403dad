"""From modules to the parameters that a unit of them takes, and the rules about ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from ..errors import LayoutError
from ..mesh import MeshAxes
from .forms.stand_in import HiddenParameter
from .member import successor_of
from .place import Place
from .split import TensorParallel
from .unit import Unit, owner_of


@dataclass
class Found:
    """A parameter in the modules of a unit to be.

    Attributes:
        name: qualified, from the module that fully_shard was given.
        parameter: the object.
        places: where it is registered.
        owner: the unit that already shards it, if it is tied to a parameter of that unit.
        placement, axes: what `shard_placement_fn` chose for it, once it was asked.
    """

    name: str
    parameter: Any
    places: list[Place] = field(default_factory=list)
    owner: Unit | None = None
    placement: Shard | None = None  # what `shard_placement_fn` chose
    axes: MeshAxes | None = None
    module: nn.Module | None = None  # the first that has it
    split: TensorParallel | None = None  # how it is split already


UnitOf = Callable[[nn.Module], Unit | None]
"""The unit that a module is (one of) the modules of, or None."""


def walk(
    module: nn.Module, unit_of: UnitOf, path: str = "", unit: Unit | None = None
) -> Iterator[tuple[str, nn.Module, Unit | None]]:
    """`module` and all below it, each with its name and the unit that runs it (None: no unit below the top does)."""
    yield path, module, unit
    for name, child in module.named_children():
        yield from walk(child, unit_of, f"{path}.{name}" if path else name, unit_of(child) or unit)


def find_parameters(modules: Sequence[nn.Module], unit_of: UnitOf, ignored: set[int]) -> list[Found]:
    """The parameters that a unit of `modules` takes.

    These are the parameters in them that no unit has, and those that units below share with each other or with the
    rest of `modules`: a tied weight belongs to the innermost unit around all of its uses. A parameter shared with a
    unit outside `modules` is left to that unit, until a unit around both is made.

    Args:
        modules: the unit's modules.
        unit_of: the unit of a module.
        ignored: ids of parameters to leave alone.
    """
    found: dict[int, Found] = {}
    users: dict[int, set[int]] = {}  # by parameter: ids of the units that run it; 0 for the one to be made
    inside: set[int] = set()  # ids of the units below
    seen: set[int] = set()
    for module in modules:
        for path, owner, unit in walk(module, unit_of):
            again = id(owner) in seen  # a module that several others hold: each unit that runs it counts
            seen.add(id(owner))
            inside.add(id(unit))
            hidden = [(key, value) for key, value in owner.__dict__.items() if type(value) is HiddenParameter]
            for key, registered in [*owner._parameters.items(), *hidden]:
                if registered is None or id(registered) in ignored:
                    continue
                parameter = successor_of(registered)
                name = f"{path}.{key}" if path else key
                item = found.setdefault(id(parameter), Found(name, parameter, owner=owner_of(parameter), module=owner))
                users.setdefault(id(parameter), set()).add(id(unit) if unit is not None else 0)
                if unit is None and not again and type(registered) is not HiddenParameter:
                    item.places.append(Place(owner, key))
    taken = []
    for identity, item in found.items():
        if item.owner is None:
            taken.append(item)
        elif id(item.owner) not in inside:
            item.owner.add_places(item.parameter, item.places)
        elif users[identity] != {id(item.owner)}:
            taken.append(item)
    return taken


def check_ties(
    module: nn.Module,
    unit_of: UnitOf,
    within: Callable[[Unit, nn.Module], bool],
    ignored: frozenset[int] = frozenset(),
) -> None:
    """Refuse a parameter that is used outside the unit that gathers it.

    Args:
        module: the root.
        unit_of: the unit of a module.
        within: whether a module lies in a unit's modules.
        ignored: ids of parameters to leave alone.

    Raises:
        LayoutError: names the parameter and where it is used.
    """
    for path, user, _ in walk(module, unit_of):
        for key, registered in user._parameters.items():
            if registered is None or id(registered) in ignored:
                continue
            parameter = successor_of(registered)
            unit = owner_of(parameter)
            if unit is not None and (parameter is not registered or not within(unit, user)):
                raise LayoutError(
                    f"A weight of unit {unit.name!r} is also used outside of it, where it is not gathered.",
                    parameter=f"{path}.{key}" if path else key,
                    expected="one unit around all uses of a tied weight",
                    remedy="apply fully_shard to the innermost module that contains all of them, after its parts",
                )
