"""The table of a model's parameters and buffers by name, whichever front-end shards it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, check_module
from ..forms import HiddenParameter, Member, owner_of, successor_of
from ..mesh import MeshAxes, resolve_mesh
from ..readers import wait_for_readers
from ..runtime import Runner, runner_of, take_over_replaced
from ..shard import Bucket, Unit, refuse_undoable
from ..text import clean_name, plain_name


def has_full_tensor(member: Member) -> bool:
    """Whether the sharded parameter knows its whole shape and can be made whole: `fully_shard`'s, not the wrapper's."""
    return hasattr(member.sharded, "full_tensor")


@dataclass(eq=False)
class Named:
    """A parameter or buffer of a model: a row of its table.

    Attributes:
        parameter: as optimizers see it, unless they update a view or a `FlatParameter` over several.
        names: its names in the unwrapped model, more than one if it is tied; `named_parameters` has the first.
        bucket, member: where its unit keeps it; both None if it is in no unit.
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
        """The shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.member is None else self.member.shape

    @property
    def has_full_tensor(self) -> bool:
        """Whether it is in a unit of `fully_shard`: its value in a state dict is the parameter itself."""
        return self.member is not None and has_full_tensor(self.member)


def rows_in(bucket: Bucket) -> list[Named]:
    """The rows of a bucket's parameters alone, under their names in the unit."""
    return [Named(member.sharded, [member.name], bucket, member) for member in bucket.members]


class Table:
    """All parameters of a model, in its own order, which is the same on every rank, and its persistent buffers.

    Args:
        model: sharded by either front-end, in whole or in part; or a part of such a model.
        clean: maps a name in `model` to the name in the table; None: `clean_name` for the wrapper's models, whose state
            dicts have such names, and `plain_name`, as PyTorch's functions, for all others.

    Attributes:
        parameters: the rows, in the order of the unwrapped model.
        buffers: persistent buffers by clean name.
        by_tensor: rows by the id of each tensor that stands for the parameter.
        raw: names in `model`, wrapping included, by the id of the registered tensor.
        units: each with its runner; the runner is None if `model` is only a part of the unit.
    """

    def __init__(self, model: nn.Module, clean: Callable[[str], str] | None = clean_name) -> None:
        wait_for_readers()  # whoever reads the table may write next
        self.buffers: dict[str, torch.Tensor] = {}
        self.raw: dict[int, str] = {}
        self.by_tensor: dict[int, Named] = {}
        self.units = _units_in(model)
        refuse_undoable([unit for unit, _ in self.units])
        if clean is None:
            wrapped = any(not has_full_tensor(member) for unit, _ in self.units for member in unit.members)
            clean = clean_name if wrapped else plain_name
        self._rows: dict[int, Named] = {}  # by the id of the member, or of a parameter that is in no unit
        placed: dict[int, dict[str, tuple[Bucket, Member]]] = {}  # by the id of a module's registry
        flats: set[int] = set()
        for bucket in self.buckets():
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
                    own_bucket, own_member = here.get(key, (None, None))
                    parameter = tensor if own_member is None else own_member.sharded
                    row = Named(parameter, [], own_bucket, own_member)
                    row = self._rows.setdefault(id(own_member or parameter), row)
                    row.names.append(clean(prefix + key))
                    self.by_tensor[id(tensor)] = self.by_tensor[id(row.parameter)] = row
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    self.buffers[clean(prefix + key)] = buffer
        self.parameters = list(self._rows.values())

    @property
    def buffer_rows(self) -> list[Named]:
        """The buffers, as rows of tensors in no unit."""
        return [Named(buffer, [name]) for name, buffer in self.buffers.items()]

    def of(self, member: Member) -> Named | None:
        """The row of a unit's parameter; None if the parameter is not in the model."""
        return self._rows.get(id(member))

    @property
    def axes(self) -> MeshAxes:
        """The axes of the bucket that is on the most ranks; without buckets, those of all ranks."""
        of_buckets = [bucket.axes for bucket in self.buckets()]
        return max(of_buckets, key=lambda axes: len(axes.ranks)) if of_buckets else resolve_mesh(None)

    @property
    def spanning_axes(self) -> MeshAxes:
        """`axes`, over which rank 0 reaches all ranks of the model.

        Raises:
            CheckpointError: no mesh of the model has all these ranks.
        """
        axes = self.axes
        apart = next((row for row in self.parameters if row.bucket and not row.bucket.axes.ranks <= axes.ranks), None)
        if apart is not None and apart.bucket is not None:
            raise CheckpointError(
                "Rank 0 cannot send values to all ranks of the model: no mesh of its units has all of them.",
                parameter=apart.name,
                expected=f"a mesh within ranks {sorted(axes.ranks)}",
                got=f"ranks {sorted(apart.bucket.axes.ranks)}",
                remedy="omit broadcast_from_rank0, and pass the values on every rank",
            )
        return axes

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets of all units."""
        for unit, _ in self.units:
            yield from unit.buckets

    @property
    def wrapped(self) -> Named | None:
        """The first parameter in a unit of `FullyShardedDataParallel`; None if there is none."""
        return next((row for row in self.parameters if row.member is not None and not row.has_full_tensor), None)

    @property
    def sharded(self) -> bool:
        """Whether any parameter is in a unit."""
        return any(row.member is not None for row in self.parameters)


def settle(model: nn.Module) -> None:
    """Free the wrapper's units in `model`, and take over storage with which users replaced shards of any unit.

    To be called before a table is built.
    """
    check_module("This function", model)
    take_over_replaced(model)
    for unit, runner in _units_in(model):
        if runner is not None and not all(has_full_tensor(member) for member in unit.members):
            runner.reshard()
            unit.refresh()


def _units_in(model: nn.Module) -> list[tuple[Unit, Runner | None]]:
    """The units whose modules are in `model`, and units of modules around it that have parameters in it."""
    units: dict[int, tuple[Unit, Runner | None]] = {}
    parameters: list[torch.Tensor] = list(model.parameters())
    for module in model.modules():
        runner = runner_of(module)
        if runner is not None:
            units.setdefault(id(runner.unit), (runner.unit, runner))
        hidden = (value for value in module.__dict__.values() if type(value) is HiddenParameter)
        parameters += map(successor_of, hidden)  # the parts of a `FlatParameter`
    for parameter in parameters:
        unit = owner_of(parameter)
        if unit is not None:
            units.setdefault(id(unit), (unit, None))
    return list(units.values())
