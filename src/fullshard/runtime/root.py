"""State shared by the units under one root: the position in a pass, reductions in flight, and the ends of passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count, repeat, takewhile
from operator import attrgetter, is_not, or_
from threading import get_ident
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from ..agreement import LEAVE, Every, FirstPass, Position, SharedOrder, Stale
from ..comm import Comm, has_streams
from ..errors import DivergenceError, PhaseError
from ..events import Ledger, stream
from ..shard import State, When, ask, has_gradient
from ..text import plain_class
from ..torch_private.autograd_task import BackwardEnd
from ..torch_private.local_tensor import plain_access
from ..torch_private.profiler import recording
from ..watcher import BACKWARD, CHECK, FORWARD, GATHER, REDUCE, REGATHER, VERB_BITS
from .additions import Additions
from .attached import check_units as check_attached_units
from .inputs import Inputs
from .kept_graph import refuse_second_derivatives
from .messages import backward_while_summoned, called_by_itself, not_waited_for, other_root_runs
from .phases import Happening, Phase
from .reducer import Reducer
from .trace import Period, Step, Traces

if TYPE_CHECKING:
    from .runner import Runner

ROOTS: weakref.WeakValueDictionary[int, Root] = weakref.WeakValueDictionary()
"""All roots alive in this process, by id."""


_STATE, _PHASE, _KEPT_AXIS = attrgetter("unit.state"), attrgetter("phase"), attrgetter("kept_axis")
_SUMMONED, _BUCKETS, _TRAINS = attrgetter("showing.summoned"), attrgetter("buckets"), attrgetter("trains")
SHARDED = State.SHARDED
_SHARDED, _IDLE = repeat(SHARDED), repeat(Phase.IDLE)


def all_roots() -> list[Root]:
    """Return the roots alive now; other threads may create roots meanwhile."""
    return [root for reference in ROOTS.valuerefs() if (root := reference()) is not None]


def _name_of_model(top: Runner) -> str:
    """The root module's class name, numbered if another live root has the same name."""
    kind = plain_class(top.modules[0]).__name__ if top.modules else ""
    taken = {root.ledger.model for root in all_roots()}
    return next(name for name in chain([kind], map(f"{kind} {{}}".format, count(2))) if name not in taken)


