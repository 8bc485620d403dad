"""What a rank issues, pass by pass, and whether that is what it has issued before. Pure.

Ranks compare what they issue while it is new, and need not as long as each goes on as it did then: whoever leaves the
known course compares first (`position.py`), and so never issues a collective that others do not.
"""

from __future__ import annotations

from collections.abc import Hashable

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

    def end(self) -> None:
        """The pass that began last is over; this is how passes of its kind go."""
        if self._passes:
            over = self._passes.pop()
            self.running = self._passes[-1] if self._passes else None
            if not over.follows or over.at != len(over.known):
                self._known[over.kind] = over.seen if not over.follows else over.known[: over.at]

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
        at: how far, while it does.
        seen: what it has gone on with, once it does not.
    """

    __slots__ = ("at", "follows", "kind", "known", "seen")

    def __init__(self, kind: Hashable, known: list[int]) -> None:
        self.kind, self.known, self.follows, self.at = kind, known, True, 0
        self.seen: list[int] = []

    def goes_on_with(self, token: int) -> bool:
        """See `Course.next`."""
        if self.follows:
            at = self.at
            if at < len(self.known) and self.known[at] == token:
                self.at = at + 1
                return True
            self.follows, self.seen = False, self.known[:at]
        self.seen.append(token)
        return False


def following(history: list[Hashable]) -> Hashable:
    """What came after the last stretch of `history` that ended as it ends now, the longest one; None if none did.

    >>> following(["a", "b", "a", "c", "a", "b", "a"])
    'c'
    """
    last, best, found = len(history) - 1, 0, None
    for at in range(last - 1, max(-1, last - _MEMORY), -1):
        length = 0
        while length <= at and length < _CONTEXT and history[at - length] == history[last - length]:
            length += 1
        if length > best:
            best, found = length, history[at + 1]
            if length == _CONTEXT:
                break
    return found
