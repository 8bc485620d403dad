"""The checks of what users may have changed: at rest, at the beginning of a backward, before an optimizer's step.

A check compares the current state with what the engine created, for all units at once, in C; units are inspected one
by one only if something differs. Other checks are part of a unit's own moments: `docs/architecture.md` lists them all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain, compress, repeat
from operator import attrgetter, getitem, is_
from typing import Any

import torch

from ..containers import NONES, drain
from ..forms import PART_KEY, owner_of
from ..torch_private.local_tensor import plain_access, read_grad, read_requires_grad, write_grad
from .bucket import Bucket, none_replaced
from .delivery import follow
from .gradients import Gradients, release_all
from .messages import forward_on_meta, steps_may_be_undone
from .parking import Parking, refuse_parked
from .unit import Unit
from .views import OptimizerView


class When(Enum):
    """The moment at which the engine looks."""

    REST = "at rest, before a pass"
    BACKWARD = "at a backward's beginning"


_GRADIENTS, _BUCKETS, _BUCKET = attrgetter("gradients"), attrgetter("buckets"), attrgetter("bucket")
_FOLLOWED, _FOLLOWS = attrgetter("followed"), attrgetter("form.follows")
_SHARDED, _VIEWS, _FLAT = attrgetter("sharded"), attrgetter("delivery.views"), attrgetter("form.flat")
_ALONE, _TENSOR, _ADOPTED = attrgetter("alone"), attrgetter("tensor"), attrgetter("adopted")
_MEMBERS = attrgetter("bucket.sharded")
_SHOWN, _SUMMONED = attrgetter("showing.unsharded"), attrgetter("showing.summoned")
_ASSIGNED, _IS_META = attrgetter("touched.assigned"), attrgetter("shard.is_meta")


def _refresh(units: Sequence[Unit]) -> None:
    """Run `Unit.refresh` on each unit, if one comparison in C finds that users touched any of them."""
    gradients = [*chain.from_iterable(map(_GRADIENTS, units))]
    buckets = [*map(_BUCKET, gradients)]
    views = [*chain.from_iterable(map(_VIEWS, gradients))]
    if (
        True in chain(map(_SHOWN, units), map(_SUMMONED, units), map(_ASSIGNED, units))
        or (views and not _all_let_go(gradients, views))
        or not none_replaced(buckets)
        or not _all_followed(buckets)
    ):
        for unit in units:
            unit.refresh()
    elif all(map(is_, map(read_grad, chain.from_iterable(map(_SHARDED, buckets))), NONES)):
        release_all(gradients)
    else:
        for of_bucket in gradients:
            if of_bucket.delivery.all_none():
                of_bucket.release()


def _all_let_go(gradients: Sequence[Gradients], views: Sequence[OptimizerView]) -> bool:
    """Whether all views are `FlatParameter`s without gradients; if so, sets `.grad` of their parameters to None."""
    if not all(map(_ALONE, views)) or not all(map(is_, map(_ADOPTED, views), NONES)):
        return False
    if not all(map(is_, map(read_grad, map(_TENSOR, views)), NONES)):
        return False
    drain(map(write_grad, chain.from_iterable(map(_MEMBERS, filter(_VIEWS, gradients))), NONES))
    return True


def _follow(units: Sequence[Unit]) -> None:
    """Let unsharded parameters follow the `requires_grad` of sharded ones."""
    buckets = [*chain.from_iterable(map(_BUCKETS, units))]
    if not _all_followed(buckets):
        for bucket in buckets:
            bucket.follow_requires_grad()


def _all_followed(buckets: Sequence[Bucket]) -> bool:
    followed, flat = [*map(_FOLLOWED, buckets)], [*filter(_FOLLOWS, buckets)]
    if [] in followed:
        return False
    if [*map(read_requires_grad, map(_FLAT, flat))] != [*map(getitem, map(_FOLLOWED, flat), repeat(0))]:
        return False
    now = map(read_requires_grad, chain.from_iterable(map(_SHARDED, buckets)))
    return [*now] == [*chain.from_iterable(followed)]


UNDOABLE: weakref.WeakKeyDictionary[Any, set[Unit]] = weakref.WeakKeyDictionary()
"""Units stepped in a backward whose steps `optimizer.step()` may still undo, to clip their gradients; by stepper."""


def refuse_undoable(units: Sequence[Unit]) -> None:
    """Raise if steps of any of these units may still be undone.

    Raises:
        PhaseError: names the units.
    """
    undoable = set[Unit]().union(*UNDOABLE.values())
    if not undoable.isdisjoint(units):
        raise steps_may_be_undone([unit.name for unit in units if unit in undoable])


def refuse_unready(units: Sequence[Unit]) -> None:
    """Raise if any of these units may not compute now. Costs nothing while no unit of this process is such.

    Raises:
        PhaseError: units are parked, or their steps may still be undone; names them and the remedy.
    """
    if UNDOABLE:
        refuse_undoable(units)
    if Parking.alive:
        refuse_parked(units)


def refuse_meta(units: Sequence[Unit]) -> None:
    """Raise if any of these units has parameters without values.

    Raises:
        PhaseError: there are such parameters; names all of them.
    """
    buckets = [*chain.from_iterable(map(_BUCKETS, units))]
    if True in map(_IS_META, buckets):
        raise forward_on_meta([member.name for bucket in buckets if bucket.shard.is_meta for member in bucket.members])


_CHECKS: dict[When, tuple[Callable[[Sequence[Unit]], None], ...]] = {
    When.REST: (_refresh, refuse_unready, refuse_meta),
    When.BACKWARD: (_follow,),
}


def ask(when: When, units: Sequence[Unit]) -> None:
    """Run the checks of a moment, in order.

    Raises:
        ConfigError: a parameter was replaced by a tensor that cannot be its shard.
        PhaseError: units are parked, or have no values.
    """
    with plain_access():
        for check in _CHECKS[when]:
            check(units)


def follow_views(parameters: Iterable[torch.Tensor]) -> None:
    """Take over gradients that users assigned to parameters under optimizer views; `parameters` may include others."""
    for unit in {owner_of(parameter) for parameter in parameters if PART_KEY in parameter.__dict__} - {None}:
        follow([gradients.delivery for gradients in unit.gradients if gradients.delivery.views])


def before_step(units: Sequence[Unit]) -> None:
    """Take over storage and gradients that users assigned to parameters under optimizer views, which show the old ones.

    Raises:
        ConfigError: see `Unit.refresh` and `follow`.
    """
    if not any(map(_VIEWS, chain.from_iterable(map(_GRADIENTS, units)))):  # the usual case
        for unit in compress(units, map(_ASSIGNED, units)):
            unit.refresh()
        return
    viewed = [unit for unit in units if any([gradients.delivery.views for gradients in unit.gradients])]
    unchanged = none_replaced([bucket for unit in viewed for bucket in unit.buckets])
    for unit in units:
        if unit.touched.assigned or (not unchanged and unit in viewed and unit.replaced()):
            unit.refresh()
    follow([gradients.delivery for unit in viewed for gradients in unit.gradients if gradients.delivery.views])
