"""Copies a unit, with the same plan and mesh and its own shards, for `copy.deepcopy` of a sharded model.

In two steps, because a deep copy reaches a module's parameters before it creates the module: first the new sharded
parameters, entered in deepcopy's memo for the old ones; then, when all modules are copied, their places.
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
from .unit import Unit
from .views import FlatView


@torch.inference_mode(False)  # the copy must serve training later
def clone_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return a unit with shards equal to `unit`'s, without gradients; not registered on any module yet.

    Args:
        unit: in any state; gathered memory is not copied.
        memo: of `copy.deepcopy`; gets the new parameter for each old one, sharded or unsharded.

    Raises:
        PhaseError: the unit has gradients accumulated without sync, or in flight, that a copy would lose.
    """
    refuse_unreduced(unit.name, unit.gradients, "copied", "copy the model")
    with torch.no_grad(), plain_access():
        new = Unit([_clone_bucket(bucket, memo) for bucket in unit.buckets], unit.settings)
    new.name, new.kept_axis, new.keeps_storage = unit.name, unit.kept_axis, unit.keeps_storage
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
    new.members = [_clone_member(new, member, memo) for member in bucket.members]
    if isinstance(new.form, FlatParameterForm):
        _clone_flat(new, bucket, memo)
    return new


def _clone_member(new: Bucket, member: Member, memo: dict[int, Any]) -> Member:
    old = member.sharded
    clone = Member(member.slot, member.part, [], old, new.part(new.shard, member), member.split)
    clone.qualified = member.qualified
    # A form may keep the original that is passed to it: pass an object that nobody else uses.
    blank = nn.Parameter(torch.empty(0, dtype=new.storage_dtype, device="meta"), requires_grad=old.requires_grad)
    blank.__dict__.update(identity_of(old))
    clone.sharded = new.form.make(clone, blank)
    clone.sharded.__dict__.update(identity_of(old))
    take_grad_dtype(clone.sharded)
    for replaced in (old, member.unsharded):
        if replaced is not None:
            memo[id(replaced)] = clone.sharded
    return clone


def _clone_flat(new: Bucket, old: Bucket, memo: dict[int, Any]) -> None:
    """Create the flat parameter over the new shard, and the stand-ins on modules."""
    before = old.flat_parameter
    form: Any = new.form
    form.flat = flat = FlatParameter(new.shard, new.layout, new.axes.shard.rank, before.requires_grad)
    memo[id(before)] = flat
    for new_member, old_member in zip(new.members, old.members, strict=True):
        new_member.stand_in = stand_in_for(new_member, new.storage_dtype, new.device)
        memo[id(old_member.stand_in)] = new_member.stand_in


def place_clone(new: Unit, old: Unit, modules: dict[int, nn.Module]) -> None:
    """Register a copied unit's parameters on the copied modules.

    Args:
        new, old: the copy and its original.
        modules: the new modules, by the id of the old ones.

    Raises:
        PhaseError: a parameter of the old unit is also registered on a module that was not copied (tied weights).
    """
    for new_member, old_member in zip(new.members, old.members, strict=True):
        for place in old_member.places:
            module = modules.get(id(place.module))
            if module is None:
                raise copied_without_its_tie(old_member.name, old.rank)
            new_place = Place(module, place.name, place.outside)
            new_member.places.append(new_place)
            new_place.show(new_member.shown)
    for new_bucket, old_bucket in zip(new.buckets, old.buckets, strict=True):
        if isinstance(new_bucket.form, FlatParameterForm) and isinstance(old_bucket.form, FlatParameterForm):
            new_bucket.form.move_to(modules[id(old_bucket.form.holder)])
