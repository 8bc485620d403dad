"""The state that users may change, and when the engine looks at it: the checks, as data.

A check compares the current state with what the engine created, for all units at once, in C; units are inspected one
by one only if something differs. `ask` runs the checks at rest and at the beginning of a backward. The others are part
of a unit's own moments, in the files that the table names. `docs/architecture.md` contains the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from operator import attrgetter, getitem, is_

from ..containers import NONES, drain
from ..torch_private.local_tensor import plain_access, read_grad, read_requires_grad, write_grad
from .bucket import Bucket, none_replaced
from .gradients import Gradients, release_all
from .lookup import refuse_meta
from .optimizer_view import OptimizerView
from .parking import refuse_parked
from .unit import Unit


class When(Enum):
    """The moment at which a check compares."""

    REST = "at rest, before a pass"
    GATHER = "when a unit is opened or closed"
    BACKWARD = "at a backward's beginning"


@dataclass(frozen=True)
class Check:
    """A check for one kind of change by users.

    Attributes:
        name: the change.
        compares: what is compared.
        when: the moment of the comparison.
        does: what follows: an error, or what is taken over.
        where: the file that compares.
        run: checks all units at once; None: the check is part of a unit's own moment.
    """

    name: str
    compares: str
    when: When
    does: str
    where: str
    run: Callable[[Sequence[Unit]], None] | None = None


_GRADIENTS, _BUCKETS, _BUCKET = attrgetter("gradients"), attrgetter("buckets"), attrgetter("bucket")
_FOLLOWED, _FOLLOWS = attrgetter("followed"), attrgetter("form.follows")
_SHARDED, _VIEWS, _FLAT = attrgetter("sharded"), attrgetter("delivery.views"), attrgetter("form.flat")
_ALONE, _TENSOR, _ADOPTED = attrgetter("alone"), attrgetter("tensor"), attrgetter("adopted")
_MEMBERS = attrgetter("bucket.sharded")
_SHOWN, _SUMMONED = attrgetter("showing.unsharded"), attrgetter("showing.summoned")
_ASSIGNED = attrgetter("touched.assigned")


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


REST, GATHER, BACKWARD = When
CHECKS = (
    Check(
        "parameters, their storage, `requires_grad` or `.grad` were assigned",
        "objects, addresses and dtypes (`Untouched`), `requires_grad`, `.grad` with None",
        *(REST, "taken over, or `ConfigError`; memory of gradients that are None is given back", "shard/asked.py"),
        _refresh,
    ),
    Check("the model was parked", "whether any is", REST, "`PhaseError`", "shard/parking.py", refuse_parked),
    Check("shards are on meta", "`shard.is_meta`", REST, "`PhaseError`", "shard/lookup.py", refuse_meta),
    Check(
        "a parameter was added to a module",
        *("torch's count of registrations", REST, "`PhaseError` if it trains", "runtime/additions.py"),
    ),
    Check(
        "weights were changed while their unit stays gathered",
        *("the values, or counts of changes", REST, "gathered again", "agreement/stale.py"),
    ),
    Check(
        "a Parameter was assigned to a module in a forward",
        *("what is registered with what was shown", GATHER, "`PhaseError`", "shard/showing.py"),
    ),
    Check(
        "a forward wrote to its own parameters",
        *("versions and addresses of unsharded parameters", GATHER, "`PhaseError`", "forms/full.py"),
    ),
    Check(
        "`requires_grad` changed since the forward", "`requires_grad`", BACKWARD, "followed", "shard/asked.py", _follow
    ),
    Check(
        "whole parameters are shown (`summon_full_params`)",
        *("`showing.summoned`", BACKWARD, "`UsageError`", "runtime/root.py"),
    ),
    Check(
        "weights were changed between a forward and its backward",
        *("`Unit.version` with that of the call", BACKWARD, "`PhaseError` on all ranks", "runtime/step.py"),
    ),
)
_RUNS = {when: [check.run for check in CHECKS if check.when is when and check.run is not None] for when in When}


def ask(when: When, units: Sequence[Unit]) -> None:
    """Run the checks of a moment that cover all units at once, in the table's order.

    Raises:
        ConfigError: a parameter was replaced by a tensor that cannot be its shard.
        PhaseError: units are parked, or have no values.
    """
    with plain_access():
        for run in _RUNS[when]:
            run(units)
