"""What users may have changed, as far as the engine looks at all units at once: before a pass, and before a backward.

Compares the current state with what the engine created, in C; units are inspected one by one only if something differs.
`docs/architecture.md` has a table of all that is looked at, when, and in which file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, getitem, is_

from ..containers import NONES, drain
from ..forms import all_hold
from ..torch_private.local_tensor import plain_access, read_grad, read_requires_grad, write_grad
from .bucket import Bucket
from .gradients import Gradients, release_all
from .lookup import refuse_meta
from .optimizer_view import OptimizerView
from .parking import refuse_parked
from .unit import Unit

_GRADIENTS, _BUCKETS, _BUCKET = attrgetter("gradients"), attrgetter("buckets"), attrgetter("bucket")
_UNTOUCHED, _FOLLOWED, _FOLLOWS = attrgetter("untouched"), attrgetter("followed"), attrgetter("form.follows")
_SHARDED, _VIEWS, _FLAT = attrgetter("sharded"), attrgetter("delivery.views"), attrgetter("form.flat")
_ALONE, _TENSOR, _ADOPTED = attrgetter("alone"), attrgetter("tensor"), attrgetter("adopted")
_MEMBERS = attrgetter("bucket.sharded")
_SHOWN, _SUMMONED = attrgetter("showing.unsharded"), attrgetter("showing.summoned")
_ASSIGNED = attrgetter("touched.assigned")


def _refresh(units: Sequence[Unit]) -> None:
    """Run `Unit.refresh` on each unit, if one comparison in C finds that users touched any of them."""
    gradients = [*chain.from_iterable(map(_GRADIENTS, units))]
    buckets = [*map(_BUCKET, gradients)]
    untouched = [*map(_UNTOUCHED, buckets)]
    views = [*chain.from_iterable(map(_VIEWS, gradients))]
    if (
        None in untouched
        or True in chain(map(_SHOWN, units), map(_SUMMONED, units), map(_ASSIGNED, units))
        or (views and not _all_let_go(gradients, views))
        or not all_hold(untouched)
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


def _all_followed(buckets: Sequence[Bucket]) -> bool:
    followed, flat = [*map(_FOLLOWED, buckets)], [*filter(_FOLLOWS, buckets)]
    if [] in followed:
        return False
    if [*map(read_requires_grad, map(_FLAT, flat))] != [*map(getitem, map(_FOLLOWED, flat), repeat(0))]:
        return False
    now = map(read_requires_grad, chain.from_iterable(map(_SHARDED, buckets)))
    return [*now] == [*chain.from_iterable(followed)]


def ask_at_rest(units: Sequence[Unit]) -> None:
    """Look at everything that users may have changed between passes; before a pass.

    Takes over assigned parameters, storage, `requires_grad` and `.grad`, and gives memory of gradients that are None
    back.

    Raises:
        ConfigError: a parameter was replaced by a tensor that cannot be its shard.
        PhaseError: units are parked, or have no values.
    """
    with plain_access():
        _refresh(units)
        refuse_parked(units)
        refuse_meta(units)


def ask_at_backward(units: Sequence[Unit]) -> None:
    """Let unsharded parameters follow the `requires_grad` that users changed since the forward."""
    buckets = [*chain.from_iterable(map(_BUCKETS, units))]
    with plain_access():
        if not _all_followed(buckets):
            for bucket in buckets:
                bucket.follow_requires_grad()
