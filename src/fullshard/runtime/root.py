"""What the units under one root share: where they are in a pass, reductions in flight, and the ends of passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat, takewhile
from operator import attrgetter, call, is_not, or_
from threading import get_ident
from typing import Any, Protocol

import torch

from ..agreement import LEAVE, NOTHING, Every, FirstPass, Position, SharedOrder, Stale
from ..comm import Comm, has_streams
from ..errors import DivergenceError, PhaseError
from ..events import Ledger
from ..shard import State, When, ask, has_gradient
from ..torch_private.autograd_task import BackwardEnd
from ..torch_private.local_tensor import plain_access, read_version
from ..torch_private.profiler import recording
from ..watcher import BACKWARD, CHECK, FORWARD, GATHER, RANK, REDUCE, REGATHER, VERB_BITS, word
from .additions import Additions
from .attached import check_units as check_attached_units
from .messages import backward_while_summoned, called_by_itself, not_waited_for, other_root_runs
from .phases import Happening, Phase
from .reducer import Reducer, Reducible
from .second_order import refuse_second_derivatives
from .trace import Period, Step, Traces

ROOTS: weakref.WeakValueDictionary[int, Root] = weakref.WeakValueDictionary()
"""All that are alive in this process, by id."""


_STATE, _PHASE, _KEPT_AXIS = attrgetter("unit.state"), attrgetter("phase"), attrgetter("kept_axis")
_SUMMONED = attrgetter("showing.summoned")
SHARDED = State.SHARDED
_SHARDED, _IDLE = repeat(SHARDED), repeat(Phase.IDLE)


def all_roots() -> list[Root]:
    """Those of now: other threads may make roots meanwhile."""
    return [root for reference in ROOTS.valuerefs() if (root := reference()) is not None]


class Runnable(Reducible, Protocol):
    """What a root knows of a unit: its `Runner`."""

    root: Root | None
    is_top: bool
    kept: bool
    held: int
    phase: Phase
    find_root: Callable[[Any], Root]

    @property
    def modules(self) -> list[Any]:
        """The unit's modules that are alive."""

    def happens(self, event: Happening) -> None:
        """See `phases.py`."""

    def before_pass(self) -> None:
        """A pass begins at this unit."""

    def take_part(self) -> None:
        """Other ranks gather it in a backward."""

    def reshards(self, with_grad: bool) -> bool:
        """Whether the unit is freed after a forward."""


