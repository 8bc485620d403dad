"""The comparisons and calls of a unit's step in the usual case: prepared once, run by `step.py`.

    moment            compared with the usual values, in C                        called
    before forward    gathering; shards unchanged; sharded parameters in place    finish, show unsharded parameters
    after forward     unsharded parameters in place, and not written to           show sharded parameters, free
    before backward   as before forward; shards as the forward saw them           finish, show unsharded parameters
    after backward    unsharded parameters in place; reduced as last time         show sharded parameters, free, reduce

A unit that stays gathered after its forward (`UsualStep.stays`) is neither freed there nor gathered for its backward.
If anything differs, the general path (`Runner`) takes over and reports what is wrong. Any change of what a step was
planned from drops the plan (`Unit.usual`); the next forward on the general path plans it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from ..comm import ONE_STREAM
from ..events import Ledger
from ..shard import MEAN, Gradients, GradState, PlannedReduction, State
from .phases import Phase

_ALWAYS = ("phase", "unit.state", "unit.gathered", "settings.usual", "unit.showing.covered", "root.stream.listeners")

# Attributes of a `Runner` compared at each moment; `UsualStep` has the values to compare with.
BEFORE_FORWARD = attrgetter("root.usual_forward", *_ALWAYS)
AFTER_FORWARD = attrgetter("root.usual_forward", *_ALWAYS, "held", "period.leads_back", "period.hides")
BEFORE_BACKWARD = attrgetter("root.usual_backward", *_ALWAYS)
AFTER_BACKWARD = attrgetter("root.usual_backward", *_ALWAYS, "held", "period.calls")
# Attributes of a `Runner`, and of each of its `Gradients`, compared before a reduction with those in `UsualReduction`.
REDUCES = attrgetter(
    *("root.usual_backward", "root.stream.listeners", "root.reducer.usual", "root.reducer.owed"),
    *("settings.reduce", "settings.comm", "settings.share"),
)
GRADIENTS = attrgetter(
    *("state", "partial", "buffer", "delivery.set", "delivery.kept", "delivery.hooked", "delivery.views"),
    "bucket.trains",
)


class UsualForward:
    """How a unit's forward begins and ends in the usual case, in passes that build a graph or in passes that do not.

    Args:
        runner: the unit's runner; the unit is gathered by a reusable plan, and shown.
        graph: whether passes build a graph.

    Attributes:
        stays: whether the unit stays gathered after its forward.
        leaves, left: calls that end the unit's forward, and what `state`, `gathered` and `showing.unsharded` are then.
        before_pass: the usual values when the root's own unit begins a pass.
        before_forward, after_forward: the usual values at these moments.
    """

    __slots__ = ("after_forward", "before_forward", "before_pass", "leaves", "left", "stays")

    def __init__(self, runner: Any, graph: bool) -> None:
        gather, hide = runner.unit.gathered, runner.unit.showing.plan.hide
        self.stays = not runner.reshards_as_set(graph)
        self.leaves: list[Callable[[], object]] = hide if self.stays else [*hide, *_frees(runner.unit)]
        self.left: Any = (State.GATHERED, gather, False) if self.stays else (State.SHARDED, None, False)
        self.before_pass: Any = graph, Phase.IDLE, State.SHARDED, None, True, [], []
        self.before_forward: Any = graph, Phase.IDLE, State.GATHERING, gather, True, [], []
        self.after_forward: Any = graph, Phase.FORWARD, State.GATHERED, gather, True, [], [], 0, graph, False


class UsualStep(UsualForward):
    """See the module's docstring. Holds no memory of its own.

    Args:
        runner: the unit's runner; the unit is gathered by a reusable plan, and shown.

    Attributes:
        evaluation: its forward in passes that build no graph.
        gather: that plan.
        count: count the memory of a gather that was started.
        opens: calls that finish a gather, then show the unsharded parameters.
        closes: calls that show the sharded parameters, then free.
        shows: calls that show the unsharded parameters of a unit that stayed gathered.
        below: in the rest of the trace once this unit's backward has begun, the index of the step that begins the next
            unit's: -2, below the end of this unit's; -1 for the root's own unit, whose backward ends last.
        read, sharded, unsharded: see `ShowPlan`.
        addresses, counters, watched, numbers, addresses_of, bases, offsets: see `GatherPlan` (`addresses_of` are its
            `pointers`).
        pointers, places: calls that return the addresses of sharded parameters whose form does not notice a move
            itself, and the usual addresses.
        before_backward, after_backward: the usual values at these moments.
        reduction: how gradients are reduced; None: unknown, or not the usual way.
    """

    __slots__ = (
        *("addresses", "addresses_of", "after_backward", "bases", "before_backward", "below", "closes", "count"),
        *("counters", "evaluation", "gather", "numbers", "offsets", "opens", "places", "pointers", "read"),
        *("reduction", "sharded", "shows", "unsharded", "watched"),
    )

    def __init__(self, runner: Any) -> None:
        super().__init__(runner, graph=True)
        unit = runner.unit
        gather, shown = unit.gathered, unit.showing.plan
        self.gather, self.evaluation = gather, UsualForward(runner, graph=False)
        self.count: Callable[[], object] = partial(unit.ledger.changes.append, gather.issued_bytes)
        # The copies out are alive beside the memory that they are made from, which is then freed.
        copied = gather.live_bytes - gather.whole_bytes, gather.whole_bytes - gather.issued_bytes
        self.opens: list[Callable[[], object]] = [*gather.completes, *shown.show]
        self.opens += [partial(unit.ledger.changes.extend, copied)] if any(copied) else []
        self.closes: list[Callable[[], object]] = [*shown.hide, *_frees(unit)]
        self.shows, self.below = shown.show, -1 if runner.is_top else -2
        self.read, self.sharded, self.unsharded = shown.read, shown.sharded, shown.unsharded
        self.counters, self.addresses = gather.counters, gather.addresses
        self.watched, self.numbers = gather.watched, gather.numbers
        self.addresses_of, self.bases, self.offsets = gather.pointers, gather.bases, gather.offsets
        counted = [tensor for bucket in unit.counting for tensor in bucket.form.counters(bucket.members)]
        self.pointers: list[Callable[[], int]] = [tensor.data_ptr for tensor in counted]
        self.places = [pointer() for pointer in self.pointers]
        begins = State.GATHERED if self.stays else State.GATHERING
        self.before_backward: Any = True, Phase.IDLE, begins, gather, True, [], []
        self.after_backward: Any = True, Phase.BACKWARD, State.GATHERED, gather, True, [], [], 0, 1
        self.reduction: UsualReduction | None = None


def _frees(unit: Any) -> list[Callable[[], object]]:
    """Calls that free the unit, and count that."""
    return [*unit.gathered.frees, partial(unit.ledger.changes.append, -unit.gathered.live_bytes)]


def _counts(ledger: Ledger, nbytes: int) -> list[Callable[[], object]]:
    """Calls that count memory of gradients to reduce."""
    return [partial(changes.append, nbytes) for changes in (ledger.changes, ledger.reductions)] if nbytes else []


def plan_usual_step(runner: Any) -> None:
    """Plan the unit's usual step, if it is of the usual kind. Its modules show the unsharded parameters."""
    unit, plan = runner.unit, runner.unit.plan
    if runner.is_whole and plan is not None and plan is unit.gathered and unit.is_plain():
        unit.usual = UsualStep(runner)


