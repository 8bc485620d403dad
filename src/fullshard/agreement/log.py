"""What a rank issues, pass by pass: a list of tokens per kind of pass, and a cursor. Pure.

A token is an integer: a verb, and the index of a unit above it (`watcher/log.py`). Ranks compare what they issue while
it is new, and need not as long as each goes on as it did then: whoever leaves the known list compares first
(`position.py`), and so never issues a collective that others do not.

From the same tokens follows what is gathered ahead. A forward issues its gathers in one order, whether early or late,
so the next token tells the next gather. A backward reduces in between, so the next gather among its tokens counts.
Passes of one kind that begin with other units gathered issue other tokens: they are told apart.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from operator import length_hint
from typing import Any

from ..watcher.log import GATHER, REGATHER, VERB_BITS, VERBS

NOTHING = -1
"""What is expected where nothing is."""
VERB = (1 << VERB_BITS) - 1
"""The bits of a token that hold its verb; those above hold the unit's index."""
ENTER, LEAVE, SIZES, MODEL = range(len(VERBS), len(VERBS) + 4)
"""Compared, and never issued: a unit's forward begins or ends; what units gather has changed; a model is new."""
MOST_UNITS = 1 << 20
"""More than a root has."""

_MEMORY = 1024  # passes
_KINDS = 64  # of passes, whose tokens are known
_CONTEXT = 512  # passes that a prediction looks back: of 256 micro-batches


