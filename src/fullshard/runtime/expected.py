"""The units that a backward will gather, in an order that all ranks share. Pure.

Ranks need not use the same units in a backward (see `reducer.py`), but each gather needs all of them. What is expected
is the reverse of the order in which units were left in forward, which the ranks have compared. A rank that reaches a
unit first does the gathers of those it passed over, for the others; at the end of backward, those of units that it did
not reach at all. What is left then belongs to a later backward (of another micro-batch).
"""

from __future__ import annotations

from collections import deque
from itertools import islice


class Expected:
    """See the module's docstring. Units are given by index.

    >>> expected = Expected(units=3)
    >>> for unit in (0, 1, 2):
    ...     expected.left(unit)
    >>> expected.begin()
    >>> expected.reach(1, depth=1), expected.end()
    (((2,), (0,)), (0,))

    Args:
        units: how many there are.
    """

    __slots__ = ("_coming", "_most", "_reached", "_visits")

    def __init__(self, units: int) -> None:
        self._visits: list[int] = []
        self._coming: deque[int] = deque()
        self._reached: set[int] = set()
        self._most = 16 * units + 16

    def left(self, unit: int) -> None:
        """A unit was freed after a forward with outputs that need gradients."""
        self._visits.append(unit)

    def begin(self) -> None:
        """A backward begins."""
        self._coming = deque(reversed(self._visits))
        self._visits.clear()
        self._reached.clear()

    def reach(self, unit: int, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A unit's backward begins: the units passed over, and the up to `depth` units expected next."""
        coming, passed = self._coming, []
        self._reached.add(unit)
        if unit in coming:
            while (first := coming.popleft()) != unit:
                passed.append(first)
        return tuple(passed), tuple(islice(coming, depth))

    def end(self) -> tuple[int, ...]:
        """The backward is over: the units that it did not reach."""
        missed = tuple(unit for unit in self._coming if unit not in self._reached)
        rest = [unit for unit in reversed(self._coming) if unit in self._reached]
        self._visits = rest[-self._most :]  # graphs that were dropped leave theirs behind
        self._coming.clear()
        return missed

    def reset(self) -> None:
        """After an exception: nothing is expected."""
        self._visits.clear()
        self._coming.clear()
        self._reached.clear()