class UsualReduction:
    """The last reduction of a unit with a single trainable bucket, to repeat it. Holds no memory of its own.

    Args:
        runner: the unit's runner.
        gradients: of that bucket.
        planned: the reduction.

    Attributes:
        before: the usual values of `REDUCES`, and of `GRADIENTS` for each bucket.
        every: the gradients of all buckets.
        replicates: whether an all-reduce between replicas follows, whose result is delivered on the general path.
        collects: calls before gradients are copied into the buffer: they allocate it.
        starts: calls once gradients are copied and before autograd's are freed, which start the reduction; the last
            one returns the pending collective.
        ends: calls after the reduction has arrived.
        scratch: bytes that the collective allocates; `starts` counts them first.
    """

    __slots__ = (
        *("before", "buffer", "collects", "delivery", "ends", "every", "gradients", "most", "planned"),
        *("received", "receivers", "replicates", "scratch", "set", "sharded", "starts", "takes", "unsharded"),
    )

    def __init__(self, runner: Any, gradients: Gradients, planned: PlannedReduction) -> None:
        bucket, settings, delivery, ledger = gradients.bucket, runner.settings, gradients.delivery, runner.unit.ledger
        self.gradients, self.delivery, self.planned, self.buffer = gradients, delivery, planned, planned.buffer
        current: Any = delivery.set
        self.set, self.receivers, self.received = current, current.receivers, current.received
        self.unsharded, self.sharded = bucket.unsharded, bucket.sharded
        streams = bucket.turns is not ONE_STREAM
        self.takes: list[Callable[[], object]] = [bucket.turns.take] if streams else []
        gives: list[Callable[[], object]] = [bucket.turns.give] if streams else []
        nbytes, self.scratch = planned.buffer.nbytes, planned.scratch
        self.collects: list[Callable[[], object]] = [*self.takes, planned.buffer.take, *_counts(ledger, nbytes)]
        self.starts: list[Callable[[], Any]] = [*_counts(ledger, self.scratch), *gives, current.take, planned.start]
        self.ends: list[Callable[[], object]] = [planned.buffer.free, *gives, *_counts(ledger, -nbytes - self.scratch)]
        self.most = settings.reduce.max_in_flight
        self.every, self.replicates = runner.unit.gradients, bucket.axes.replicate is not None
        self.before: Any = (True, [], True, {}, settings.reduce, settings.comm, None), [*map(_at_rest, self.every)]


def _at_rest(gradients: Gradients) -> Any:
    """The values of `GRADIENTS` for a bucket with nothing waiting to be reduced."""
    delivery, bucket = gradients.delivery, gradients.bucket
    return GradState.NONE, None, gradients.buffer, delivery.set, set(), False, [*delivery.views], bucket.trains


def plan_usual_reduction(runner: Any) -> None:
    """Plan the unit's usual reduction, if it is of the usual kind. Call after the reduction was issued."""
    unit, settings = runner.unit, runner.settings
    if unit.usual is None or not settings.reduce.usual or settings.share is not None:
        return
    trained = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    if len(trained) != 1:
        return
    (gradients,) = trained
    bucket, delivery, planned = gradients.bucket, gradients.delivery, gradients.running
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
