"""What one forward pass ran, to be run backwards: the one order of a backward that all ranks share. Pure.

Ranks need not use the same units in a backward: a batch of one task gives one head a gradient, a batch of another task
another. But each gather and each reduction needs all of them. So every rank goes through the whole pass backwards, in
the order in which units were entered and left in forward, which the ranks have compared; a gradient that arrives only
tells how far. What a rank's loss did not use is gathered, freed and reduced (with zeros) in passing.

Autograd itself runs nodes in the reverse of the order in which they were made, so where all units are used nothing is
ever passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Period:
    """A unit's time between being entered and left in forward: its calls, and the pass that it is part of.

    Attributes:
        unit: its index.
        trace: of the pass; None outside of one (recomputation).
        calls: whose backward is still to come.
        opened: whether its backward has begun.
        leads_back: whether an output of a call needs a gradient on this rank, so that a backward may come.
        hides: whether what a call returned may hide a graph: the unit stays gathered for it.
    """

    __slots__ = ("calls", "hides", "leads_back", "opened", "trace", "unit")

    def __init__(self, unit: int, trace: Trace | None = None) -> None:
        self.unit, self.trace, self.calls = unit, trace, 0
        self.opened = self.leads_back = self.hides = False


Step = tuple[Period, bool]
"""A period, and whether its backward begins (the unit was left in forward) or ends (it was entered)."""


class Trace:
    """See the module's docstring.

    Args:
        root: whose pass it is; a weak reference, or nothing.

    Attributes:
        steps: in the order of the forward, less those that were gone back over.
        ahead: by unit, how many ends of its backwards are among them; several traces may share it.

    >>> trace, outer, inner = Trace(), Period(0), Period(1)
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
        """A unit's forward is over; nothing of it stays if no rank's backward goes through it."""
        if not goes_back and self.steps and self.steps[-1] == (period, False):
            self._pop()
            return
        self.steps.append((period, True))

    def back_to(self, period: Period, begins: bool) -> Iterator[Step]:
        """Go back to this step, one by one: those passed over, each when it is done with. None if it is not ahead."""
        steps, wanted = self.steps, (period, begins)
        if (steps and steps[-1] == wanted) or wanted in steps:
            while (step := self._pop()) != wanted:
                yield step

    def rest(self) -> Iterator[Step]:
        """Go back to the beginning, one by one."""
        while self.steps:
            yield self._pop()

    def _pop(self) -> Step:
        step = self.steps.pop()
        period, begins = step
        if not begins:
            self.ahead[period.unit] -= 1
        return step

    def upcoming(self, depth: int) -> list[int]:
        """The up to `depth` units whose backward begins next."""
        if depth == 1:  # the usual case
            for period, begins in reversed(self.steps):
                if begins:
                    return [period.unit]
        found: list[int] = []
        for period, begins in reversed(self.steps) if depth > 0 else ():
            if begins:
                found.append(period.unit)
                if len(found) == depth:
                    break
        return found

    def count_in(self, ahead: defaultdict[int, int]) -> None:
        """Share this `ahead` from now on, and no more the one that it shared so far."""
        for period, begins in self.steps:
            if not begins:
                self.ahead[period.unit] -= 1
                ahead[period.unit] += 1
        self.ahead = ahead


_MOST_PASSES = 64  # without a backward, that are remembered


class Traces:
    """The forward passes under one root whose backwards may come, and how far the backward that runs now has gone back.

    Attributes:
        current: of the pass that runs now, if it builds a graph.
        ahead: by unit, how often this backward, or one of a pass since the last one, is expected to reach it again.
        reached: the trace that the backward which runs now came to last.
    """

    __slots__ = ("_reached", "_recent", "ahead", "current", "reached")

    def __init__(self) -> None:
        self.current: Trace | None = None
        self.reached: Trace | None = None
        self.ahead: defaultdict[int, int] = defaultdict(int)
        self._recent: list[Trace] = []  # of passes since the last backward ended
        self._reached: list[Trace] = []  # of passes that the backward which runs now has come to

    @property
    def are_none(self) -> bool:
        """Whether no backward is to come, as far as is known."""
        return not (self._recent or self._reached)

    def begin(self, root: Callable[[], Any]) -> None:
        """A pass that builds a graph begins."""
        self.current = Trace(root, self.ahead)
        self._recent.append(self.current)
        if len(self._recent) > _MOST_PASSES:
            oldest = self._recent.pop(0)
            if oldest not in self._reached:
                oldest.count_in(defaultdict(int))

    def back_to(self, period: Period, begins: bool) -> Iterable[Step]:
        """Go back to a step of the trace that it is part of, if any; see `Trace.back_to`."""
        trace = period.trace
        if trace is None:
            return ()
        if trace is not self.reached:
            if trace not in self._reached:
                self._reached.append(trace)
                self.reached = trace
            if trace.ahead is not self.ahead:
                trace.count_in(self.ahead)
        steps = trace.steps
        if not steps or steps[-1] != (period, begins):
            return trace.back_to(period, begins)
        steps.pop()  # the next one: nothing is passed over
        if not begins:
            trace.ahead[period.unit] -= 1
        return ()

    def rest(self) -> Iterator[Step]:
        """Go back to the beginnings of all passes that were reached, one step at a time."""
        for trace in self._reached:
            yield from trace.rest()

    def forget(self) -> None:
        """The backward is over, or was broken off."""
        self._recent, self._reached, self.reached, self.ahead = [], [], None, defaultdict(int)
