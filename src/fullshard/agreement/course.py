"""What a rank issues, pass by pass, and whether that is what it has issued before. Pure.

Ranks compare what they issue while it is new, and need not as long as each goes on as it did then: whoever leaves the
known course compares first (`position.py`), and so never issues a collective that others do not.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import length_hint

NOTHING = -1
"""What is expected where nothing is."""

_MEMORY = 128  # passes
_CONTEXT = 16  # passes that a prediction looks back


class Course:
    """The kinds of passes in their order, and the tokens of each kind in theirs.

    Attributes:
        running: the pass that began last and is not over; None outside of passes.

    >>> course = Course()
    >>> course.begin("forward"), course.next(7), course.next(8)
    (False, False, False)
    >>> course.end()
    >>> course.begin("forward"), course.next(7), course.next(9), course.next(8)
    (False, True, False, False)
    >>> course.end()
    >>> course.begin("forward"), course.next(7), course.next(9), course.next(8)
    (True, True, True, True)
    """

    __slots__ = ("_history", "_known", "_passes", "running")

    def __init__(self) -> None:
        self._known: dict[Hashable, list[int]] = {}
        self._history: list[Hashable] = []
        self._passes: list[Running] = []  # that run now, innermost last
        self.running: Running | None = None

    def begin(self, kind: Hashable) -> bool:
        """A pass begins; returns whether one of this kind was to be expected here."""
        expected = bool(self._history) and following(self._history) == kind
        self._history.append(kind)
        if len(self._history) > 2 * _MEMORY:
            del self._history[:_MEMORY]
        self.running = Running(kind, self._known.get(kind, []))
        self._passes.append(self.running)
        return expected

    def next(self, token: int) -> bool:
        """The pass goes on with this; returns whether it did so last time. Outside of passes: True."""
        return self.running is None or self.running.goes_on_with(token)

    def untold(self) -> list[int]:
        """What the passes that run now have gone on with since this was asked last; those around others first."""
        return [token for one in self._passes for token in one.untold()]

    def end(self) -> None:
        """The pass that began last is over; this is how passes of its kind go."""
        if self._passes:
            over = self._passes.pop()
            self.running = self._passes[-1] if self._passes else None
            if not over.follows or length_hint(over.ahead):
                self._known[over.kind] = over.taken()

    def lose(self) -> None:
        """Passes were broken off. They count as they are: on other ranks, where nothing was raised, they ended."""
        while self._passes:
            self.end()

    def forget(self) -> None:
        """Nothing is known any more: whatever comes next is new."""
        self.running = None
        for what in (self._passes, self._known, self._history):
            what.clear()


class Running:
    """A pass that runs now.

    Attributes:
        kind: of the pass.
        known: what the last pass of the kind went on with; empty if there was none.
        follows: whether this one has gone on alike so far.
        ahead: what it is to go on with if it goes on alike; nothing once it does not.
        told: how much of what it went on with was told by `untold`.
    """

    __slots__ = ("_seen", "ahead", "follows", "kind", "known", "told")

    def __init__(self, kind: Hashable, known: list[int]) -> None:
        self.kind, self.known, self.follows, self.ahead, self.told = kind, known, True, iter(known), 0
        self._seen: list[int] = []

    def goes_on_with(self, token: int) -> bool:
        """See `Course.next`."""
        expected = next(self.ahead, NOTHING)
        if expected == token:
            return True
        self.departs(token, expected)
        return False

    def departs(self, token: int, expected: int) -> None:
        """It goes on with this, where another one was expected, which was taken off `ahead`."""
        self.leaves(too_far=0 if expected == NOTHING else 1)
        self._seen.append(token)

    def leaves(self, too_far: int = 0) -> None:
        """Nothing more is expected.

        Args:
            too_far: how many were taken off `ahead` that it did not go on with.
        """
        if self.follows:
            self._seen = self.known[: len(self.known) - length_hint(self.ahead) - too_far]
            self.follows, self.ahead = False, iter(())

    def taken(self) -> list[int]:
        """What it has gone on with."""
        return self._seen if not self.follows else self.known[: len(self.known) - length_hint(self.ahead)]

    def untold(self) -> list[int]:
        """What it has gone on with since this was asked last."""
        found = self.taken()[self.told :]
        self.told += len(found)
        return found


def following(history: list[Hashable]) -> Hashable:
    """What came after the last stretch of `history` that ended as it ends now, the longest one; None if none did.

    >>> following(["a", "b", "a", "c", "a", "b", "a"])
    'c'
    """
    last, best, found = len(history) - 1, 0, None
    for at in range(last - 1, max(-1, last - _MEMORY), -1):
        most = min(at + 1, _CONTEXT)
        if best >= most:  # nor will an earlier one be longer
            break
        length = 0
        if history[at + 1 - most : at + 1] == history[last + 1 - most :]:  # the usual case, compared in C
            length = most
        while length < most and history[at - length] == history[last - length]:
            length += 1
        if length > best:
            best, found = length, history[at + 1]
    return found
