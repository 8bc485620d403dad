"""Copying a unit: the same plan and mesh, shards of its own. What `copy.deepcopy` of a sharded model is made of.

In two steps, because a deep copy meets a module's parameters before it has made the module: first the new sharded
parameters, put into deepcopy's memo in place of the old ones; then, when all modules are copied, their places.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..comm import turns_on
from ..forms import (
    OWNER_KEY,
    FlatParameter,
    FlatParameterForm,
    Member,
    Owner,
    Place,
    identity_of,
    stand_in_for,
    take_grad_dtype,
)
from ..torch_private.local_tensor import plain_access
from .bucket import Bucket
from .gradients import refuse_unreduced
from .messages import copied_without_its_tie
from .optimizer_view import FlatView
from .unit import Unit


def clone_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """A unit with shards, and gradients if there are any, equal to `unit`'s; not registered on any module yet.

    Args:
        unit: in any state; what is gathered is not copied.
        memo: of `copy.deepcopy`; gets the new parameter for each old one, sharded or unsharded.

    Raises:
        PhaseError: gradients accumulated without sync, or in flight, are held that a copy would lose.
    """
    refuse_unreduced(unit.name, unit.gradients, "copied", "copy the model")
    with torch.no_grad(), plain_access():
        new = Unit([_clone_bucket(bucket, memo) for bucket in unit.buckets], unit.dtypes)
    new.name, new.rank, new.kept_axis = unit.name, unit.rank, unit.kept_axis
    for gradients in new.gradients:
        form = gradients.bucket.form
        if isinstance(form, FlatParameterForm) and form.flat is not None:
            gradients.delivery.views = [FlatView(form, len(gradients.bucket.members))]
            form.flat.__dict__[OWNER_KEY] = Owner(new)
    for member in new.members:
        member.sharded.__dict__[OWNER_KEY] = Owner(new)
    return new


def _clone_bucket(bucket: Bucket, memo: dict[int, Any]) -> Bucket:
    new = copy.copy(bucket)
    new.shard, new.form = bucket.copy_of_shard(), bucket.form.copied()
    new.full = new.kept = None
    new.drop_plans()
    new.turns = turns_on(new.axes.device)
    new.members = [_clone_member(new, bucket, member, memo) for member in bucket.members]
    if isinstance(new.form, FlatParameterForm):
        _clone_flat(new, bucket, memo)
    return new


def _clone_member(new: Bucket, bucket: Bucket, member: Member, memo: dict[int, Any]) -> Member:
    old = member.sharded
    made = Member(member.slot, member.part, [], old, new.part(new.shard, member), member.split)
    made.qualified = member.qualified
    # A form may keep the object it is given as the original: it gets one that is nobody's.
    blank = nn.Parameter(torch.empty(0, dtype=new.storage_dtype, device="meta"), requires_grad=old.requires_grad)
    blank.__dict__.update(identity_of(old))
    made.sharded = new.form.make(made, blank)
    made.sharded.__dict__.update(identity_of(old))
    take_grad_dtype(made.sharded)
    for replaced in (old, member.unsharded):
        if replaced is not None:
            memo[id(replaced)] = made.sharded
    return made


def _clone_flat(new: Bucket, old: Bucket, memo: dict[int, Any]) -> None:
    """The flat parameter over the new shard, and the stand-ins on modules."""
    before = old.flat_parameter
    form: Any = new.form
    form.flat = flat = FlatParameter(new.shard, new.layout, new.axes.shard.rank, before.requires_grad)
    memo[id(before)] = flat
    for ours, theirs in zip(new.members, old.members, strict=True):
        ours.stand_in = stand_in_for(ours, new.storage_dtype, new.device)
        memo[id(theirs.stand_in)] = ours.stand_in


def place_clone(new: Unit, old: Unit, modules: dict[int, nn.Module]) -> None:
    """Tell a copied unit where its parameters are registered, now that the modules are copied too.

    Args:
        new, old: the copy and what it is a copy of.
        modules: by the id of an old module, the new one.

    Raises:
        PhaseError: the old unit's parameters are registered outside of what was copied (tied weights).
    """
    for ours, theirs in zip(new.members, old.members, strict=True):
        for place in theirs.places:
            module = modules.get(id(place.module))
            if module is None:
                raise copied_without_its_tie(theirs.name, old.rank)
            found = Place(module, place.name, place.outside)
            ours.places.append(found)
            found.show(ours.sharded if ours.stand_in is None else ours.stand_in)
    for mine, other in zip(new.buckets, old.buckets, strict=True):
        if isinstance(mine.form, FlatParameterForm) and isinstance(other.form, FlatParameterForm):
            mine.form.move_to(modules[id(other.form.holder)])
