"""Finds the units that own a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from ..forms import Member, owner_of
from .bucket import Bucket
from .gradients import Gradients
from .messages import forward_on_meta
from .unit import Unit

_BUCKETS, _IS_META = attrgetter("buckets"), attrgetter("shard.is_meta")


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units that own sharded parameters of `model`, in the order of its parameters."""
    units: dict[int, Unit] = {}
    for parameter in model.parameters():
        unit = owner_of(parameter)
        if unit is not None:
            units.setdefault(id(unit), unit)
    return list(units.values())


def members_of(model: nn.Module) -> list[tuple[Bucket, Gradients, Member]]:
    """Return every sharded parameter of `model`, with its bucket and gradients."""
    return [
        (bucket, gradients, member)
        for unit in units_of(model)
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True)
        for member in bucket.members
    ]


def all_ranks_hold(unit: Unit, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether every rank gets a gradient for any of these parameters of `unit`, when all of them have gradients."""
    ids, count = {id(parameter) for parameter in parameters}, 0
    for bucket in unit.buckets:
        members = [member for member in bucket.members if id(member.sharded) in ids]
        count += len(members)
        ranks = set[int]().union(*[bucket.layout.holders(member.slot) for member in members])
        if members and (bucket.form.gives_empty or len(ranks) == bucket.axes.shard.size):
            return True
    return count < len(ids)  # some are views or a flat parameter, of which every rank has a part


def refuse_meta(units: Sequence[Unit]) -> None:
    """Raise if any of these units has parameters without values.

    Raises:
        PhaseError: there are such parameters; names all of them.
    """
    if True not in map(_IS_META, chain.from_iterable(map(_BUCKETS, units))):
        return
    names = [m.name for unit in units for bucket in unit.buckets if bucket.shard.is_meta for m in bucket.members]
    if names:
        raise forward_on_meta(names)
