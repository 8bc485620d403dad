"""What a rank has issued, a number for each thing, in a bounded deque: recording one is one append.

A number holds, from its lowest bits, the verb, the unit (its index plus `ROOT` times the number of its root) and the
turn. Every one differs from the one before it, as turns count, so that the last number tells whether a rank got on.
Which step it is stands before each pass, as a number of its own, with the steps in the place of the turn.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

VERBS = (
    *("forward", "gather", "backward", "gather for backward", "reduce", "end of backward", "compare", "agreement"),
    *("check of what stayed gathered", "beginning of keep_gathered", "step"),
)
"""What a record may tell; written as an index."""
FORWARD, GATHER, BACKWARD, REGATHER, REDUCE, END, COMPARE, AGREEMENT, CHECK, KEEP, STEP = range(len(VERBS))
_MOVES = (GATHER, REGATHER, REDUCE)
LENGTH = 2048

VERB_BITS = 4
_UNIT_BITS = 28
ROOT = 1 << 16
TURN = 1 << VERB_BITS + _UNIT_BITS
"""What one turn adds to a number."""
MOST_ROOTS = (1 << _UNIT_BITS) // ROOT
_MOST_STEPS = 1 << 32


class Record(NamedTuple):
    """One thing that the engine issued.

    Attributes:
        word: the number that it was recorded by.
        turn: which of its root's this is, from 1 (anew after 2^31): alike on ranks that run alike.
        step: finished steps of the root then (modulo 2^32); those of the last one that stepped if that is too long ago.
        unit: index in its root, plus `ROOT` times the number of the root; 0 is of no root.
        verb: see `VERBS`.
    """

    word: int
    turn: int
    step: int
    unit: int
    verb: int

    def named(self, names: dict[int, list[str]], nbytes: dict[int, list[int]]) -> dict[str, Any]:
        """It with names in place of numbers, and the bytes that its unit gathers or reduces (0 where it does not).

        Args:
            names, nbytes: of the units of a root, by its number.
        """
        root, index = divmod(self.unit, ROOT)
        units, sizes = names.get(root, []), nbytes.get(root, [])
        return {
            "number": self.word,
            "root": root,
            "verb": VERBS[self.verb],
            "unit": (units[index] or "(root)") if index < len(units) else f"unit {index}",
            "bytes": sizes[index] if self.verb in _MOVES and index < len(sizes) else 0,
            "turn": self.turn,
            "step": self.step,
        }


def word(verb: int, unit: int) -> int:
    """A number without its turn, to which `TURN` times the turn is added."""
    return verb | unit << VERB_BITS


def step_word(unit: int, step: int) -> int:
    """Says how many steps of the root that has this unit are finished, of the numbers to come."""
    return word(STEP, unit) + step % _MOST_STEPS * TURN


def records_of(log: deque[int], steps: int) -> list[Record]:
    """What the log tells, oldest first.

    Args:
        log: other threads may append meanwhile.
        steps: finished steps of the root that stepped last.
    """
    while True:
        try:
            words = list(log)
            break
        except RuntimeError:  # it grew while it was copied
            continue
    records: list[Record] = []
    step_of: dict[int, int] = {}  # by root
    for each in words:
        rest, verb = divmod(each, 1 << VERB_BITS)
        turn, unit = divmod(rest, 1 << _UNIT_BITS)
        if verb == STEP:
            step_of[unit // ROOT] = turn
        else:
            records.append(Record(each, turn, step_of.get(unit // ROOT, steps), unit, verb))
    return records
