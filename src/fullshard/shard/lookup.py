"""From a model or a parameter to the unit that owns it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..errors import PhaseError
from ..forms import Member, owner_of
from .bucket import Bucket
from .gradients import Gradients
from .unit import Unit


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


def refuse_meta(units: Iterable[Unit]) -> None:
    """Raise if any of these units holds parameters without values.

    Raises:
        PhaseError: names all of them.
    """
    names = [m.name for unit in units for bucket in unit.buckets if bucket.shard.is_meta for m in bucket.members]
    if names:
        raise PhaseError(
            "A forward was called while parameters are on the meta device and hold no values.",
            parameter=", ".join(names),
            remedy="call model.to_empty(device=...) and then initialise every module "
            "(reset_parameters() or a state dict load)",
        )
