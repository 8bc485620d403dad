"""Reductions of the units under one root: in an order that all ranks share, a bounded number at once.

Units close in the order of the trace (`trace.py`), on every rank alike, and are reduced as they close: with zeros if
this rank has no gradients for them. What a backward cannot reduce then (units that will be reached again) is reduced
when it ends.

At the end of a backward the ranks say which parameters had gradients (`agreement/use.py`): a parameter that some
rank used has a `.grad` on all, one that none used has none, and its optimizer state is the same everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, is_not, methodcaller
from typing import Any, Protocol

import torch

from ..agreement import NOTHING, Position, SharedOrder, UseAgreement
from ..comm import Comm
from ..containers import NONES, drain
from ..events import Ledger, stream
from ..shard import (
    Bucket,
    GradState,
    ReduceSettings,
    TokenCount,
    Unit,
    has_gradients,
    sees_gradients,
    settle,
    shown_empty,
    tokens_not_counted,
)
from ..torch_private.attached_optimizers import attached_to
from ..torch_private.local_tensor import plain_access, read_grad, write_grad
from ..torch_private.profiler import in_range, recording
from ..watcher import END, RANK, REDUCE, VERB_BITS
from .attached import step_attached
from .settings import UnitSettings
from .usual import UsualReduction, plan_usual_reduction


class Reducible(Protocol):
    """What a reducer knows of a unit: its `Runner`."""

    unit: Unit
    settings: UnitSettings
    index: int


class InFlight(deque[tuple["Reducer", Reducible, UsualReduction | None]]):
    """Reductions over the shard axis, oldest first; each holds one buffer. Roots may share it (`share_comm_ctx`).

    Of each: whose it is, the unit, and what it was started by if that was the usual way.

    Attributes:
        finalizing: whose reductions wait for a `GradientReductionHandle`; nobody else may run meanwhile.
    """

    finalizing: Reducer | None = None


_TRAINS = attrgetter("trains")
_STATE, _GRADIENTS, _UNSHARDED = attrgetter("state"), attrgetter("unit.gradients"), attrgetter("bucket.unsharded")
NONE, PENDING, REDUCING = GradState
_FILLS = attrgetter("settings.reduce.fill_unused")
_REPLICATE, _SHARDS = attrgetter("axes.replicate"), attrgetter("axes.shard.size")
_BUCKETS, _SHARDED = attrgetter("unit.buckets"), attrgetter("sharded")
_HOME = attrgetter("home")
_VIEWS, _TENSOR = attrgetter("delivery.views"), attrgetter("tensor")
_EXISTS = partial(is_not, None)
_TURNS, _TAKE = attrgetter("turns"), methodcaller("take")


class Reducer:
    """See the module's docstring. Owns no tensors.

    Args:
        comm: collectives by which ranks agree.
        in_flight: shared with other roots, if it is.
    """

    def __init__(self, comm: Comm, in_flight: InFlight | None = None) -> None:
        self.comm = comm
        self.in_flight = InFlight() if in_flight is None else in_flight
        self._replicating: deque[Reducible] = deque()  # reduced over the replicate axis, oldest first; slices only
        self.owed: dict[int, Reducible] = {}  # by index: closed, and not reduced since
        self._tokens: TokenCount | None = None  # what the backward that runs now divides by
        self._kept_apart = False  # whether something may be reduced over the shard axis only
        self.usual = False  # whether reductions start and end the usual way in the backward that runs now

    def serve(self, units: Sequence[Reducible], position: Position, in_step: SharedOrder | None = None) -> None:
        """Reduce these units from now on. Between backwards.

        Args:
            units: all units under the root.
            position: told of each reduction before it is issued.
            in_step: asked before each reduction, if ranks say what they want next.
        """
        self.units, self.position, self._in_step = units, position, in_step
        self._unit_list = [one.unit for one in units]
        self._use = UseAgreement(self.comm, position)

    @property
    def is_idle(self) -> bool:
        """Whether no unit waits to be reduced."""
        return not (self.owed or self._kept_apart or self.in_flight or self._replicating)

    def begin(self, rules: ReduceSettings) -> None:
        """A backward begins.

        Args:
            rules: the root's.

        Raises:
            UsageError: sums are to be divided by a count of tokens, and there is none for this backward.
        """
        self._use.begin(self._unit_list)
        sharded = [*map(_SHARDED, self._buckets())]
        with plain_access():  # an empty list: its parameters were not listed yet
            views = chain.from_iterable(map(_VIEWS, chain.from_iterable(map(_GRADIENTS, self.units))))
            hooked = [] in sharded or sees_gradients([*chain(*sharded, filter(_EXISTS, map(_TENSOR, views)))])
        self.usual = not hooked and self._in_step is None
        if rules.reduction == "tokens":
            if rules.tokens is None or not rules.tokens.left:
                raise tokens_not_counted(None if rules.tokens is None else rules.tokens.backwards)
            self._tokens = rules.tokens

    def changed(self, one: Reducible) -> None:
        """A unit's weights changed between a forward and its backward, which runs now."""
        self._use.note_changed(one.index)

    def close(self, one: Reducible, comes_again: bool) -> None:
        """A unit's backward is over, as far as this call goes.

        Args:
            comes_again: more gradients of it are expected.
        """
        unit = one.unit
        if True not in map(_TRAINS, unit.buckets) and not has_gradients(unit.gradients):
            return
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self.close(one, comes_again)
            return
        with plain_access():
            if not one.settings.reduce.sync:
                self.owed[one.index] = one
                self._set_aside(one)
            elif not comes_again and self._in_step is None:
                self.take_part(one)
            else:  # once all ranks have all of its gradients
                self.owed[one.index] = one

    def reduce(self, one: Reducible, reduction: UsualReduction) -> None:
        """Collect what a backward left of a unit's gradients, and start to reduce it, as last time.

        Args:
            one: the unit.
            reduction: compared with what there is.
        """
        in_flight, position, ledger = self.in_flight, self.position, one.unit.ledger
        log = position.log
        gradients, delivery, unsharded = reduction.gradients, reduction.delivery, reduction.unsharded
        with plain_access():
            while len(in_flight) >= reduction.most:
                self._advance()
            grads = [*map(read_grad, unsharded)]
            drain(map(call, reduction.collects))
            try:
                everyone = reduction.buffer.fill(grads, True)
            except BaseException:
                reduction.buffer.free()
                raise
            drain(map(write_grad, unsharded, NONES))
            delivery.got = delivery.everyone if everyone else [*map(is_not, grads, NONES)]
            buffer_bytes, scratch_bytes = reduction.nbytes
            gradients.state = PENDING
            ledger.reducing += buffer_bytes
            if log.expected == REDUCE | one.index << VERB_BITS:  # as `Position.issue`
                RANK.record(log.expected + next(position.turns))
                log.expected = next(log.ahead, NOTHING)
            else:
                position.issue(REDUCE, one.index)
            starts: Iterable[Any] = map(call, reduction.starts)
            *_, gradients.pending = starts
        ledger.reducing = reducing = ledger.reducing + scratch_bytes
        if ledger.gathered + reducing > ledger.peak:
            ledger.note()
        gradients.state, gradients.running = REDUCING, reduction.planned
        position.reduced = True
        in_flight.append((self, one, reduction))
        self._use.reduced.add(one.index)

    def _arrives(self, ledger: Ledger, reduction: UsualReduction) -> bool:
        """Deliver what `reduce` started; False where gradients are to be added, or some have none."""
        gradients, delivery = reduction.gradients, reduction.delivery
        if (
            gradients.running is not reduction.planned
            or delivery.got is not delivery.everyone
            or delivery.set is not reduction.set
            or stream.listeners
            or not all(map(is_, map(read_grad, reduction.sharded), NONES))
        ):
            return False
        views: Any = delivery.views and [*map(_TENSOR, delivery.views)]
        if views and (any(map(is_, views, NONES)) or not all(map(is_, map(read_grad, views), NONES))):
            return False
        if reduction.takes:
            drain(map(call, reduction.takes))
        pending: Any = gradients.pending
        gradients.pending = gradients.running = None
        pending.wait()
        drain(map(call, reduction.ends))
        ledger.reducing -= sum(reduction.nbytes)
        drain(map(write_grad, reduction.receivers, reduction.received))
        current: Any = reduction.set
        if views:
            drain(map(write_grad, views, current.views))
            for view in delivery.views:
                view.adopted, view.cleared = None, False
        current.shown, delivery.used, delivery.got = [*delivery.everyone], delivery.everyone, delivery.nobody
        gradients.state = NONE
        return True

    def take_part(self, one: Reducible) -> None:
        """Reduce a unit, with zeros where it has no gradients."""
        unit, settings, index, in_flight = one.unit, one.settings, one.index, self.in_flight
        every, ledger, rules = unit.gradients, unit.ledger, settings.reduce
        if self.owed:
            self.owed.pop(index, None)
        while len(in_flight) >= rules.max_in_flight:
            self._advance()
        if REDUCING in map(_STATE, every):
            self._finish_own(one)
        if settings.share is not None:
            settings.share.apply(unit)
        for gradients in every:  # all trainable buckets of a unit are reduced once one is: other ranks may have some
            if (gradients.state is NONE and gradients.bucket.trains) or gradients.waiting():
                gradients.collect(ledger)
        if stream.listeners:
            unit.emit("collect", sum([gradients.live_bytes for gradients in every]))
        self.position.issue(REDUCE, index)
        self.position.reduced = True
        for gradients in every:
            if gradients.state is PENDING:
                gradients.issue_reduce(settings.comm, rules, self._tokens, unit.name)
                if scratch := gradients.running.scratch:
                    ledger.reducing += scratch
                    ledger.note()
        if stream.listeners:
            unit.emit("reduce", sum([gradients.buffer_bytes for gradients in every if gradients.state is REDUCING]))
        in_flight.append((self, one, None))
        self._use.reduced.add(index)
        plan_usual_reduction(one)

    def _advance(self) -> None:
        """Finish the oldest reduction over the shard axis; those over the replicate axis go on beside what follows.

        As many of these as there are shards, whose slices are no longer than one buffer together: an all-reduce between
        machines may take longer than the backward of a unit.
        """
        owner, one, reduction = self.in_flight.popleft()
        if reduction is not None and not reduction.replicates and owner._arrives(one.unit.ledger, reduction):
            return
        if not any(map(_REPLICATE, one.unit.buckets)):
            owner._deliver(one)
            return
        all_reduce = one.settings.reduce.all_reduce
        if not all_reduce:
            owner._kept_apart = True
        owner._replicate(one, all_reduce)
        owner._replicating.append(one)
        while len(owner._replicating) > min(map(_SHARDS, one.unit.buckets)):
            owner._deliver(owner._replicating.popleft())

    def _replicate(self, one: Reducible, all_reduce: bool) -> None:
        """Wait for the shard axis, give the buffers back, and start reducing over the replicate axis.

        Args:
            all_reduce: False keeps the slice reduced over the shard axis only, to be added to the next one.
        """
        unit = one.unit
        for gradients in unit.gradients:
            if gradients.state is not REDUCING:
                continue
            unit.ledger.reducing -= gradients.wait(unit.name)
            if gradients.bucket.axes.replicate is None:
                continue
            if not all_reduce:
                unit.ledger.reducing -= gradients.running.scratch
                gradients.keep_partial()
                continue
            act = partial(gradients.replicate, one.settings.comm)
            nbytes = act() if not recording() else in_range("all_reduce", unit.name, act)
            if stream.listeners:
                unit.emit("all_reduce", nbytes)

    def _finish_own(self, one: Reducible) -> None:
        """Deliver what is in flight of a unit, so that its buffer is free."""
        while any(flying is one for _, flying, _ in self.in_flight):
            self._advance()
        while one in self._replicating:
            self._deliver(self._replicating.popleft())

    def _set_aside(self, one: Reducible) -> None:
        """Collect a unit's gradients, to be reduced with those of a later backward."""
        self._finish_own(one)
        if one.settings.share is not None:
            one.settings.share.apply(one.unit)
        unit = one.unit
        for gradients in unit.gradients:
            if gradients.waiting():
                gradients.collect(unit.ledger)
            gradients.delivery.show_kept()
        if stream.listeners:
            unit.emit("collect", sum([gradients.live_bytes for gradients in unit.gradients]))

    def _deliver(self, one: Reducible) -> None:
        """Wait for what is in flight of a unit, deliver it into `.grad`, and run hooks."""
        unit, rules = one.unit, one.settings.reduce
        ledger = unit.ledger
        given: list[torch.Tensor] = []
        for gradients in unit.gradients:
            if gradients.state is REDUCING:
                running = gradients.running
                if gradients.pending is not None:
                    ledger.reducing -= gradients.wait(unit.name)
                if rules.hook is not None:
                    rules.hook(running.out)
                given += gradients.deliver(rules.fill_unused)
                if running.scratch:
                    ledger.reducing -= running.scratch
        if stream.listeners:
            unit.emit("reduced", sum([gradients.buffer_bytes for gradients in unit.gradients]))
        if given:
            self._run_hooks(given)

    def _run_hooks(self, given: Sequence[torch.Tensor]) -> None:
        """Post-accumulate hooks that users put on sharded parameters and views, and optimizers that they attached.

        Hooks run on every rank alike: one that holds nothing of a parameter shows them an empty gradient.
        """
        for parameter in given:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            attached = attached_to(parameter)
            if hooks or attached:
                self.settle()
                with torch._C._EnableTorchFunction():
                    for hook in list(hooks.values()) if hooks else ():
                        with shown_empty(parameter):
                            hook(parameter)
                    if attached and read_grad(parameter) is not None:
                        step_attached(parameter)

    def end(self) -> None:
        """The backward is over: reduce what is left in order, wait for everything, agree on what was used."""
        self.reduce_rest()
        self.finish()

    def _owe_partial(self) -> None:
        """Let what was reduced over the shard axis only take part in a reduction now: its unit may not have run."""
        self._kept_apart = False
        for one in self.units:
            if any([gradients.partial is not None for gradients in one.unit.gradients]):
                if one.settings.reduce.all_reduce and one.index not in self._use.reduced:  # else it does already
                    self.owed[one.index] = one
                self._kept_apart = True

    def reduce_rest(self) -> None:
        """Start what is left to reduce, in order."""
        if self._kept_apart:
            self._owe_partial()
        with plain_access(), torch.no_grad():
            for one in self.units if self._some_left() else ():
                rules, late = one.settings.reduce, has_gradients(one.unit.gradients)
                due = late or one.index in self.owed
                if rules.fill_unused and one.index not in self._use.reduced:
                    due = due or True in map(_TRAINS, one.unit.buckets)
                if due and rules.sync:
                    if self._in_step is not None:
                        self._in_step.come_to(REDUCE, one.index)
                    self.take_part(one)
                elif late:
                    self._set_aside(one)
            if self._in_step is not None:
                self._in_step.come_to(END, 0)

    def _some_left(self) -> bool:
        """Whether any unit may have gradients left: asked of all of them at once, in C."""
        if self.owed or True in map(_FILLS, self.units):
            return True
        every = list(chain.from_iterable(map(_GRADIENTS, self.units)))
        unsharded = [*map(_UNSHARDED, every)]
        if PENDING in map(_STATE, every) or [] in unsharded:  # empty where they were not listed since they were made
            return True
        return not all(map(is_, map(read_grad, chain.from_iterable(unsharded)), NONES))

    def finish(self) -> None:
        """Wait for everything, and agree on what was used."""
        with plain_access(), torch.no_grad():
            while self.in_flight:
                self._advance()
            while self._replicating:
                self._deliver(self._replicating.popleft())
            drain(map(_TAKE, map(_TURNS, self._buckets())))  # gradients are the caller's stream's from now on
            self.settle()
            given = self._use.agree(self._unit_list)
        self._run_hooks(given)
        if self._tokens is not None:
            self._tokens.left -= 1
            self._tokens = None

    def settle(self) -> None:
        """The host waits for what crosses between its memory and the device; see `Home.settle`."""
        homes = list(filter(None, map(_HOME, self._buckets())))
        if homes:
            with plain_access(), torch.no_grad():
                settle(homes)

    def _buckets(self) -> Iterator[Bucket]:
        return chain.from_iterable(map(_BUCKETS, self.units))

    def share(self, in_flight: InFlight) -> None:
        """Use `in_flight` from now on, together with other roots."""
        if in_flight is not self.in_flight:
            with plain_access(), torch.no_grad():
                while self.in_flight:
                    self._advance()
            self.in_flight = in_flight

    def reset(self) -> None:
        """After an exception: nothing is in flight, and nobody is expected."""
        for entry in [entry for entry in self.in_flight if entry[0] is self]:  # not those of roots that share it
            self.in_flight.remove(entry)
        self._replicating.clear()
        self.owed.clear()
        self._use.reset()
        self._tokens = None
        if self.in_flight.finalizing is self:
            self.in_flight.finalizing = None
