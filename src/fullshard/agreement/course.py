"""The log of what a rank issues, pass by pass, and whether that is what it has issued before. Pure.

Ranks compare what they issue while it is new, and need not as long as each goes on as it did then: whoever leaves the
known course compares first (`position.py`), and so never issues a collective that others do not.

From the same numbers follows what is gathered ahead. A forward issues its gathers in one order, whether early or late,
so the next number tells the next gather. A backward reduces in between, so the next gather among its numbers counts.
Passes of one kind that begin with other units gathered issue other numbers: they are told apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from copy import copy
from itertools import islice
from operator import length_hint

from ..watcher.log import GATHER, REGATHER, VERB_BITS

NOTHING = -1
"""What is expected where nothing is."""
VERB = (1 << VERB_BITS) - 1
"""The bits of a token that hold its verb; those above hold the unit's index."""

MOST_UNITS = 1 << 20
"""More than a root has."""
SIZES, MODEL = -1, -2
"""Compared in the place of a verb: what units gather has changed; a model is used for the first time."""

_MEMORY = 128  # passes
_KINDS = 64  # of passes, whose tokens are known
_CONTEXT = 16  # passes that a prediction looks back


class Course:
    """The kinds of passes in their order, and the tokens of each kind in theirs.

    Attributes:
        running: the pass that began last and is not over; `_OUTSIDE` where none is.

    >>> course = Course()
    >>> def goes_on_with(*tokens):
    ...     course.begin("forward")
    ...     known = [course.next(token) for token in tokens]
    ...     course.end()
    ...     return known
    >>> goes_on_with(7, 8), goes_on_with(7, 9, 8), goes_on_with(7, 9, 8)
    ([False, False], [True, False, False], [True, True, True])
    >>> course.expects("forward")
    True
    """

    __slots__ = ("_history", "_known", "_passes", "running")

    def __init__(self) -> None:
        self._known: dict[Hashable, list[int]] = {}  # that of the kind which ended last comes last
        self._history: list[Hashable] = []
        self._passes: list[Running] = []  # that run now, innermost last
        self.running = _OUTSIDE

    def expects(self, kind: Hashable) -> bool:
        """Whether a pass of this kind is what comes next, if passes go on as they did."""
        return bool(self._history) and following(self._history) == kind

    def begin(self, kind: Hashable, state: Hashable = None) -> None:
        """A pass begins.

        Args:
            kind: what ranks call it.
            state: passes of one kind that begin in different states issue different tokens.
        """
        self._history.append(kind)
        if len(self._history) > 2 * _MEMORY:
            del self._history[:_MEMORY]
        self._enter((kind, state))

    def turn(self, state: Hashable) -> None:
        """The pass that runs now goes on as one of its kind that began in this state."""
        kind, _ = self.running.kind
        self.end()
        self._enter((kind, state))

    def _enter(self, kind: tuple[Hashable, Hashable]) -> None:
        self.running = Running(kind, self._known.get(kind, []))
        self._passes.append(self.running)

    def next(self, token: int) -> bool:
        """The pass goes on with this; returns whether it did so last time. Outside of passes: True."""
        running = self.running
        if running.expected == token:
            running.expected = next(running.ahead, NOTHING)
        elif self._passes:
            running.departs(token)
            return False
        return True

    def untold(self) -> list[int]:
        """What the passes that run now have gone on with since this was asked last; those around others first."""
        return [token for one in self._passes for token in one.untold()]

    def end(self) -> None:
        """The pass that began last is over; this is how passes of its kind go."""
        if self._passes:
            over = self._passes.pop()
            over.ends()
            self.running = self._passes[-1] if self._passes else _OUTSIDE
            known = self._known.pop(over.kind, over.known)
            if not over.strayed:
                self._known[over.kind] = known if over.left is None else over.taken()
            if len(self._known) > _KINDS:
                del self._known[next(iter(self._known))]

    def lose(self) -> None:
        """Passes were broken off. They count as they are: on other ranks, where nothing was raised, they ended."""
        while self._passes:
            self.end()

    def forget(self) -> None:
        """Nothing is known any more: whatever comes next is new."""
        self.running = _OUTSIDE
        for what in (self._passes, self._known, self._history):
            what.clear()


class Running:
    """A pass that runs now.

    Attributes:
        kind: of the pass, and the state in which it began.
        known: what the last pass of the kind went on with; empty if there was none.
        expected: what comes next if this one goes on alike; `NOTHING` once it does not, and at the end.
        ahead: what comes after that.
        left: where it first went on otherwise: what was expected, and what came; `NOTHING` where nothing was, or did.
        strayed: whether it came to units in another order than that in which it had gathered them ahead.
        told: how much of what it went on with was told by `untold`.

    >>> running = Running(("backward", None), [REGATHER | unit << VERB_BITS for unit in (2, 1, 0)])
    >>> running.next_gathers(depth=2)
    [2, 1]
    """

    __slots__ = ("_seen", "ahead", "expected", "kind", "known", "left", "strayed", "told")

    def __init__(self, kind: tuple[Hashable, Hashable], known: list[int]) -> None:
        self.kind, self.known, self.told = kind, known, 0
        self.ahead = iter(known)
        self.expected = next(self.ahead, NOTHING)
        self._seen: list[int] = []  # what it went on with, once it has left what is known
        self.left: tuple[int, int] | None = None
        self.strayed = False

    def departs(self, token: int) -> None:
        """It goes on with this, which was not expected."""
        self._leaves(self.expected, token)
        self._seen.append(token)

    def strays(self, expected: int, token: int) -> None:
        """It comes to this where it had gathered something else ahead: what it goes on with is not its order.

        The next pass of the kind gathers nothing ahead, and so shows the order.
        """
        self._leaves(expected, token)
        self.strayed = True

    def ends(self) -> None:
        """It is over."""
        if self.expected != NOTHING:
            self._leaves(self.expected, NOTHING)

    def _leaves(self, expected: int, token: int) -> None:
        if self.left is None:
            self._seen, self.expected, self.left = self.taken(), NOTHING, (expected, token)

    def taken(self) -> list[int]:
        """What it has gone on with."""
        if self.left is not None:
            return self._seen
        return self.known[: len(self.known) - length_hint(self.ahead) - (self.expected != NOTHING)]

    def untold(self) -> list[int]:
        """What it has gone on with since this was asked last."""
        found = self.taken()[self.told :]
        self.told += len(found)
        return found

    def next_gathers(self, depth: int) -> list[int]:
        """The up to `depth` units that are gathered next, as far as the pass goes on as the last one of its kind.

        Reductions in between are passed over: a gather may be issued before one that is expected first. The pass
        departs then, once, and its gathers still tell where it is.
        """
        if self.strayed:
            return []
        if self.left is None:
            left = gathers_in([self.expected, *copy(self.ahead)])
        else:
            known, gone = list(gathers_in(self.known)), list(gathers_in(self._seen))
            left = iter(known[len(gone) :] if known[: len(gone)] == gone else ())
        return list(islice(left, max(0, depth)))


def gathers_in(tokens: Iterable[int]) -> Iterator[int]:
    """The units that these gather."""
    return (token >> VERB_BITS for token in tokens if token & VERB in (GATHER, REGATHER))


_OUTSIDE = Running((None, None), [])
"""In the place of a pass where none runs."""


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