class Log:
    """See the module's docstring. One per root.

    What goes on as it did is settled by the caller, as a call would cost more than all of it:
    `if log.expected == token: log.expected = next(log.ahead, NOTHING)`, else `log.next(token)`.

    Attributes:
        kind: of the pass that runs now, and the state in which it began; None outside of passes.
        known: what the last pass of the kind went on with; empty if there was none.
        expected: what comes next if this one goes on alike; `NOTHING` once it does not, and at the end.
        ahead: what comes after that.
        left: where it first went on otherwise: what was expected, and what came; `NOTHING` where nothing was, or did.
        complete: kinds of passes that came to their end.

    >>> log = Log()
    >>> def goes_on_with(*tokens):
    ...     log.begin(FORWARD)
    ...     known = [log.next(token) for token in tokens]
    ...     log.end()
    ...     return known
    >>> FORWARD = 0
    >>> goes_on_with(7, 8), goes_on_with(7, 9, 8), goes_on_with(7, 9, 8)
    ([False, False], [True, False, False], [True, True, True])
    >>> log.expects(FORWARD)
    True
    """

    def __init__(self) -> None:
        self._tokens: dict[Hashable, list[int]] = {}  # by kind and state; that of the pass which ended last comes last
        self._letters: dict[int, str] = {}  # by kind
        self._history = ""  # letters of kinds, newest first
        self._around: list[tuple[Any, ...]] = []  # the passes around the one that runs now, innermost last
        self._sum = 0  # of what was issued since the ranks last agreed, as far as it was worked out
        self.complete: set[int] = set()
        self._start(None)

    def expects(self, kind: int) -> bool:
        """Whether a pass of this kind is what comes next, if passes go on as they did."""
        return following(self._history) == self._letters.get(kind, "")

    # A pass.

    def begin(self, kind: int, state: Hashable = None) -> None:
        """A pass begins.

        Args:
            kind: a token; what ranks call it.
            state: passes of one kind that begin in different states issue different tokens.
        """
        letter = self._letters.setdefault(kind, chr(len(self._letters)))
        self._history = (letter + self._history)[:_MEMORY]
        self._sum = _mixed(self.taken(), self._sum)
        self._around.append((self.kind, self.known, self.ahead, self.expected, self.left, self._seen, self._strayed))
        self._start((kind, state))

    def turn(self, state: Hashable) -> None:
        """The pass that runs now goes on as one of its kind that began in this state."""
        assert self.kind is not None
        kind, _ = self.kind
        self._keep()
        self._start((kind, state))

    def _start(self, kind: tuple[int, Hashable] | None) -> None:
        self.kind = kind
        self.known = self._tokens.get(kind, [])
        self.ahead = iter(self.known)
        self.expected = next(self.ahead, NOTHING)
        self.left: tuple[int, int] | None = None
        self._seen: list[int] = []  # what it went on with, once it has left what is known
        self._strayed = False

    def next(self, token: int) -> bool:
        """The pass goes on with this; returns whether it did so last time. Outside of passes: True."""
        if self.expected == token:
            self.expected = next(self.ahead, NOTHING)
        elif self.kind is None:
            self._sum = _mixed([token], self._sum)
        else:
            self._leave(self.expected, token)
            self._seen.append(token)
            return False
        return True

    def stray(self, expected: int, token: int) -> None:
        """The pass comes to this where it had gathered something else ahead: what it goes on with is not its order.

        The next pass of the kind gathers nothing ahead, and so shows the order.
        """
        self._leave(expected, token)
        self._strayed = True

    def _leave(self, expected: int, token: int) -> None:
        if self.left is None:
            self._seen, self.expected, self.left = self.taken(), NOTHING, (expected, token)

    def taken(self) -> list[int]:
        """What the pass that runs now has gone on with."""
        if self.left is not None:
            return self._seen
        return self.known[: len(self.known) - length_hint(self.ahead) - (self.expected != NOTHING)]

    def end(self) -> tuple[int, int, int] | None:
        """The pass is over; this is how passes of its kind go.

        Returns:
            Where it left what was known: its kind, what was expected, and what came; None if it did not.
        """
        if self.kind is None:
            return None
        kind, known = self.kind[0], self.known
        self.complete.add(kind)
        left = self._keep()
        self._go_on()
        return (kind, *left) if known and left is not None else None

    def lose(self) -> None:
        """Passes were broken off. They count as they are: on other ranks, where nothing was raised, they ended."""
        while self.kind is not None:
            self._keep()
            self._go_on()

    def _go_on(self) -> None:
        """With the pass around the one that is over."""
        around = self._around.pop()
        self.kind, self.known, self.ahead, self.expected, self.left, self._seen, self._strayed = around

    def _keep(self) -> tuple[int, int] | None:
        """Know what the pass that runs now went on with; returns where it went on otherwise than the last one."""
        if self.expected != NOTHING:
            self._leave(self.expected, NOTHING)
        tokens = self.known if self.left is None else self._seen
        self._sum = _mixed(tokens, self._sum)
        self._tokens.pop(self.kind, None)
        if not self._strayed:
            self._tokens[self.kind] = tokens
        if len(self._tokens) > _KINDS:
            del self._tokens[next(iter(self._tokens))]
        return self.left

    def forget(self) -> None:
        """Nothing is known any more: whatever comes next is new."""
        for what in (self._around, self._tokens, self._letters, self.complete):
            what.clear()
        self._history = ""
        self._sum = 0
        self._start(None)

    # Questions.

    def next_gather(self) -> int | None:
        """The unit whose gather the pass issues next if it goes on as it is known to; None if that is no gather."""
        token = self.expected
        return token >> VERB_BITS if token & VERB == GATHER else None

    def next_gathers(self, depth: int) -> list[int]:
        """The up to `depth` units that are gathered next, as far as the pass goes on as the last one of its kind.

        Reductions in between are passed over: a gather may be issued before one that is expected first. The pass
        leaves what is known then, once, and its gathers still tell where it is.
        """
        if self._strayed:
            return []
        if self.left is None:
            coming = _gathers_in([self.expected, *copy(self.ahead)])
        else:
            known, gone = list(_gathers_in(self.known)), list(_gathers_in(self._seen))
            coming = iter(known[len(gone) :] if known[: len(gone)] == gone else ())
        return list(islice(coming, max(0, depth)))

    def fingerprint(self) -> int:
        """Of what was issued since the ranks last agreed, which they do now; below 2^32.

        A checksum of the tokens: worked out once a pass rather than with each, which costs a step less. What a pass
        issues before ranks agree, within it, is in the next one, too.
        """
        found, self._sum = _mixed(self.taken(), self._sum), 0
        return found


def _mixed(tokens: Sequence[int], before: int) -> int:
    return zlib.crc32(array("Q", tokens).tobytes(), before) if tokens else before


def _gathers_in(tokens: Iterable[int]) -> Iterator[int]:
    """The units that these gather."""
    return (token >> VERB_BITS for token in tokens if token & VERB in (GATHER, REGATHER))


def following(history: str) -> str | None:
    """What came after the longest stretch that ended as passes end now, the latest such one; None if none did.

    Args:
        history: a letter for each pass, newest first. Stretches of up to half of it are looked for.

    >>> following("abacaba"[::-1])
    'c'
    """
    most = min(len(history) // 2, _CONTEXT)
    at = history.find(history[:most], 1)  # the usual case: what repeats is shorter than all that is looked at
    if at < 0:  # whatever comes again does so with all that it begins with
        longest = bisect_left(range(1, most + 1), True, key=lambda length: history.find(history[:length], 1) < 0)
        at = history.find(history[:longest], 1) if longest else 0
    return history[at - 1] if at > 0 and most else None
