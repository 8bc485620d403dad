"""What a unit's step compares and calls as long as nothing unusual happens: joined once, run by `step.py`.

    moment            compared, in C, with what is usual                             called
    before forward    gathering; shards unchanged; sharded parameters in place       finish, show the unsharded ones
    after forward     unsharded ones in place, and not written to                    show the sharded ones, free
    before backward   as before forward; shards as the forward saw them              finish, show the unsharded ones
    after backward    unsharded ones in place; gradients are reduced as last time    show the sharded ones, free, reduce

A unit that stays gathered after its forward (`UsualStep.stays`) is neither freed there nor gathered for its backward.
Where anything differs the unit goes the long way (`Runner`), which says what is wrong. Whatever a step was planned from
drops it when that changes (`Unit.usual`); the next forward that goes the long way plans it again.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..comm import ONE_STREAM
from ..shard import MEAN, Gradients, GradState, PlannedReduction, State
from .phases import Phase

_ALWAYS = ("phase", "unit.state", "unit.gathered", "settings.usual", "unit.showing.covered")

# What is compared of a `Runner` at each moment; `UsualStep` has what it is to be.
BEFORE_FORWARD = attrgetter("root.usual_forward", *_ALWAYS)
AFTER_FORWARD = attrgetter("root.usual_forward", *_ALWAYS, "held", "period.leads_back", "period.hides")
BEFORE_BACKWARD = attrgetter("root.usual_backward", *_ALWAYS)
AFTER_BACKWARD = attrgetter("root.usual_backward", *_ALWAYS, "held", "period.calls")
# What is compared of it, and of its `Gradients`, each, before they are reduced; `UsualReduction` has what is usual.
REDUCES = attrgetter("settings.reduce", "settings.comm", "settings.share", "root.reducer.usual", "root.reducer.owed")
GRADIENTS = attrgetter(
    *("state", "partial", "buffer", "delivery.set", "delivery.kept", "delivery.hooked", "delivery.views"),
    "bucket.trains",
)


class UsualStep:
    """See the module's docstring. Holds no memory of its own.

    Args:
        runner: of the unit, which is gathered by a plan that serves again, and shown.

    Attributes:
        gather: that plan.
        opens: what ends a gather, then shows the unsharded parameters.
        closes: what shows the sharded parameters, then frees.
        shows, hides: what shows the unsharded parameters, and the sharded ones.
        stays: whether the unit stays gathered from its forward to its backward.
        leave, come_back: methods of the unit that end its forward, and begin its backward.
        copied: bytes that are alive besides as a gather ends, while what is copied out of it is still there.
        settles: bytes that are alive once the gather is over, less those while it is in flight.
        read, sharded, unsharded: see `ShowPlan`.
        addresses, counters, watched, numbers, addresses_of, bases, offsets: see `GatherPlan`, there `pointers`.
        pointers, places: what tells where sharded parameters lie whose form does not notice itself, and where that is.
        before_forward, after_forward, before_backward, after_backward: what the questions above find as usual.
        reduction: how gradients are reduced; None: not known, or not the usual way.
    """

    __slots__ = (
        *("addresses", "addresses_of", "after_backward", "after_forward", "bases", "before_backward"),
        *("before_forward", "closes", "come_back", "copied", "counters", "gather", "hides", "leave", "numbers"),
        *("offsets", "opens", "places"),
        *("pointers", "read", "reduction", "settles", "sharded", "shows", "stays", "unsharded", "watched"),
    )

    def __init__(self, runner: Any) -> None:
        unit = runner.unit
        gather, shown = unit.gathered, unit.showing.plan
        self.gather = gather
        self.opens: list[Callable[[], object]] = [*gather.completes, *shown.show]
        self.closes: list[Callable[[], object]] = [*shown.hide, *gather.frees]
        self.shows, self.hides = shown.show, shown.hide
        self.stays = runner.settings.reshard_after_forward is False
        self.leave, self.come_back = (unit.hide, unit.show) if self.stays else (unit.close, unit.open)
        self.copied, self.settles = gather.copied_bytes, gather.live_bytes - gather.issued_bytes
        self.read, self.sharded, self.unsharded = shown.read, shown.sharded, shown.unsharded
        self.counters, self.addresses = gather.counters, gather.addresses
        self.watched, self.numbers = gather.watched, gather.numbers
        self.addresses_of, self.bases, self.offsets = gather.pointers, gather.bases, gather.offsets
        counted = [tensor for bucket in unit.counting for tensor in bucket.form.counters(bucket.members)]
        self.pointers: list[Callable[[], int]] = [tensor.data_ptr for tensor in counted]
        self.places = [pointer() for pointer in self.pointers]
        self.before_forward: Any = True, Phase.IDLE, State.GATHERING, gather, True, []
        self.after_forward: Any = True, Phase.FORWARD, State.GATHERED, gather, True, [], 0, True, False
        begins = State.GATHERED if self.stays else State.GATHERING
        self.before_backward: Any = True, Phase.IDLE, begins, gather, True, []
        self.after_backward: Any = True, Phase.BACKWARD, State.GATHERED, gather, True, [], 0, 1
        self.reduction: UsualReduction | None = None


def plan_usual_step(runner: Any) -> None:
    """Note what the steps of a unit compare and call, if it is of the usual kind. Its modules show what is gathered."""
    unit, plan = runner.unit, runner.unit.plan
    if runner.is_whole and plan is not None and plan is unit.gathered and unit.is_plain():
        unit.usual = UsualStep(runner)


class UsualReduction:
    """A reduction of the one bucket of a unit that trains, as it started and arrived last. Holds no memory of its own.

    Args:
        runner: of the unit.
        gradients: of that bucket.
        planned: the reduction.

    Attributes:
        before: what `REDUCES`, and `GRADIENTS` of each bucket, find as usual.
        every: the gradients of all buckets.
        replicates: whether replicas reduce what arrives, which is then delivered the long way.
        collects: what comes before gradients are copied into the buffer.
        starts: what starts the reduction, and returns at last what to wait for.
        ends: what comes when it has arrived.
        nbytes: of the buffer, and of what the collective needs besides.
    """

    __slots__ = (
        *("before", "buffer", "collects", "delivery", "ends", "every", "gradients", "most", "nbytes", "planned"),
        *("received", "receivers", "replicates", "set", "sharded", "starts", "takes", "unsharded"),
    )

    def __init__(self, runner: Any, gradients: Gradients, planned: PlannedReduction) -> None:
        bucket, settings, delivery = gradients.bucket, runner.settings, gradients.delivery
        self.gradients, self.delivery, self.planned, self.buffer = gradients, delivery, planned, planned.buffer
        current: Any = delivery.set
        self.set, self.receivers, self.received = current, current.receivers, current.received
        self.unsharded, self.sharded = bucket.unsharded, bucket.sharded
        streams = bucket.turns is not ONE_STREAM
        self.takes: list[Callable[[], object]] = [bucket.turns.take] if streams else []
        self.collects: list[Callable[[], object]] = [*self.takes, planned.buffer.take]
        self.starts: list[Callable[[], object]] = [*self.takes, current.take, planned.start]
        self.ends: list[Callable[[], object]] = [planned.buffer.free, *([bucket.turns.give] if streams else [])]
        self.nbytes = planned.buffer.nbytes, planned.scratch
        self.most = settings.reduce.max_in_flight
        self.every, self.replicates = runner.unit.gradients, bucket.axes.replicate is not None
        self.before: Any = (settings.reduce, settings.comm, None, True, {}), [*map(_at_rest, self.every)]


def _at_rest(gradients: Gradients) -> Any:
    """What `GRADIENTS` finds of a bucket when nothing of it waits for a reduction."""
    delivery, bucket = gradients.delivery, gradients.bucket
    return GradState.NONE, None, gradients.buffer, delivery.set, set(), False, [*delivery.views], bucket.trains


def plan_usual_reduction(runner: Any) -> None:
    """Note how the gradients of a unit are reduced, if that is usual. The reduction was issued."""
    unit, settings = runner.unit, runner.settings
    if unit.usual is None or not settings.reduce.usual or settings.share is not None:
        return
    trained = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    if len(trained) != 1:
        return
    (gradients,) = trained
    bucket, delivery, planned = gradients.bucket, gradients.delivery, gradients.running
    known = unit.usual.reduction
    if known is not None and known.planned is planned and known.set is delivery.set:
        return
    if (
        planned is not None
        and planned.scaling is MEAN
        and planned.rules is settings.reduce
        and delivery.set is not None
        and planned.out is delivery.set.flat
        and bucket.home is None
        and bucket.sharded
        and bucket.unsharded
        and not delivery.hooked
    ):
        unit.usual.reduction = UsualReduction(runner, gradients, planned)
