"""Copying a unit: the same plan and mesh, shards of its own. What `copy.deepcopy` of a sharded model is made of.

In two steps, because a deep copy meets a module's parameters before it has made the module: first the new sharded
parameters, put into deepcopy's memo in place of the old ones; then, when all modules are copied, their places.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn

from ..errors import PhaseError
from .bucket import Bucket
from .flat_parameter import ATTRIBUTE, FlatParameter
from .gradient_set import FlatView
from .gradients import GradState
from .local_bucket import FlatBucket, LocalBucket, hidden_like
from .member import Member
from .parameter import OWNER_KEY, identity_of, local_of, plain_access, read_grad, write_grad
from .unit import Unit


def clone_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """A unit with shards, and gradients if there are any, equal to `unit`'s; not registered on any module yet.

    Args:
        unit: in any state; what is gathered is not copied.
        memo: of `copy.deepcopy`; gets the new parameter for each old one, sharded or unsharded.

    Raises:
        PhaseError: gradients accumulated without sync, or in flight, are held that a copy would lose.
    """
    for gradients in unit.gradients:
        if gradients.state is not GradState.NONE or gradients.partial is not None or gradients.waiting():
            raise PhaseError(
                f"Unit {unit.name or '(root)'!r} cannot be copied now: it holds gradients not yet reduced.",
                parameter=", ".join(member.name for member in gradients.bucket.members),
                rank=unit.rank,
                remedy="copy the model after the backward that reduces them (set_requires_gradient_sync(True)), "
                "or after optimizer.zero_grad() and before the next backward",
            )
    with torch.no_grad(), plain_access():
        new = Unit([_clone_bucket(bucket, memo) for bucket in unit.buckets], unit.reduce_dtype, unit.name)
    for ours, theirs in zip(new.gradients, unit.gradients, strict=True):
        ours.own_reduce_dtype, ours.fill_unused = theirs.own_reduce_dtype, theirs.fill_unused
        ours.keeps_compute_dtype = theirs.keeps_compute_dtype
        if isinstance(bucket := ours.bucket, FlatBucket):
            ours.views = [FlatView(bucket)]
            bucket.flat.__dict__[OWNER_KEY] = weakref.ref(new)
    new.rank, new.small_axis = unit.rank, unit.small_axis
    for member in new.members:
        member.sharded.__dict__[OWNER_KEY] = weakref.ref(new)
    return new


def _clone_bucket(bucket: Bucket, memo: dict[int, Any]) -> Bucket:
    new = copy.copy(bucket)
    new.shard = bucket.copy_of_shard()
    new.members = []
    new.forget_buffers()
    new._cast, new._pending, new.gathered_at = None, [], (-1, -1)
    new.members = [_clone_member(new, member, memo) for member in bucket.members]
    if isinstance(new, FlatBucket) and isinstance(bucket, FlatBucket):
        _clone_flat(new, bucket, memo)
    return new


def _clone_flat(new: FlatBucket, old: FlatBucket, memo: dict[int, Any]) -> None:
    """The flat parameter over the new shard, and the stand-ins on modules."""
    new.flat = FlatParameter(new.shard, new.layout, new.axes.shard.rank, old.flat.requires_grad)
    memo[id(old.flat)] = new.flat
    if old.flat.grad is not None:
        _give_gradient(new.flat, old.flat.grad.clone())
    for ours, theirs in zip(new.members, old.members, strict=True):
        if new.flat.grad is not None and theirs.sharded.grad is not None:
            _give_gradient(ours.sharded, new.tensor_of(new.view_of(new.flat.grad, ours.slot), ours.slot))
        ours.hidden = hidden_like(ours, new)
        memo[id(theirs.hidden)] = ours.hidden


def _give_gradient(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    if grad.dtype != parameter.dtype:
        parameter.grad_dtype = None
    parameter.grad = grad


def _clone_member(bucket: Bucket, member: Member, memo: dict[int, Any]) -> Member:
    old = member.sharded
    local = bucket.view_of(bucket.shard, member.slot)
    sharded = bucket._sharded_parameter(local, member.slot, old.requires_grad, identity_of(old))
    grad = read_grad(old)
    plain = isinstance(bucket, LocalBucket)
    if grad is not None and plain:
        _give_gradient(sharded, grad.clone())
    elif grad is not None:
        write_grad(sharded, bucket.tensor_of(local_of(grad).clone(), member.slot))
    for replaced in (old, member.unsharded):
        if replaced is not None:
            memo[id(replaced)] = sharded
    shown = bucket.tensor_of(local, member.slot) if plain else local_of(sharded)
    return Member(member.slot, [], sharded, shown, qualified=member.qualified)


def place_clone(new: Unit, old: Unit, modules: dict[int, nn.Module]) -> None:
    """Tell a copied unit where its parameters are registered, now that the modules are copied too.

    Args:
        new, old: the copy and what it is a copy of.
        modules: by the id of an old module's `_parameters`, and of its `__dict__`, the new module.

    Raises:
        PhaseError: the old unit's parameters are registered outside of what was copied (tied weights).
    """
    for ours, theirs in zip(new.members, old.members, strict=True):
        for place, key in theirs.places:
            holder = getattr(place, "module", None)
            module = modules.get(id(place if holder is None else holder._parameters))
            if module is None:
                raise PhaseError(
                    "A part of a sharded model was deep-copied whose parameter is tied to a module outside of it.",
                    parameter=theirs.name,
                    rank=old.rank,
                    remedy="deep-copy the whole model",
                )
            new_place: Any = module._parameters
            if holder is not None:
                kind: Any = type(place)
                new_place = kind(module)
            elif ours.hidden is not None:
                new_place = module.__dict__
            ours.places.append((new_place, key))
            new_place[key] = ours.sharded if ours.hidden is None else ours.hidden
    for mine, other in zip(new.buckets, old.buckets, strict=True):
        if isinstance(mine, FlatBucket) and isinstance(other, FlatBucket):
            mine.holder = modules[id(other.holder._parameters)]
            mine.holder._parameters[ATTRIBUTE] = mine.flat
