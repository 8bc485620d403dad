"""Finds the parameters that a unit of given modules takes, and checks that it can: ties, types, devices, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..forms import FlatParameter, HiddenParameter, Place, TensorParallel, is_extension, owner_of, successor_of
from ..layout import Blocks
from ..mesh import MeshAxes
from ..torch_private.local_tensor import local_part
from .messages import (
    inner_tensors,
    is_a_dtensor,
    lazy_parameter,
    on_another_device,
    share_memory,
    sparse_parameter,
    tied_between_units,
    used_outside_its_unit,
)


@dataclass
class Found:
    """A parameter in the modules of a unit to be.

    Attributes:
        name: qualified name, from the module passed to fully_shard.
        parameter: the object.
        places: where it is registered.
        owner: the unit that already shards it, if it is tied to a parameter of that unit.
        planned: whether a unit that is only planned would have it by then, and give it up to this one.
        placement: chosen by `shard_placement_fn`, a `Shard` or `BlockShard`; None: the default.
        split: how it is already split, if it is a DTensor.
    """

    name: str
    parameter: Any
    places: list[Place] = field(default_factory=list)
    owner: Any = None  # a `Unit`
    placement: Any = None
    split: TensorParallel | None = None
    planned: bool = False


UnitOf = Callable[[nn.Module], Any]
"""Returns the unit that has a module as one of its modules, or None."""
OwnerOf = Callable[[Any], Any]
"""Returns the unit that a parameter belongs to, or None."""


def walk(module: nn.Module, unit_of: UnitOf, path: str = "", unit: Any = None) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield `module` and all modules below it, with name and the unit that runs it (None: no unit below the top)."""
    yield path, module, unit
    for name, child in module.named_children():
        yield from walk(child, unit_of, f"{path}.{name}" if path else name, unit_of(child) or unit)


def find_parameters(
    modules: Sequence[nn.Module], unit_of: UnitOf, ignored: set[int], owner_of: OwnerOf = owner_of
) -> list[Found]:
    """Return the parameters that a unit of `modules` takes. Changes nothing.

    These are the parameters in `modules` that belong to no unit, and those that units below share with each other or
    with the rest of `modules`: a tied weight belongs to the innermost unit around all its uses. A parameter shared with
    a unit outside `modules` stays with that unit until a unit around both is created.

    Args:
        modules: the unit's modules.
        unit_of: returns the unit of a module.
        ignored: ids of parameters to leave alone.
        owner_of: returns the unit of a parameter.
    """
    return _sort(modules, unit_of, ignored, owner_of)[0]


def find_shared(modules: Sequence[nn.Module], unit_of: UnitOf, ignored: set[int]) -> list[Found]:
    """Return parameters of units outside `modules` that are also registered in it. Changes nothing."""
    return _sort(modules, unit_of, ignored, owner_of)[1]


def show_shared(shared: Sequence[Found]) -> None:
    """Let the units of these parameters show them in the additional places."""
    for item in shared:
        assert item.owner is not None
        item.owner.add_places(item.parameter, item.places)


def _sort(
    modules: Sequence[nn.Module], unit_of: UnitOf, ignored: set[int], owner_of: OwnerOf
) -> tuple[list[Found], list[Found]]:
    """Return the parameters that a unit of `modules` takes, and those it leaves to units outside."""
    by_parameter: dict[int, Found] = {}
    users: dict[int, set[int]] = {}  # by parameter: ids of the units that run it; 0 for the unit to be
    inside: set[int] = set()  # ids of the units below
    seen: set[int] = set()
    for module in modules:
        for path, owner, unit in walk(module, unit_of):
            again = id(owner) in seen  # a module with several parents: each unit that runs it counts
            seen.add(id(owner))
            inside.add(id(unit))
            hidden = [(key, value) for key, value in owner.__dict__.items() if type(value) is HiddenParameter]
            for key, registered in [*owner._parameters.items(), *hidden]:
                if registered is None or id(registered) in ignored:
                    continue
                parameter = successor_of(registered)
                name = f"{path}.{key}" if path else key
                item = by_parameter.setdefault(id(parameter), Found(name, parameter, owner=owner_of(parameter)))
                users.setdefault(id(parameter), set()).add(id(unit) if unit is not None else 0)
                if unit is None and not again and type(registered) is not HiddenParameter:
                    item.places.append(Place(owner, key))
    taken, left = [], []
    for identity, item in by_parameter.items():
        if item.owner is None:
            taken.append(item)
        elif isinstance(item.parameter, FlatParameter):
            continue  # the unit's parameters in it are found themselves, hidden
        elif id(item.owner) not in inside:
            left.append(item)
        elif users[identity] != {id(item.owner)}:
            taken.append(item)
    return taken, left


