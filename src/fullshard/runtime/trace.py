"""The units that a forward pass ran; in reverse, the order of a backward that all ranks share. Pure.

Ranks may use different units in a backward: batches of different tasks give gradients to different heads. But each
gather and each reduction needs all ranks. So every rank goes back through the whole pass, in the order in which units
were entered and left in forward, which the ranks have compared; an arriving gradient only determines how far. Units
that a rank's loss did not use are gathered, freed and reduced (with zeros) in passing.

Autograd runs nodes in the reverse order of their creation, so if all units are used nothing is ever passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Period:
    """A unit's time from being entered to being left in forward: its calls, and the pass that it belongs to.

    Attributes:
        unit: index of the unit.
        trace: the trace of the pass; None outside a pass (recomputation).
        calls: number of calls whose backward has not ended.
        opened: whether its backward has begun.
        leads_back: whether an output of a call needs a gradient on this rank, so that a backward may follow.
        hides: whether a call's output may hide a graph: the unit stays gathered for it.
        again, closes_late: see `kept_graph`, which makes them.
    """

    unit = -1
    trace: Trace | None = None
    calls = 0
    opened = leads_back = hides = False
    again: tuple[object, int]
    closes_late: bool

    @classmethod
    def of(cls, unit: int, trace: Trace | None = None) -> Period:
        """A period that begins. `step.py` sets the two attributes itself: a call takes longer."""
        period = cls()
        period.unit, period.trace = unit, trace
        return period


Step = tuple[Period, bool]
"""A period, and whether its backward begins (the unit was left in forward) or ends (it was entered)."""


class Trace:
    """See the module's docstring.

    Args:
        root: weak reference to the root of the pass; None: no root.
        ahead: the counts to share with other traces; None: its own.

    Attributes:
        steps: the steps in forward order, without those that a backward has gone back over.
        ahead: by unit index, how many of the steps end its backward; several traces may share it.

    >>> trace, outer, inner = Trace(), Period.of(0), Period.of(1)
    >>> trace.entered(outer); trace.entered(inner); trace.left(inner); trace.left(outer)
    >>> trace.upcoming(2)
    [0, 1]
    >>> [(period.unit, begins) for period, begins in trace.back_to(inner, begins=False)]
    [(0, True), (1, True)]
    >>> [(period.unit, begins) for period, begins in trace.rest()]
    [(0, False)]
    """

    __slots__ = ("ahead", "root", "steps")

    def __init__(self, root: Callable[[], Any] | None = None, ahead: defaultdict[int, int] | None = None) -> None:
        self.root = root or (lambda: None)
        self.steps: list[Step] = []
        self.ahead: defaultdict[int, int] = defaultdict(int) if ahead is None else ahead

    def entered(self, period: Period) -> None:
        """A unit was opened for its forward."""
        self.steps.append((period, False))
        self.ahead[period.unit] += 1

    def left(self, period: Period, goes_back: bool = True) -> None:
        """A unit's forward is over; it is removed from the trace if no rank's backward goes through it."""
        if not goes_back and self.steps and self.steps[-1] == (period, False):
            self._pop()
            return
        self.steps.append((period, True))

    def back_to(self, period: Period, begins: bool) -> Iterator[Step]:
        """Go back to this step, yielding each step that is passed over. Yields nothing if the step is not ahead."""
        steps, target = self.steps, (period, begins)
        if (steps and steps[-1] == target) or target in steps:
            while (step := self._pop()) != target:
                yield step

    def rest(self) -> Iterator[Step]:
        """Go back to the beginning, yielding each step."""
        while self.steps:
            yield self._pop()

    def _pop(self) -> Step:
        step = self.steps.pop()
        period, begins = step
        if not begins:
            self.ahead[period.unit] -= 1
        return step

    def upcoming(self, depth: int) -> list[int]:
        """Return the indices of up to `depth` units whose backward begins next."""
        if depth == 1:  # the usual case
            for period, begins in reversed(self.steps):
                if begins:
                    return [period.unit]
        units: list[int] = []
        for period, begins in reversed(self.steps) if depth > 0 else ():
            if begins:
                units.append(period.unit)
                if len(units) == depth:
                    break
        return units

    def count_in(self, ahead: defaultdict[int, int]) -> None:
        """Use and share this `ahead` from now on, in place of the previous one."""
        for period, begins in self.steps:
            if not begins:
                self.ahead[period.unit] -= 1
                ahead[period.unit] += 1
        self.ahead = ahead


_MOST_PASSES = 64  # passes without a backward that are remembered at most


class Traces:
    """The forward passes under one root that a backward may still reach, and how far the current one has gone back.

    Attributes:
        current: the trace of the current pass, if it builds a graph.
        ahead: by unit index, how often this backward, or one of a pass since the last backward, will reach it again.
        reached: the trace that the current backward reached last.
    """

    __slots__ = ("_reached", "_recent", "ahead", "current", "reached")

    def __init__(self) -> None:
        self.current: Trace | None = None
        self.reached: Trace | None = None
        self.ahead: defaultdict[int, int] = defaultdict(int)
        self._recent: list[Trace] = []  # traces of passes since the last backward ended
        self._reached: list[Trace] = []  # traces that the current backward has reached

    @property
    def are_none(self) -> bool:
        """Whether no backward is expected."""
        return not (self._recent or self._reached)

    def begin(self, root: Callable[[], Any]) -> None:
        """Begin the trace of a pass that builds a graph."""
        self.current = Trace(root, self.ahead)
        self._recent.append(self.current)
        if len(self._recent) > _MOST_PASSES:
            oldest = self._recent.pop(0)
            if oldest not in self._reached:
                oldest.count_in(defaultdict(int))

    def reach(self, trace: Trace) -> None:
        """Note that the current backward reached a different trace, for the first time or again."""
        if trace not in self._reached:
            self._reached.append(trace)
        self.reached = trace
        if trace.ahead is not self.ahead:
            trace.count_in(self.ahead)

    def back_to(self, period: Period, begins: bool) -> Iterable[Step]:
        """Go back to a step of the period's trace, if it has one; see `Trace.back_to`."""
        trace = period.trace
        if trace is None:
            return ()
        if trace is not self.reached:
            self.reach(trace)
        steps = trace.steps
        if not steps or steps[-1] != (period, begins):
            return trace.back_to(period, begins)
        steps.pop()  # it is the next step: nothing is passed over
        if not begins:
            trace.ahead[period.unit] -= 1
        return ()

    def rest(self) -> Iterator[Step]:
        """Go back to the beginning of every pass that was reached, yielding each step."""
        for trace in self._reached:
            yield from trace.rest()

    def forget(self) -> None:
        """Drop all traces: the backward ended or was broken off."""
        self._recent, self._reached, self.reached, self.ahead = [], [], None, defaultdict(int)
