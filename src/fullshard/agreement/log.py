"""What a rank issues, pass by pass: a list of tokens per kind of pass, and a cursor. Pure.

A token is an integer: a verb, and the index of a unit above it (`watcher/issued.py`). Ranks compare what they issue
while it is new, and need not compare while each repeats its list: a rank that is about to leave its list compares first
(`position.py`), and so never issues a collective that the others do not.

Prefetch follows the same tokens. A forward issues its gathers in a fixed order, whether early or late, so the next
token is the next gather. A backward reduces in between, so the next gather among its tokens counts. Passes of the same
kind that begin with different units gathered issue different tokens, and have separate lists.
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

from ..watcher.issued import FORWARD, GATHER, REGATHER, VERB_BITS, VERBS

NOTHING = -1
"""In place of a token where there is none."""
VERB = (1 << VERB_BITS) - 1
"""The bits of a token with its verb; the bits above contain the unit's index."""
ENTER, LEAVE, SIZES, MODEL = range(len(VERBS), len(VERBS) + 4)
"""Compared but never issued: a unit's forward begins or ends; gather sizes have changed; a model is new."""
MOST_UNITS = 1 << 20
"""An upper bound: no root has this many units."""

_MEMORY = 1024  # passes
_KINDS = 64  # kinds of passes whose tokens are remembered
_CONTEXT = 512  # passes that a prediction looks back: 256 micro-batches