def _weakly(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """`method`, which does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def called(verb: int, index: int) -> None:
        if (found := reference()) is not None:
            found(verb, index)

    return called


class Root:
    """The context of one root unit and all units below it. Made at the first forward.

    Owns no tensors, and knows nothing of a unit's settings. Two roots may have units in common (a second model of the
    same parts): such a unit belongs to the one that runs, and has to be idle to change over.

    Args:
        top: the unit whose forward was called first.
        units: all units under it, `top` included, in module order.
        comm: collectives that compare ranks; units bring their own.
        additions: finds parameters that were added to the root's modules since.

    Attributes:
        pass_top: whose forward began the pass that runs now.
        pass_grad: whether that pass builds a graph.
        backward: the one that runs now, or the last one if it was broken off.
        guide: what goes along with passes: comparisons, or the order that ranks share.
        stale: finds what stayed gathered though weights changed.
        traces: of the passes whose backwards may come.
        ahead: units that were gathered ahead in the pass that runs now and not opened yet, by index: whether that was
            because they are known to come next.
        recomputed: the unit that was recomputed last; its backward comes next.
        usual_forward, usual_backward: whether such a pass runs, in which no rank is asked and no range is recorded, so
            that units may be opened and closed the usual way; see `step.py`.
        position: what is issued next, compared with other ranks.
        reducer: reductions of gradients.
    """

    def __init__(
        self,
        top: Runnable,
        units: list[Runnable],
        comm: Comm,
        additions: Additions,
    ) -> None:
        self.top, self.units, self.comm, self.additions = top, units, comm, additions
        self.ledger = Ledger()
        self.pass_top: Runnable | None = None
        self.pass_grad = False
        self.traces = Traces()
        self.ahead: dict[int, bool] = {}
        self.recomputed: Runnable | None = None
        self.reducer = Reducer(comm, top.settings.in_flight)
        self.usual_forward = self.usual_backward = False
        self._list_units()
        self._thread = get_ident()  # of the last forward
        self.finalizing: object = None  # the handle of the finalization in flight; see `reduce_kept.py`
        self.unfinalized = False  # whether a backward ran that `finalize_backward` is to follow
        self.adds = False  # whether there were gradients before the first of them
        self.backward: BackwardEnd | None = None
        self._lent = True  # whether units may belong to another root now
        ROOTS[id(self)] = self

    def _list_units(self) -> None:
        """Make what goes by the list of units: nothing is known of how they run."""
        units, names, settings = self.units, [one.unit.name for one in self.units], self.top.settings
        check, unused = settings.check, settings.unused
        every = self._every = check == "every"
        self._unit_list = [one.unit for one in units]
        self.position = (Every if every else Position)(self._unit_list, names, self.comm, check, unused)
        self.guide: FirstPass | SharedOrder = FirstPass(self._unit_list, self.comm)
        if unused == "zeros" and self.position.axes is not None:
            over, part = _weakly(self.pass_over), _weakly(self.take_part)
            self.guide = SharedOrder(self.position.axes, names, self.comm, every, over, part)
        self.stale = Stale(self._unit_list, self.comm)
        self.reducer.serve(units, self.position, self.guide.in_step)

    def take_in(self, added: list[Runnable]) -> None:
        """Make units its own that were sharded below it since. Between passes.

        Units whose modules are gone leave; not while a backward is to come, which refers to units by their numbers.
        """
        step = self.position.step
        if self.traces.are_none and self.reducer.is_idle:
            for one in [one for one in self.units if not one.modules]:
                one.happens(Happening.RESHARD)
                one.root = one.unit.usual = None
            self.units = [one for one in self.units if one.modules]
            for index, one in enumerate(self.units):
                one.index = index
        self.units = [*self.units, *added]
        self._list_units()
        self.position.step, self._lent = step, True

    def take_units(self) -> None:
        """Make all units this root's, from whichever roots had them.

        Raises:
            PhaseError: a unit's root is running, or the unit became a root.
        """
        for one, name in zip(self.units, self.position.names, strict=True):
            if one.root is not None and one.root is not self:
                one.root.lend(one, name)
        for index, one in enumerate(self.units):
            if one.root is not self:
                one.root, one.is_top, one.index = self, one is self.top, index
                one.unit.name = self.position.names[index]
                self.ledger.take_over(one.unit.ledger)
                one.unit.ledger = self.ledger
        self._lent = False

    def reclaimed(self, one: Runnable) -> Root | None:
        """This root, with a unit that it ran and whose backward comes now; None if it is gone.

        Raises:
            PhaseError: another root, which the unit belongs to now, is running.
        """
        if one.root is not self:
            self.take_units()
        return self if one.root is self else None

    def lend(self, one: Runnable, name: str) -> None:
        """Let go of a unit, for another root that runs it; it comes back when this one runs. It is freed.

        Args:
            name: of the unit from the other root.

        Raises:
            PhaseError: this root runs, or the unit is the root itself.
        """
        self.recover_if_broken()
        if self.top is one:
            raise called_by_itself(name)
        if self.pass_top is not None or self.backward is not None:
            raise other_root_runs(name)
        one.happens(Happening.RESHARD)
        held = sum(gradients.live_bytes for gradients in one.unit.gradients)  # accumulated without sync
        self.ledger.reducing -= held
        one.unit.ledger = Ledger(reducing=held)
        self._lent = True

    # Forward.

    def begin_forward(self, top: Runnable) -> None:
        """A unit's forward was called from outside any pass: usually the root's."""
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
        first = word(FORWARD, kind) not in self.position.log.complete
        if first and with_grad:
            check_attached_units(self._unit_list)
        gathered = self._gathered()
        self.pass_top, self.pass_grad = top, with_grad  # what raises from here on breaks the pass off
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
            self.usual_forward = not self.guide.active and not self._every and not recording()

    def pass_over(self, verb: int, index: int) -> None:
        """Begin or end a unit that other ranks run, and this one does not: it takes part, and shows it to nobody."""
        self.units[index].happens(Happening.LEAVE if verb == LEAVE else Happening.ENTER)

    def _gathered(self) -> bytes:
        """Of each unit, whether it is gathered, wholly or not yet; empty if none is."""
        found = bytes(map(is_not, map(_STATE, self.units), repeat(SHARDED)))
        return found if any(found) else b""

    def _drop_stale(self) -> None:
        """Free units that stayed gathered though their shards changed since, on any rank; see `Stale`. Collective.

        Raises:
            PhaseError: what is gathered was written to, through an unsharded parameter.
        """
        kept = [one for one in self.units if one.unit.buckets and one.unit.state is not SHARDED]
        if not kept:
            return
        self.position.issue(CHECK, kept[0].index)
        units = [one.unit for one in kept]
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
        """The pass is over: its order is known, and what was prefetched in vain is freed."""
        self.guide.end()
        self.position.end()
        self._settle()

    def break_forward(self, error: BaseException) -> None:
        """The pass was broken off by an exception.

        Maybe on this rank alone, after its last gather: it goes on holding what the others hold.
        """
        self.guide.stop()
        self.position.lose()
        self.stale.forget()
        for one in self.units if not isinstance(error, DivergenceError) else ():
            if one.unit.state is State.GATHERING and not one.reshards(self.pass_grad):
                one.unit.finish_gather()
        self._settle()

    @staticmethod
    def _open_among(units: Sequence[Runnable]) -> Iterable[Runnable]:
        """Those in another phase than `IDLE`, or not sharded: asked of all in C, of each when its turn comes."""
        busy = map(is_not, map(_PHASE, units), _IDLE)
        return compress(units, map(or_, busy, map(is_not, map(_STATE, units), _SHARDED)))

    def _settle(self) -> None:
        self.usual_forward = False
        for one in self._open_among(self.units):
            one.happens(Happening.PASS_END)
        self.reducer.settle()
        self.pass_top = self.traces.current = None

    # Backward.

    @property
    def in_backward(self) -> bool:
        """Whether a backward through this root runs now, and the caller is part of it."""
        return self.backward is not None and self.backward.running()

    def begin_backward(self) -> None:
        """The first gradient of a backward reached a unit.

        Raises:
            UsageError: a unit is inside `summon_full_params`: gradients would be this rank's own; or no count is left.
        """
        self.recover_if_broken()
        self.refuse_while_finalizing()
        if self.top.settings.manual_finalization and not self.unfinalized:
            self.unfinalized = True
            self.adds = any([has_gradient(member) for one in self.units for member in one.unit.members])
        if True in map(_SUMMONED, self._unit_list):
            raise backward_while_summoned()
        self.reducer.begin(self.top.settings.reduce)
        if self._lent:
            self.take_units()
        ask(When.BACKWARD, self._unit_list)  # `requires_grad` may have been off and on again since the forward
        self.position.compare_sizes()
        on_device = has_streams(self.top.settings.axes.device)  # where autograd calls hooks on a thread of its own
        self.backward = BackwardEnd(self.end_backward, self._thread if on_device else get_ident())
        self.ahead.clear()
        self.position.begin(BACKWARD, self.top.settings.reduce.sync, self._gathered())
        self.usual_forward = False
        self.usual_backward = self.guide.in_step is None and not self._every and not recording()

    def pass_back_over(self, steps: Iterable[Step]) -> None:
        """Go through what comes before a unit's backward begins, or ends, in the order that all ranks share."""
        for period, begins in steps:
            if self.guide.in_step is None:
                self._pass(period, begins)

    def take_part(self, verb: int, index: int) -> None:
        """Do in a backward what other ranks want next, and this one does not, or not yet; see `SharedOrder`."""
        with plain_access(), torch.no_grad():
            if verb == REDUCE:
                self.reducer.take_part(self.units[index])
            else:
                self.units[index].take_part()

    def _pass(self, period: Period, begins: bool) -> None:
        one = self.units[period.unit]
        if begins:
            period.opened = True
            one.happens(Happening.OUTPUT_GRAD)
        else:
            one.happens(Happening.INPUT_GRAD_KEPT if torch.is_grad_enabled() else Happening.INPUT_GRAD)

    def end_backward(self) -> None:
        """Autograd is done: reduce what is left, wait for everything, free everything."""
        self.usual_backward = False
        try:
            self.pass_back_over(self.traces.rest())
            for one in self._open_among(self.units[::-1]):
                one.happens(Happening.END)
            self.reducer.end()
        except BaseException as error:
            if isinstance(error, DivergenceError):
                self.position.forget()  # each rank learned its own: gathers ahead would swap units
                self.guide.forget()
            try:
                self.recover()
            except Exception as second:
                error.add_note(f"The units could not be put back after this: {second!r}")
            raise
        if torch.is_grad_enabled():  # create_graph
            refuse_second_derivatives([one.unit for one in self.units])
        self.position.end()
        self.traces.forget()
        if self.guide.in_step is not None:
            self.guide.in_step.forget()
        self.recomputed = self.backward = None

    def dissolve(self) -> None:
        """The root module is gone: let go of the units, which may live on by themselves."""
        for one in self.units:
            if one.root is self:
                one.root, one.is_top, one.unit.usual = None, False, None
        self.units, self._unit_list = [], []

    # Prefetch and recovery.

    def prefetch(self, depth: int) -> None:
        """Start gathering for a forward what comes next, until `depth` units wait to be opened.

        What the pass is known to gather next, in that order: nothing that cannot be gathered yet is passed over.

        Args:
            depth: how many units are gathered ahead.
        """
        ahead, position, units = self.ahead, self.position, self.units
        while len(ahead) < depth and (index := position.log.next_gather()) is not None:
            one = units[index]
            unit = one.unit
            if unit.state is not SHARDED or unit.moving:
                break
            position.issue(GATHER, index)
            unit.issue_gather(one.settings.comm)
            ahead[index] = True

    def gather_ahead(self, token: int) -> bool:
        """Start the gather that the log says comes next, if its unit goes the usual way and is not gathered.

        Args:
            token: what is expected, a gather.

        Returns:
            Whether it was started; if not, `prefetch` or `prefetch_back` may start another.
        """
        one = self.units[token >> VERB_BITS]
        unit: Any = one.unit
        usual, position = unit.usual, self.position
        if usual is None or unit.state is not SHARDED or not one.settings.usual:
            return False
        log, gather, ledger = position.log, usual.gather, unit.ledger
        log.expected = next(log.ahead, NOTHING)
        RANK.record(token + next(position.turns))
        unit.gathered = gather
        try:
            *_, unit.pending = map(call, gather.starts)
        except BaseException:
            unit.free(failed=True)
            raise
        unit.state = State.GATHERING
        unit.gathered_version = sum(map(read_version, usual.counters), unit.touched.changes)
        ledger.gathered = gathered = ledger.gathered + gather.issued_bytes
        if gathered + ledger.reducing > ledger.peak:
            ledger.note()
        return True

    def prefetch_chosen(self, chosen: Iterable[int]) -> None:
        """Start gathering for a forward the units that a user chose, as far as they can be gathered now."""
        for index in chosen:
            one = self.units[index]
            if one.unit.state is SHARDED and not one.unit.moving:
                self.position.issue(GATHER, index)
                one.unit.issue_gather(one.settings.comm)
                self.ahead[index] = False

    def prefetch_back(self, depth: int, chosen: Iterable[int] | None = None) -> None:
        """Start gathering for a backward what comes next: as the pass tells that it goes back over, or as is known.

        Args:
            depth: how many units are gathered ahead.
            chosen: the units that a user chose instead.
        """
        if self.guide.in_step is not None:
            return  # ranks say what they gather, one by one
        reached = self.traces.reached
        if chosen is None:
            chosen = (reached is not None and reached.upcoming(depth)) or self._known_back(depth)
        for index in chosen:
            one = self.units[index]
            if one.unit.state is SHARDED and one.settings.unshard_in_backward:
                self.position.issue(REGATHER, index)
                one.unit.issue_gather(one.settings.comm)

    def _known_back(self, depth: int) -> Iterable[int]:
        """What backwards of this kind gather next: those of passes without a trace, and what they recompute."""
        self.ahead = dict.fromkeys(self._awaited(), True)
        expected = self.position.log.next_gathers(depth - len(self.ahead))
        found = list(takewhile(lambda index: self.units[index].unit.state is SHARDED, expected))
        self.ahead.update(dict.fromkeys(found, True))
        return found

    def _awaited(self) -> list[int]:
        """Units that were gathered ahead as they are known to come next, and did not."""
        return [i for i, known in self.ahead.items() if known and self.units[i].unit.state is State.GATHERING]

    def come_to(self, index: int) -> None:
        """A unit is about to be gathered as it is opened: it is another one if some were gathered ahead for nothing."""
        if awaited := self._awaited():
            self.position.stray(awaited[0], index)

    def recover_if_broken(self) -> None:
        """Bring every unit back to where a step begins if a backward raised; nothing otherwise."""
        if self.backward is not None and self.backward.is_over():
            self.recover()

    def recover_if_broken_here(self) -> None:
        """As `recover_if_broken`, of a backward that this thread called: other threads may be using the model."""
        if self.backward is not None and self.backward.ended_here():
            self.recover()

    def refuse_while_finalizing(self) -> None:
        """Raise while gradients are in flight that a handle's `wait` is to deliver.

        Raises:
            PhaseError: names what to call.
        """
        if self.reducer.in_flight.finalizing is not None:
            raise not_waited_for()

    def recover(self) -> None:
        """Bring every unit back to where a step begins, after an exception broke one off.

        Gradients of the broken step that were not reduced yet, and those accumulated without sync, are dropped.
        """
        self.backward = self.finalizing = None
        self.usual_forward = self.usual_backward = False
        self.reducer.reset()
        self.traces.forget()
        self.position.lose()
        self.stale.forget()
        self.pass_top = self.traces.current = None
        self.recomputed = None
        failed: Exception | None = None  # of one unit: the others are put back all the same
        with plain_access(), torch.no_grad():
            for one in self.units:
                if one.root is not self:
                    continue
                try:
                    one.happens(Happening.RESET)
                except Exception as error:
                    failed = failed or error
        self.reducer.settle()
        if failed is not None:
            raise failed
