"""From a model or a parameter to the unit that owns it."""

from __future__ import annotations

from torch import nn

from .bucket import Bucket
from .gradients import Gradients
from .member import Member
from .unit import Unit, owner_of


def units_of(model: nn.Module) -> list[Unit]:
    """The units that own sharded parameters of `model`, in the order of its parameters."""
    found: dict[int, Unit] = {}
    for parameter in model.parameters():
        unit = owner_of(parameter)
        if unit is not None:
            found.setdefault(id(unit), unit)
    return list(found.values())


def members_of(model: nn.Module) -> list[tuple[Bucket, Gradients, Member]]:
    """Every sharded parameter of `model`, with what holds it."""
    return [
        (bucket, gradients, member)
        for unit in units_of(model)
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True)
        for member in bucket.members
    ]


def names_of(model: nn.Module) -> dict[int, str]:
    """Qualified names of `model`'s parameters, by id; a tied parameter has its first name."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    return names
