"""Reductions of the units under one root: in an order that all ranks share, a bounded number at once.

Units close in the order of the trace (`trace.py`), which is the same on every rank, and are reduced as they close, with
zeros if this rank has no gradients for them. Units that the backward will reach again are reduced when it ends.

At the end of a backward the ranks exchange which parameters had gradients (`agreement/use.py`): a parameter that any
rank used has a `.grad` on all, one that no rank used has none, and optimizer state is the same everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter, call, is_, is_not, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from ..agreement import NOTHING, Position, SharedOrder, UseAgreement
from ..comm import Comm
from ..containers import NONES, drain
from ..events import stream
from ..shard import (
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
from .usual import GRADIENTS, REDUCES, UsualReduction, plan_usual_reduction

if TYPE_CHECKING:
    from .runner import Runner


class InFlight(deque[tuple["Reducer", "Runner", UsualReduction | None]]):
    """Reductions over the shard axis, oldest first; each holds one buffer. Roots may share it (`share_comm_ctx`).

    Entries: the reducer, the unit's runner, and the `UsualReduction` that started it, or None.

    Attributes:
        finalizing: the reducer whose reductions wait for a `GradientReductionHandle`; no other may run until then.
    """

    finalizing: Reducer | None = None


_TRAINS = attrgetter("trains")
_STATE, _GRADIENTS, _UNSHARDED = attrgetter("state"), attrgetter("unit.gradients"), attrgetter("bucket.unsharded")
NONE, PENDING, REDUCING = GradState
_FILLS = attrgetter("settings.reduce.fill_unused")
_REPLICATE, _SHARDS = attrgetter("axes.replicate"), attrgetter("axes.shard.size")
_SHARDED, _HOME = attrgetter("sharded"), attrgetter("home")
_VIEWS, _TENSOR = attrgetter("delivery.views"), attrgetter("tensor")
_EXISTS = partial(is_not, None)
_TURNS, _TAKE = attrgetter("turns"), methodcaller("take")
_GO_ON = methodcaller("go_on")


class Reducer:
    """See the module's docstring. Owns no tensors.

    Args:
        comm: the collectives through which ranks agree.
        in_flight: the queue of reductions, if it is shared with other roots.

    Attributes:
        owed: by index, units that were closed and not reduced since.
        usual: whether reductions start and end the usual way in the current backward.
    """

    def __init__(self, comm: Comm, in_flight: InFlight | None = None) -> None:
        self.comm = comm
        self.in_flight = InFlight() if in_flight is None else in_flight
        self._replicating: deque[Runner] = deque()  # being reduced over the replicate axis, oldest first; slices only
        self.owed: dict[int, Runner] = {}
        self._tokens: TokenCount | None = None  # by which the current backward divides
        self._may_have_partial = False  # whether some gradients may be reduced over the shard axis only
        self._packs = False  # whether any all-reduce over the replicate axis was packed
        self.usual = False

    def serve(self, units: Sequence[Runner], position: Position, in_step: SharedOrder | None = None) -> None:
        """Reduce these units from now on. Call between backwards.

        Args:
            units: all units under the root.
            position: notified of each reduction before it is issued.
            in_step: consulted before each reduction, if ranks share an order of units.
        """
        self.units, self.position, self._in_step = units, position, in_step
        self._unit_list = [runner.unit for runner in units]
        self._buckets = [bucket for unit in self._unit_list for bucket in unit.buckets]
        self._use = UseAgreement(self.comm, position)

    @property
    def is_idle(self) -> bool:
        """Whether no unit waits to be reduced."""
        return not (self.owed or self._may_have_partial or self.in_flight or self._replicating)

    def begin(self, rules: ReduceSettings) -> None:
        """Begin a backward.

        Args:
            rules: the root's settings.

        Raises:
            UsageError: `reduction="tokens"`, and there is no token count for this backward.
        """
        self._use.begin(self._unit_list)
        sharded = [*map(_SHARDED, self._buckets)]
        with plain_access():  # an empty list in `sharded`: a bucket whose parameters are not listed yet
            views = chain.from_iterable(map(_VIEWS, chain.from_iterable(map(_GRADIENTS, self.units))))
            hooked = [] in sharded or sees_gradients([*chain(*sharded, filter(_EXISTS, map(_TENSOR, views)))])
        self.usual = not hooked and self._in_step is None
        if rules.reduction == "tokens":
            if rules.tokens is None or not rules.tokens.left:
                raise tokens_not_counted(None if rules.tokens is None else rules.tokens.backwards)
            self._tokens = rules.tokens

    def changed(self, runner: Runner) -> None:
        """Note that a unit's weights changed between a forward and its backward, which runs now."""
        self._use.note_changed(runner.index)

    def close(self, runner: Runner, reduction: UsualReduction | None, comes_again: bool) -> None:
        """Reduce or set aside a unit's gradients at the end of its backward for one call: if possible, as last time.

        Args:
            runner: the unit's runner.
            reduction: the unit's usual reduction; None: unknown.
            comes_again: whether more gradients of the unit are expected.
        """
        if (
            reduction is None
            or comes_again
            or (REDUCES(runner), [*map(GRADIENTS, reduction.every)]) != reduction.before
            or reduction.set.storage.nbytes()  # was not released: somebody else may hold it, or a `.grad` shows it
        ):
            self._close(runner, comes_again)
            return
        in_flight, position = self.in_flight, self.position
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
                runner.unit.ledger.reduce(-reduction.buffer.nbytes)
                raise
            drain(map(write_grad, unsharded, NONES))
            delivery.got = delivery.everyone if everyone else [*map(is_not, grads, NONES)]
            gradients.state = PENDING
            if log.expected == REDUCE | runner.index << VERB_BITS:  # as `Position.issue`
                RANK.record(log.expected + next(position.turns))
                log.expected = next(log.ahead, NOTHING)
            else:
                position.issue(REDUCE, runner.index)
            try:
                *_, gradients.pending = map(call, reduction.starts)
            except BaseException:
                runner.unit.ledger.reduce(-reduction.scratch)
                raise
        gradients.state, gradients.running = REDUCING, reduction.planned
        in_flight.append((self, runner, reduction))
        self._use.reduced.add(runner.index)

    def _close(self, runner: Runner, comes_again: bool) -> None:
        """The rest of `close`: when the unit is not reduced as last time."""
        unit = runner.unit
        if True not in map(_TRAINS, unit.buckets) and not has_gradients(unit.gradients):
            return
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                self._close(runner, comes_again)
            return
        with plain_access():
            if not runner.settings.reduce.sync:
                self.owed[runner.index] = runner
                self._set_aside(runner)
            elif not comes_again and self._in_step is None:
                self.take_part(runner)
            else:  # reduced once all ranks have all of its gradients
                self.owed[runner.index] = runner

    def _arrives(self, reduction: UsualReduction) -> bool:
        """Deliver a reduction that started as the last one; return False, with nothing done, if it is not usual."""
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
        drain(map(write_grad, reduction.receivers, reduction.received))
        current: Any = reduction.set
        if views:
            drain(map(write_grad, views, current.views))
            for view in delivery.views:
                view.adopted, view.cleared = None, False
        current.shown, delivery.used, delivery.got = [*delivery.everyone], delivery.everyone, delivery.nobody
        gradients.state = NONE
        return True

    def take_part(self, runner: Runner) -> None:
        """Reduce a unit, with zeros where it has no gradients."""
        unit, settings, index, in_flight = runner.unit, runner.settings, runner.index, self.in_flight
        unit_gradients, ledger, rules = unit.gradients, unit.ledger, settings.reduce
        if self.owed:
            self.owed.pop(index, None)
        while len(in_flight) >= rules.max_in_flight:
            self._advance()
        if REDUCING in map(_STATE, unit_gradients):
            self._finish_unit(runner)
        if settings.share is not None:
            settings.share.apply(unit)
        for (
            gradients
        ) in unit_gradients:  # all trainable buckets of a unit are reduced once one is: other ranks may have some
            if (gradients.state is NONE and gradients.bucket.trains) or gradients.waiting():
                gradients.collect(ledger)
        if stream.listeners:
            unit.emit("collect", sum([gradients.live_bytes for gradients in unit_gradients]))
        self.position.issue(REDUCE, index)
        for gradients in unit_gradients:
            if gradients.state is PENDING:
                gradients.issue_reduce(settings.comm, rules, self._tokens, unit.name)
                if scratch := gradients.running.scratch:
                    ledger.reduce(scratch)
        if stream.listeners:
            unit.emit("reduce", _sent_bytes(unit))
        in_flight.append((self, runner, None))
        self._use.reduced.add(index)
        plan_usual_reduction(runner)

    def _advance(self) -> None:
        """Finish the oldest reduction over the shard axis; those over the replicate axis go on beside what follows.

        Up to one of these per shard may be in flight, whose slices together are no longer than one buffer: an
        all-reduce between machines may take longer than the backward of a unit.
        """
        owner, runner, reduction = self.in_flight.popleft()
        if reduction is not None and not reduction.replicates and owner._arrives(reduction):
            return
        if not any(map(_REPLICATE, runner.unit.buckets)):
            owner._deliver(runner)
            return
        all_reduce = runner.settings.reduce.all_reduce
        if not all_reduce:
            owner._may_have_partial = True
        owner._replicate(runner, all_reduce)
        owner._replicating.append(runner)
        replicating, most = owner._replicating, min(map(_SHARDS, runner.unit.buckets))
        if owner._packs:
            # The first of the two collectives of a packed all-reduce has half of the time in which both may run.
            for earlier in islice(replicating, max(len(replicating) - max(most // 2, 1), 0)):
                drain(map(_GO_ON, earlier.unit.gradients))
        while len(replicating) > most:
            owner._deliver(replicating.popleft())

    def _replicate(self, runner: Runner, all_reduce: bool) -> None:
        """Wait for the shard axis, release the buffers, and start reducing over the replicate axis.

        Args:
            runner: the unit's runner.
            all_reduce: False keeps the slice, reduced over the shard axis only, to add it to the next one.
        """
        unit = runner.unit
        if stream.listeners:
            self._tell_wait(unit)
        for gradients in unit.gradients:
            if gradients.state is not REDUCING:
                continue
            unit.ledger.reduce(-gradients.wait(unit.name))
            if gradients.bucket.axes.replicate is None:
                continue
            if not all_reduce:
                unit.ledger.reduce(-gradients.running.scratch)
                gradients.keep_partial()
                continue
            between = in_range("all_reduce", unit.name, gradients.replicate) if recording() else gradients.replicate()
            if between:
                unit.ledger.reduce(between)
                self._packs = True
            if stream.listeners:
                unit.emit("all_reduce", gradients.running.replicated_bytes)

    @staticmethod
    def _tell_wait(unit: Unit) -> None:
        """Emit that the unit's collectives in flight are waited for."""
        if any([gradients.pending is not None for gradients in unit.gradients]):
            unit.emit("wait_reduce", _sent_bytes(unit))

    def _finish_unit(self, runner: Runner) -> None:
        """Deliver a unit's reductions in flight, so that its buffer is free."""
        while any(flying is runner for _, flying, _ in self.in_flight):
            self._advance()
        while runner in self._replicating:
            self._deliver(self._replicating.popleft())

    def _set_aside(self, runner: Runner) -> None:
        """Collect a unit's gradients, to reduce them with those of a later backward."""
        self._finish_unit(runner)
        if runner.settings.share is not None:
            runner.settings.share.apply(runner.unit)
        unit = runner.unit
        for gradients in unit.gradients:
            if gradients.waiting():
                gradients.collect(unit.ledger)
            gradients.delivery.show_kept()
        if stream.listeners:
            unit.emit("collect", sum([gradients.live_bytes for gradients in unit.gradients]))

    def _deliver(self, runner: Runner) -> None:
        """Wait for a unit's reductions in flight, deliver them into `.grad`, and run hooks."""
        unit, rules = runner.unit, runner.settings.reduce
        ledger = unit.ledger
        receivers: list[torch.Tensor] = []
        if stream.listeners:
            self._tell_wait(unit)
        for gradients in unit.gradients:
            if gradients.state is REDUCING:
                running = gradients.running
                if gradients.pending is not None and (released := gradients.wait(unit.name)):
                    ledger.reduce(-released)
                if rules.hook is not None:
                    rules.hook(running.out)
                receivers += gradients.deliver(rules.fill_unused)
                if running.scratch:
                    ledger.reduce(-running.scratch)
        if stream.listeners:
            unit.emit("reduced", _sent_bytes(unit))
        if receivers:
            self._run_hooks(receivers)

    def _run_hooks(self, receivers: Sequence[torch.Tensor]) -> None:
        """Run users' post-accumulate hooks on sharded parameters and views, and step attached optimizers.

        Hooks run on every rank: a rank with no part of a parameter shows them an empty gradient.
        """
        for parameter in receivers:
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
        """End a backward: reduce the remaining gradients in order, wait for all, agree on used parameters."""
        self.reduce_rest()
        self.finish()

    def _owe_partial(self) -> None:
        """Owe a reduction to units with gradients reduced over the shard axis only: they may not have run."""
        self._may_have_partial = False
        for runner in self.units:
            if any([gradients.partial is not None for gradients in runner.unit.gradients]):
                # a unit in `reduced` has taken part already
                if runner.settings.reduce.all_reduce and runner.index not in self._use.reduced:
                    self.owed[runner.index] = runner
                self._may_have_partial = True

    def reduce_rest(self) -> None:
        """Start the remaining reductions, in order."""
        if self._may_have_partial:
            self._owe_partial()
        with plain_access(), torch.no_grad():
            for runner in self.units if self._some_left() else ():
                rules, late = runner.settings.reduce, has_gradients(runner.unit.gradients)
                due = late or runner.index in self.owed
                if rules.fill_unused and runner.index not in self._use.reduced:
                    due = due or True in map(_TRAINS, runner.unit.buckets)
                if due and rules.sync:
                    if self._in_step is not None:
                        self._in_step.come_to(REDUCE, runner.index)
                    self.take_part(runner)
                elif late:
                    self._set_aside(runner)
            if self._in_step is not None:
                self._in_step.come_to(END, 0)

    def _some_left(self) -> bool:
        """Whether any unit may have gradients left; checks all units at once, in C."""
        if self.owed or True in map(_FILLS, self.units):
            return True
        unit_gradients = list(chain.from_iterable(map(_GRADIENTS, self.units)))
        unsharded = [*map(_UNSHARDED, unit_gradients)]
        if PENDING in map(_STATE, unit_gradients) or [] in unsharded:  # empty: not listed since they were created
            return True
        return not all(map(is_, map(read_grad, chain.from_iterable(unsharded)), NONES))

    def finish(self) -> None:
        """Wait for all reductions, and agree on which parameters were used."""
        with plain_access(), torch.no_grad():
            while self.in_flight:
                self._advance()
            while self._replicating:
                self._deliver(self._replicating.popleft())
            drain(map(_TAKE, map(_TURNS, self._buckets)))  # from now on gradients belong to the caller's stream
            self.settle()
            receivers = self._use.agree(self._unit_list)
        self._run_hooks(receivers)
        if self._tokens is not None:
            self._tokens.left -= 1
            self._tokens = None

    def settle(self) -> None:
        """Wait on the host for copies between host and device; see `Home.settle`."""
        homes = list(filter(None, map(_HOME, self._buckets)))
        if homes:
            with plain_access(), torch.no_grad():
                settle(homes)

    def share(self, in_flight: InFlight) -> None:
        """Use `in_flight`, which is shared with other roots, from now on."""
        if in_flight is not self.in_flight:
            with plain_access(), torch.no_grad():
                while self.in_flight:
                    self._advance()
            self.in_flight = in_flight

    def reset(self) -> None:
        """Reset after an exception: nothing is in flight, and no unit is owed."""
        for entry in [
            entry for entry in self.in_flight if entry[0] is self
        ]:  # not the entries of other roots that share it
            self.in_flight.remove(entry)
        self._replicating.clear()
        self.owed.clear()
        self._use.reset()
        self._tokens = None
        if self.in_flight.finalizing is self:
            self.in_flight.finalizing = None


def _sent_bytes(unit: Unit) -> int:
    """Bytes of all ranks' slices together, as the unit's reductions send them."""
    buffers = [gradients.buffer for gradients in unit.gradients if gradients.bucket.trains]
    return sum([buffer.sent_bytes for buffer in buffers if buffer is not None])