def _weakly(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Wrap a bound `method` without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def called(verb: int, index: int) -> None:
        if (bound := reference()) is not None:
            bound(verb, index)

    return called


class Root:
    """The context of one root unit and all units below it. Created at the first forward.

    Owns no tensors, and knows nothing of a unit's settings. Two roots may share units (a second model made of the same
    parts): a shared unit belongs to the root that runs, and must be idle to change roots.

    Args:
        top: the unit whose forward was called first.
        units: all units under it, `top` included, in module order.
        comm: the collectives with which ranks are compared; units have their own.
        additions: finds parameters added to the root's modules later.

    Attributes:
        pass_top: the unit whose forward began the current pass.
        pass_grad: whether that pass builds a graph.
        inputs, called: of the root's last forward that built one, and what is compared to notice others: shapes and
            dtypes, then names of keywords; None before the first.
        backward: the current backward, or the last one if it was broken off.
        guide: accompanies passes: with comparisons between ranks, or with the order of units that ranks share.
        stale: finds units that stayed gathered although their weights changed.
        traces: of the passes that a backward may still reach.
        ahead: units gathered ahead in the current pass and not opened yet, by index; the value is whether they were
            gathered because they are known to come next.
        recomputed: the last recomputed unit; its backward comes next.
        usual_forward: None, or, in a pass with no comparison of ranks and no profiler's range, whether it builds a
            graph: units may then be opened and closed the usual way; see `step.py`.
        usual_backward: whether such a backward is running, without `create_graph`.
        position: compares what is issued next with the other ranks.
        reducer: reduces gradients.
        finalizing: handle of the finalization in flight; see `reduce_kept.py`.
        unfinalized: whether a backward ran that `finalize_backward` must follow.
        adds: whether there were gradients before the first of those backwards.
    """

    stream = stream  # `usual.py` compares, among others, its listeners

    def __init__(
        self,
        top: Runner,
        units: list[Runner],
        comm: Comm,
        additions: Additions,
    ) -> None:
        self.top, self.units, self.comm, self.additions = top, units, comm, additions
        self.ledger = Ledger(model=_name_of_model(top))
        self.pass_top: Runner | None = None
        self.pass_grad = False
        self.inputs: Inputs | None = None
        self.called: Any = None
        self.traces = Traces()
        self.ahead: dict[int, bool] = {}
        self.recomputed: Runner | None = None
        self.reducer = Reducer(comm, top.settings.in_flight)
        self.usual_forward: bool | None = None
        self.usual_backward = False
        self._list_units()
        self._thread = get_ident()  # the last forward's thread
        self.finalizing: object = None
        self.unfinalized = False
        self.adds = False
        self.backward: BackwardEnd | None = None
        self._lent = True  # whether units may belong to another root now
        ROOTS[id(self)] = self

    def _list_units(self) -> None:
        """Create everything that depends on the list of units, with no knowledge of how they run."""
        units, names, settings = self.units, [runner.unit.name for runner in self.units], self.top.settings
        check, unused = settings.check, settings.unused
        every = self._every = check == "every"
        self._unit_list = [runner.unit for runner in units]
        self.position = (Every if every else Position)(self._unit_list, names, self.comm, check, unused)
        self.guide: FirstPass | SharedOrder = FirstPass(self._unit_list, self.comm)
        if unused == "zeros" and self.position.axes is not None:
            over, part = _weakly(self.pass_over), _weakly(self.take_part)
            self.guide = SharedOrder(self.position.axes, names, self.comm, every, over, part)
        self.stale = Stale(self._unit_list, self.comm)
        self.reducer.serve(units, self.position, self.guide.in_step)

    def take_in(self, added: list[Runner]) -> None:
        """Take in units that were sharded below the root later. Call between passes.

        Drops units whose modules are gone, unless a backward may follow, which refers to units by index.
        """
        step = self.position.step
        if self.traces.are_none and self.reducer.is_idle:
            for runner in [runner for runner in self.units if not runner.modules]:
                runner.happens(Happening.RESHARD)
                runner.root = runner.unit.usual = None
            self.units = [runner for runner in self.units if runner.modules]
            for index, runner in enumerate(self.units):
                runner.index = index
        self.units = [*self.units, *added]
        self._list_units()
        self.position.step, self._lent = step, True

    def take_units(self) -> None:
        """Make all units this root's, whichever root had them.

        Raises:
            PhaseError: the root that has a unit is running, or the unit became a root.
        """
        for runner, name in zip(self.units, self.position.names, strict=True):
            if runner.root is not None and runner.root is not self:
                runner.root.lend(runner, name)
        for index, runner in enumerate(self.units):
            if runner.root is not self:
                runner.root, runner.is_top, runner.index = self, runner is self.top, index
                runner.unit.name = self.position.names[index]
                runner.unit.join_ledger(self.ledger)
        self._lent = False

    def reclaimed(self, runner: Runner) -> Root | None:
        """Take back a unit that this root ran and whose backward comes now; return this root, or None if it is gone.

        Raises:
            PhaseError: the unit belongs to a different root now, and that root is running.
        """
        if runner.root is not self:
            self.take_units()
        return self if runner.root is self else None

    def lend(self, runner: Runner, name: str) -> None:
        """Free a unit and lend it to a different root; it comes back when this root runs.

        Args:
            runner: the unit's runner.
            name: the unit's name, from the other root.

        Raises:
            PhaseError: this root is running, or the unit is this root's own.
        """
        self.recover_if_broken()
        if self.top is runner:
            raise called_by_itself(name)
        if self.pass_top is not None or self.backward is not None:
            raise other_root_runs(name)
        runner.happens(Happening.RESHARD)
        runner.unit.leave_ledger()
        self._lent = True

    # Forward.

    def begin_forward(self, top: Runner) -> None:
        """Begin a pass: a unit's forward, usually the root's, was called from outside any pass."""
        self.recover_if_broken()
        self._thread = get_ident()
        self.refuse_while_finalizing()
        if self._lent:
            self.take_units()
        top.before_pass()
        ask(When.REST, self._unit_list)
        self.position.compare_sizes()
        if self.additions.changed:
            self.top.find_root(self.top)
        self.additions.check()
        with_grad = torch.is_grad_enabled()
        kind = 2 * top.index + with_grad
        first = (FORWARD | kind << VERB_BITS) not in self.position.log.complete
        if first and with_grad:
            check_attached_units(self._unit_list)
        gathered = self._gathered()
        self.pass_top, self.pass_grad = top, with_grad  # an exception from here on breaks the pass off
        self.position.begin(FORWARD, kind, (CHECK, gathered) if gathered else gathered)
        for unit in self._unit_list if any(map(_KEPT_AXIS, self._unit_list)) else ():
            unit.drop_kept()
        if gathered:
            self._drop_stale()
            self.position.log.turn(self._gathered())
        self.stale.begin(self._unit_list)
        self.position.compares = not first
        self.ahead.clear()
        self.guide.begin(kind, first)
        if with_grad:
            self.traces.begin(weakref.ref(self))
        if not self.guide.active and not self._every and not recording():
            self.usual_forward = with_grad

    def pass_over(self, verb: int, index: int) -> None:
        """Enter or leave a unit that only other ranks run: this rank takes part in its collectives without using it."""
        self.units[index].happens(Happening.LEAVE if verb == LEAVE else Happening.ENTER)

    def _gathered(self) -> bytes:
        """One byte per unit: whether it is gathered or gathering; empty if none is."""
        flags = bytes(map(is_not, map(_STATE, self.units), repeat(SHARDED)))
        return flags if any(flags) else b""

    def _drop_stale(self) -> None:
        """Free units that stayed gathered although their shards changed on any rank; see `Stale`. Collective.

        Raises:
            PhaseError: gathered memory was written to, through an unsharded parameter.
        """
        gathered = [runner for runner in self.units if runner.unit.buckets and runner.unit.state is not SHARDED]
        if not gathered:
            return
        self.position.issue(CHECK, gathered[0].index)
        units = [runner.unit for runner in gathered]
        with plain_access():
            changes = self.stale.changes(units)
        wrong: PhaseError | None = None
        for unit, (changed, written) in zip(units, changes, strict=True):
            if changed:
                unit.reshard()
                wrong = wrong or (unit.written_error(written) if written else None)
            else:
                unit.note_gathered()
        if wrong is not None:
            raise wrong

    def end_forward(self) -> None:
        """End a forward pass: its order is known now, and units prefetched in vain are freed."""
        self.guide.end()
        self.position.end()
        self._settle()

    def break_forward(self, error: BaseException) -> None:
        """End a forward pass that an exception broke off.

        Other ranks may have completed theirs, if it was raised after the last gather: this rank keeps gathered whatever
        they keep.
        """
        self.guide.stop()
        self.position.lose()
        self.stale.forget()
        for runner in self.units if not isinstance(error, DivergenceError) else ():
            if runner.unit.state is State.GATHERING and not runner.reshards(self.pass_grad):
                runner.unit.finish_gather()
        self._settle()

    @staticmethod
    def _open_among(units: Sequence[Runner]) -> Iterable[Runner]:
        """Units that are not `IDLE`, or not sharded: compared in C, each when it is reached."""
        busy = map(is_not, map(_PHASE, units), _IDLE)
        return compress(units, map(or_, busy, map(is_not, map(_STATE, units), _SHARDED)))

    def _settle(self) -> None:
        self.usual_forward = None
        for runner in self._open_among(self.units):
            runner.happens(Happening.PASS_END)
        self.reducer.settle()
        self.ledger.settle()
        self.pass_top = self.traces.current = None

    # Backward.

    @property
    def in_backward(self) -> bool:
        """Whether a backward through this root is running, and the caller is part of it."""
        return self.backward is not None and self.backward.running()

    def begin_backward(self) -> None:
        """Begin a backward: its first gradient reached a unit.

        Raises:
            UsageError: a unit is inside `summon_full_params`, where gradients would not be reduced; or
                `reduction="tokens"`, and no token count is left.
        """
        self.recover_if_broken()
        settings = self.top.settings
        self.refuse_while_finalizing()
        if settings.manual_finalization and not self.unfinalized:
            self.unfinalized = True
            self.adds = any([has_gradient(member) for runner in self.units for member in runner.unit.members])
        if True in map(_SUMMONED, self._unit_list):
            raise backward_while_summoned()
        self.reducer.begin(settings.reduce)
        if self._lent:
            self.take_units()
        ask(When.BACKWARD, self._unit_list)  # `requires_grad` may have changed since the forward
        self.position.compare_sizes()
        # On a device autograd calls hooks on its own thread.
        self.backward = BackwardEnd(
            self.end_backward, self._thread if has_streams(settings.axes.device) else get_ident()
        )
        self.ahead.clear()
        # A backward that reduces other buckets, since `requires_grad` changed, is of a different kind.
        trains = crc32(bytes(map(_TRAINS, chain.from_iterable(map(_BUCKETS, self._unit_list)))))
        self.position.begin(BACKWARD, settings.reduce.sync | trains << 1, self._gathered())
        self.usual_forward = None
        self.usual_backward = (
            self.guide.in_step is None and not self._every and not recording() and not torch.is_grad_enabled()
        )

    def pass_back_over(self, steps: Iterable[Step]) -> None:
        """Run these steps of the trace, which this rank's backward passes over, in the order that all ranks share."""
        for period, begins in steps:
            if self.guide.in_step is None:
                self._pass(period, begins)

    def take_part(self, verb: int, index: int) -> None:
        """Do in a backward what other ranks need next and this rank does not, or not yet; see `SharedOrder`."""
        with plain_access(), torch.no_grad():
            if verb == REDUCE:
                self.reducer.take_part(self.units[index])
            else:
                self.units[index].take_part()

    def _pass(self, period: Period, begins: bool) -> None:
        runner = self.units[period.unit]
        if begins:
            period.opened = True
            runner.happens(Happening.OUTPUT_GRAD)
        else:
            runner.happens(Happening.INPUT_GRAD_KEPT if torch.is_grad_enabled() else Happening.INPUT_GRAD)

    def end_backward(self) -> None:
        """End a backward: reduce the remaining gradients, wait for all reductions, free all units."""
        try:
            self.pass_back_over(self.traces.rest())
            self.usual_backward = False
            for runner in self._open_among(self.units[::-1]):
                runner.happens(Happening.END)
            self.reducer.end()
        except BaseException as error:
            if isinstance(error, DivergenceError):
                self.position.forget()  # each rank learned a different order: gathers ahead would swap units
                self.guide.forget()
            try:
                self.recover()
            except Exception as second:
                error.add_note(f"The units could not be restored after this error: {second!r}")
            raise
        if torch.is_grad_enabled():  # create_graph
            refuse_second_derivatives([runner.unit for runner in self.units])
        self.position.end()
        self.traces.forget()
        if self.guide.in_step is not None:
            self.guide.in_step.forget()
        self.recomputed = self.backward = None

    def dissolve(self) -> None:
        """Release the units, which may outlive the root: the root module is gone."""
        for runner in self.units:
            if runner.root is self:
                runner.root, runner.is_top, runner.unit.usual = None, False, None
        self.units, self._unit_list = [], []

    # Prefetch and recovery.

    def prefetch(self, depth: int) -> None:
        """Start gathering the next units of a forward, until `depth` units wait to be opened.

        Gathers in the order known for the pass, and stops at a unit that cannot be gathered yet.

        Args:
            depth: how many units to gather ahead.
        """
        ahead, position, units = self.ahead, self.position, self.units
        while len(ahead) < depth and (index := position.log.next_gather()) is not None:
            runner = units[index]
            unit = runner.unit
            if unit.state is not SHARDED or unit.moving:
                break
            position.issue(GATHER, index)
            unit.issue_gather(runner.settings.comm)
            ahead[index] = True

    def prefetch_chosen(self, chosen: Iterable[int]) -> None:
        """Start gathering the units that the user chose for a forward, as far as they can be gathered now."""
        for index in chosen:
            runner = self.units[index]
            if runner.unit.state is SHARDED and not runner.unit.moving:
                self.position.issue(GATHER, index)
                runner.unit.issue_gather(runner.settings.comm)
                self.ahead[index] = False

    def prefetch_back(self, depth: int, chosen: Iterable[int] | None = None) -> None:
        """Start gathering the next units of a backward: those of the trace that it goes back over, or of the log.

        Args:
            depth: how many units to gather ahead.
            chosen: indices of the units that the user chose instead.
        """
        if self.guide.in_step is not None:
            return  # ranks agree on each gather one by one
        reached = self.traces.reached
        if chosen is None:
            chosen = (reached is not None and reached.upcoming(depth)) or self._known_back(depth)
        for index in chosen:
            runner = self.units[index]
            if runner.unit.state is SHARDED and runner.settings.unshard_in_backward:
                self.position.issue(REGATHER, index)
                runner.unit.issue_gather(runner.settings.comm)

    def _known_back(self, depth: int) -> Iterable[int]:
        """Indices that the log expects next: for backwards of passes without a trace, and for recomputation."""
        self.ahead = dict.fromkeys(self._awaited(), True)
        expected = self.position.log.next_gathers(depth - len(self.ahead))
        indices = list(takewhile(lambda index: self.units[index].unit.state is SHARDED, expected))
        self.ahead.update(dict.fromkeys(indices, True))
        return indices

    def _awaited(self) -> list[int]:
        """Indices of units that were gathered ahead because they were expected next, and were not opened yet."""
        return [i for i, known in self.ahead.items() if known and self.units[i].unit.state is State.GATHERING]

    def come_to(self, index: int) -> None:
        """Report a unit that is gathered as it is opened: if units gathered ahead still wait, it is unexpected."""
        if awaited := self._awaited():
            self.position.stray(awaited[0], index)

    def recover_if_broken(self) -> None:
        """Reset every unit to the beginning of a step if a backward raised; otherwise do nothing."""
        if self.backward is not None and self.backward.is_over():
            self.recover()

    def recover_if_broken_here(self) -> None:
        """Like `recover_if_broken`, only for a backward that this thread called; other threads may use the model."""
        if self.backward is not None and self.backward.ended_here():
            self.recover()

    def refuse_while_finalizing(self) -> None:
        """Raise while reductions are in flight that a handle's `wait` must deliver.

        Raises:
            PhaseError: such reductions are in flight.
        """
        if self.reducer.in_flight.finalizing is not None:
            raise not_waited_for()

    def recover(self) -> None:
        """Reset every unit to the beginning of a step, after an exception broke a pass off.

        Drops gradients of the broken step that were not reduced yet, and those accumulated without sync.
        """
        self.backward = self.finalizing = None
        self.usual_forward, self.usual_backward = None, False
        self.reducer.reset()
        self.traces.forget()
        self.position.lose()
        self.stale.forget()
        self.pass_top = self.traces.current = None
        self.recomputed = None
        failed: Exception | None = None  # the first error of a unit; the other units are reset all the same
        with plain_access(), torch.no_grad():
            for runner in self.units:
                if runner.root is not self:
                    continue
                try:
                    runner.happens(Happening.RESET)
                except Exception as error:
                    failed = failed or error
        self.reducer.settle()
        if failed is not None:
            raise failed