class Rehearsal:
    """Simulates building several units: the parameters that each would take after those before it. Changes nothing.

    Args:
        unit_of: returns the existing unit of a module.
    """

    def __init__(self, unit_of: UnitOf) -> None:
        self._unit_of = unit_of
        self._modules: dict[int, object] = {}  # by id: a stand-in for the unit to be
        self._parameters: dict[int, object] = {}

    def add(self, modules: Sequence[nn.Module], ignored: set[int]) -> list[Found]:
        """Return the parameters that a unit of `modules` would take; later calls assume that it exists."""
        parameters = find_parameters(modules, self._find_unit, ignored, self._find_owner)
        unit = object()
        self._modules |= dict.fromkeys(map(id, modules), unit)
        for item in parameters:
            item.planned = id(item.parameter) in self._parameters
            item.owner = None if item.planned else item.owner
            self._parameters[id(item.parameter)] = unit
        return parameters

    def _find_unit(self, module: nn.Module) -> Any:
        return self._modules.get(id(module)) or self._unit_of(module)

    def _find_owner(self, parameter: Any) -> Any:
        return self._parameters.get(id(parameter)) or owner_of(parameter)


def check_ties(
    module: nn.Module, unit_of: UnitOf, within: Callable[[Any, nn.Module], bool], ignored: frozenset[int] = frozenset()
) -> None:
    """Refuse parameters that are used outside the unit that gathers them.

    Args:
        module: the root.
        unit_of: returns the unit of a module.
        within: returns whether a module lies in a unit's modules.
        ignored: ids of parameters to leave alone.

    Raises:
        LayoutError: there is such a parameter; names it and where it is used.
    """
    for path, user, _ in walk(module, unit_of):
        for key, registered in user._parameters.items():
            if registered is None or id(registered) in ignored:
                continue
            parameter = successor_of(registered)
            unit = owner_of(parameter)
            if unit is not None and (parameter is not registered or not within(unit, user)):
                raise used_outside_its_unit(unit.name, f"{path}.{key}" if path else key)


# Checks that a parameter can be sharded.


def check_type(name: str, parameter: torch.Tensor, extensions: bool = True) -> None:
    """Refuse parameters that cannot be cut: quantised weights, whose inner tensors would be lost, lazy and sparse ones.

    Raises:
        ConfigError: the parameter is of such a kind.
    """
    if nn.parameter.is_lazy(parameter):
        raise lazy_parameter(name)
    inner = local_part(parameter)
    special = hasattr(inner, "fsdp_pre_all_gather") or hasattr(inner, "__tensor_flatten__")
    if special and not (extensions and not isinstance(parameter, DTensor) and is_extension(parameter)):
        raise inner_tensors(name, type(inner).__name__)
    if inner.layout is not torch.strided:
        raise sparse_parameter(name, inner.layout)


def _cannot_move(item: Found) -> bool:
    """Whether a parameter that a different unit has cannot move to the unit above it."""
    if item.owner is None:  # the other unit is only planned
        return isinstance(item.parameter, DTensor) or is_extension(item.parameter)
    members = [(b, m) for b in item.owner.buckets for m in b.members if m.sharded is item.parameter]
    return any(m.split is not None or not b.form.plain for b, m in members)


def check_device(name: str, device: torch.device, home: torch.device) -> None:
    """Refuse a parameter that is not on the mesh's device, on the CPU (from which it is moved), or on meta.

    Raises:
        ConfigError: it is on a different device.
    """
    if device.type in ("cpu", "meta") or device == home or (device.type == home.type and device.index is None):
        return
    raise on_another_device(name, home, device)


def check_parameters(parameters: Sequence[Found], axes: MeshAxes, layout: str | Blocks, wrapper: bool = False) -> None:
    """Refuse parameters that cannot be sharded, before anything changes.

    Args:
        parameters: the parameters.
        axes: the mesh.
        layout: the layout they will have.
        wrapper: for the wrapper, whose parameters may be DTensors, but not extensions.

    Raises:
        ConfigError: a parameter on a different device, or a DTensor in a layout other than rows; see `check_type`.
        LayoutError: two different parameters share memory, or a tensor-parallel parameter or extension is tied between
            units.
    """
    by_address: dict[int, str] = {}
    for item in parameters:
        parameter = item.parameter
        if item.planned or item.owner is not None:
            if _cannot_move(item):
                raise tied_between_units(item.name)
            continue
        check_type(item.name, parameter, extensions=not wrapper)
        if isinstance(parameter, DTensor) and layout != "rows" and not wrapper:
            raise is_a_dtensor(item.name, layout)
        check_device(item.name, parameter.device, axes.device)
        if local_part(parameter).numel() and not parameter.is_meta and not is_extension(parameter):
            other = by_address.setdefault(local_part(parameter).data_ptr(), item.name)
            if other != item.name:
                raise share_memory(other, item.name)
