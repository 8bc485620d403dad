"""The table of what exists under which name in a model, by whichever front-end it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..forms import HiddenParameter, Member, owner_of, successor_of
from ..mesh import MeshAxes, resolve_mesh
from ..names import clean_name
from ..runtime import Runner, runner_of, take_over_replaced
from ..shard import Bucket, Unit
from . import values


@dataclass(eq=False)
class Named:
    """One parameter of a model.

    Attributes:
        parameter: as optimizers see it, unless they see a view or a `FlatParameter` of several.
        names: as the unwrapped model has them; the first is what its `named_parameters` says, several are ties.
        bucket, member: what holds it; None if no unit does.
    """

    parameter: torch.Tensor
    names: list[str] = field(default_factory=list)
    bucket: Bucket | None = None
    member: Member | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self.bucket is None or self.member is None:
            return tuple(self.parameter.shape)
        return self.member.shape

    @property
    def says_whole(self) -> bool:
        """Whether a unit of `fully_shard` holds it: its value in a state dict is the parameter itself."""
        return self.member is not None and values.says_whole(self.member)


class Table:
    """All parameters of `model`, in its own order, which is the same on every rank; and its persistent buffers.

    Args:
        model: sharded by either front-end, in whole or in part; or a part of such a model.
        clean: from a name in `model` to the one wanted.

    Attributes:
        parameters: in the order of the unwrapped model.
        buffers: by clean name.
        by_tensor: rows by the id of a tensor that shows the parameter.
        raw: by id of a tensor registered in `model`: its name there, wrapping included.
        units: with their runner; None for a unit of which `model` is a part.
    """

    def __init__(self, model: nn.Module, clean: Callable[[str], str] = clean_name) -> None:
        self.parameters: list[Named] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.raw: dict[int, str] = {}
        self.by_tensor: dict[int, Named] = {}
        self.units = _units_in(model)
        self._rows: dict[int, Named] = {}  # by the id of the member, or of the parameter that no unit holds
        placed: dict[int, dict[str, tuple[Bucket, Member]]] = {}  # by the id of a module's registry
        flats: set[int] = set()
        for unit, _ in self.units:
            for bucket in unit.buckets:
                flats.add(id(bucket.flat_parameter))
                for member in bucket.members:
                    for place in member.places:
                        placed.setdefault(id(place.registry), {})[place.name] = (bucket, member)
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            registry, here = module._parameters, placed.get(id(module._parameters), {})
            for key in [*registry, *(key for key in here if key not in registry)]:
                tensor: Any = registry.get(key)
                if tensor is not None:
                    self.raw.setdefault(id(tensor), prefix + key)
                if key in here or (tensor is not None and id(tensor) not in flats):
                    row = self._row(tensor, *here.get(key, (None, None)))
                    row.names.append(clean(prefix + key))
                    self.by_tensor[id(tensor)] = self.by_tensor[id(row.parameter)] = row
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    self.buffers[clean(prefix + key)] = buffer

    def _row(self, tensor: Any, bucket: Bucket | None, member: Member | None) -> Named:
        """The row of a parameter, made at its first place."""
        identity = id(tensor) if member is None else id(member)
        row = self._rows.get(identity)
        if row is None:
            row = self._rows[identity] = Named(tensor if member is None else member.sharded, [], bucket, member)
            self.parameters.append(row)
        return row

    def of(self, member: Member) -> Named | None:
        """The row of a unit's parameter; None if it is not in the model."""
        return self._rows.get(id(member))

    @property
    def axes(self) -> MeshAxes:
        """Those of the first unit that holds anything; of all ranks if there is none."""
        for bucket in self.buckets():
            return bucket.axes
        return resolve_mesh(None)

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket."""
        for unit, _ in self.units:
            yield from unit.buckets

    @property
    def wrapped(self) -> bool:
        """Whether `FullyShardedDataParallel` holds any of it."""
        return any(row.member is not None and not row.says_whole for row in self.parameters)

    @property
    def sharded(self) -> bool:
        """Whether any unit holds any of it."""
        return any(row.member is not None for row in self.parameters)


def settle(model: nn.Module) -> None:
    """Free the wrapper's units in `model`, and take over what users put in the place of any unit's shards.

    Before a table is made.
    """
    take_over_replaced(model)
    for unit, runner in _units_in(model):
        if runner is not None and not all(values.says_whole(member) for member in unit.members):
            runner.reshard()
            unit.refresh()


def _units_in(model: nn.Module) -> list[tuple[Unit, Runner | None]]:
    """The units whose modules are in `model`, and those that hold a parameter of it."""
    found: dict[int, tuple[Unit, Runner | None]] = {}
    held: list[torch.Tensor] = list(model.parameters())
    for module in model.modules():
        runner = runner_of(module)
        if runner is not None:
            found.setdefault(id(runner.unit), (runner.unit, runner))
        held += [successor_of(one) for one in module.__dict__.values() if type(one) is HiddenParameter]  # of a flat one
    for parameter in held:
        unit = owner_of(parameter)
        if unit is not None:
            found.setdefault(id(unit), (unit, None))
    return list(found.values())