class Log:
    """See the module's docstring. One per root.

    Callers handle an expected token themselves, since a call would cost more than the work:
    `if log.expected == token: log.expected = next(log.ahead, NOTHING)`, else `log.next(token)`.

    Attributes:
        kind: of the current pass, and the state in which it began; None outside of passes.
        previous: the tokens of the previous pass of this kind; empty if there was none.
        expected: the next token if the pass repeats `previous`; `NOTHING` once it differs, and at the end.
        ahead: iterator over the tokens after `expected`.
        left: where the pass first differed: the expected and the actual token, either of which may be `NOTHING`; None
            while it repeats.
        complete: kinds of passes that have ended at least once.

    >>> log = Log()
    >>> def repeats(*tokens):
    ...     log.begin(FORWARD)
    ...     expected = [log.next(token) for token in tokens]
    ...     log.end()
    ...     return expected
    >>> FORWARD = 0
    >>> repeats(7, 8), repeats(7, 9, 8), repeats(7, 9, 8)
    ([False, False], [True, False, False], [True, True, True])
    >>> log.expects(FORWARD)
    True
    """

    def __init__(self) -> None:
        self._tokens: dict[Hashable, list[int]] = {}  # by kind and state, in the order in which passes ended
        self._letters: dict[int, str] = {}  # by kind
        self._history = ""  # letters of kinds, newest first
        self._around: list[tuple[Any, ...]] = []  # the passes around the current one, innermost last
        self._sum = 0  # checksum of the tokens since the ranks last agreed, up to the current pass
        self.complete: set[int] = set()
        self._start(None)

    def expects(self, kind: int) -> bool:
        """Whether a pass of this kind comes next if passes repeat their pattern."""
        return following(self._history) == self._letters.get(kind, "")

    # A pass.

    def begin(self, kind: int, state: Hashable = None) -> None:
        """Begin a pass.

        Args:
            kind: a token, the same on all ranks.
            state: passes of the same kind that begin in different states issue different tokens.
        """
        letter = self._letters.get(kind) or self._new_letter(kind)
        self._history = (letter + self._history)[:_MEMORY]
        if self.kind is not None:
            self._sum = _mixed(self.taken(), self._sum)
        self._around.append((self.kind, self.previous, self.ahead, self.expected, self.left, self._seen, self._strayed))
        self._start((kind, state))

    def _new_letter(self, kind: int) -> str:
        if len(self._letters) == _MEMORY:  # most of them are of passes that nobody remembers
            self._letters.clear()
            self._history = ""
            self.complete = {each for each in self.complete if each & VERB == FORWARD}
        return self._letters.setdefault(kind, chr(len(self._letters)))

    def turn(self, state: Hashable) -> None:
        """Continue the current pass as a pass of its kind that began in this state."""
        assert self.kind is not None
        kind, _ = self.kind
        self._remember()
        self._start((kind, state))

    def _start(self, kind: tuple[int, Hashable] | None) -> None:
        self.kind = kind
        self.previous = self._tokens.get(kind, [])
        self.ahead = iter(self.previous)
        self.expected = next(self.ahead, NOTHING)
        self.left: tuple[int, int] | None = None
        self._seen: list[int] = []  # the pass's tokens, once it differs from `previous`
        self._strayed = False

    def next(self, token: int) -> bool:
        """Add the pass's next token; return whether it was expected. Outside of passes: True."""
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
        """Record that the pass needs this token although it has gathered a different unit ahead.

        The pass's tokens then show a wrong order, so the next pass of the kind gathers nothing ahead, and its tokens
        show the real order.
        """
        self._leave(expected, token)
        self._strayed = True

    def _leave(self, expected: int, token: int) -> None:
        if self.left is None:
            self._seen, self.expected, self.left = self.taken(), NOTHING, (expected, token)

    def taken(self) -> list[int]:
        """The tokens of the current pass so far."""
        if self.left is not None:
            return self._seen
        return self.previous[: len(self.previous) - length_hint(self.ahead) - (self.expected != NOTHING)]

    def end(self) -> tuple[int, int, int] | None:
        """End the pass; its tokens become those expected of its kind.

        Returns:
            Where it first differed: its kind, the expected and the actual token; None if it repeated all.
        """
        if self.kind is None:
            return None
        kind, previous = self.kind[0], self.previous
        self.complete.add(kind)
        left = self._remember()
        self._resume_outer()
        return (kind, *left) if previous and left is not None else None

    def lose(self) -> None:
        """End passes after an exception. They count as they are: on ranks without the exception they ended normally."""
        while self.kind is not None:
            self._remember()
            self._resume_outer()

    def _resume_outer(self) -> None:
        """Continue the pass around the pass that is over."""
        around = self._around.pop()
        self.kind, self.previous, self.ahead, self.expected, self.left, self._seen, self._strayed = around

    def _remember(self) -> tuple[int, int] | None:
        """Remember the current pass's tokens; return where it first differed from the previous pass of its kind."""
        if self.expected != NOTHING:
            self._leave(self.expected, NOTHING)
        tokens = self.previous if self.left is None else self._seen
        self._sum = _mixed(tokens, self._sum)
        self._tokens.pop(self.kind, None)
        if not self._strayed:
            self._tokens[self.kind] = tokens
        if len(self._tokens) > _KINDS:
            del self._tokens[next(iter(self._tokens))]
        return self.left

    def forget(self) -> None:
        """Discard all tokens: everything that follows is new."""
        for memory in (self._around, self._tokens, self._letters, self.complete):
            memory.clear()
        self._history = ""
        self._sum = 0
        self._start(None)

    # Questions.

    def next_gather(self) -> int | None:
        """The unit whose gather the pass is expected to issue next; None if the expected token is not a gather."""
        token = self.expected
        return token >> VERB_BITS if token & VERB == GATHER else None

    def next_gathers(self, depth: int) -> list[int]:
        """Up to `depth` units that are gathered next if the pass repeats the previous pass of its kind.

        Skips reductions: a gather may be issued before a reduction that is expected first. The pass then differs from
        `previous`, once, and its gathers still show its progress.
        """
        if self._strayed:
            return []
        if self.left is None:
            coming = _gathers_in([self.expected, *copy(self.ahead)])
        else:
            gathers, issued = list(_gathers_in(self.previous)), list(_gathers_in(self._seen))
            coming = iter(gathers[len(issued) :] if gathers[: len(issued)] == issued else ())
        return list(islice(coming, max(0, depth)))

    def fingerprint(self) -> int:
        """A checksum, below 2^32, of the tokens issued since the ranks last agreed; they agree now.

        Computed once per pass rather than per token, which costs a step less. Tokens of a pass that is still running
        when ranks agree are included in the next fingerprint, too.
        """
        checksum, self._sum = _mixed(self.taken(), self._sum), 0
        return checksum


def _mixed(tokens: Sequence[int], before: int) -> int:
    return zlib.crc32(array("Q", tokens).tobytes(), before) if tokens else before


def _gathers_in(tokens: Iterable[int]) -> Iterator[int]:
    """The units that these tokens gather."""
    return (token >> VERB_BITS for token in tokens if token & VERB in (GATHER, REGATHER))


def following(history: str) -> str | None:
    """The kind of pass that followed the most recent passes when they last occurred; None if they are new.

    Looks for the longest stretch of recent passes that occurred before; of several occurrences, the latest counts.

    Args:
        history: a letter for each pass, newest first. Stretches of up to half of it are looked for.

    >>> following("abacaba"[::-1])
    'c'
    """
    limit = min(len(history) // 2, _CONTEXT)
    at = history.find(history[:limit], 1)  # the usual case: a short pattern repeats
    if at < 0:  # bisect: the prefixes of a stretch that recurs recur too
        longest = bisect_left(range(1, limit + 1), True, key=lambda length: history.find(history[:length], 1) < 0)
        at = history.find(history[:longest], 1) if longest else 0
    return history[at - 1] if at > 0 and limit else None
