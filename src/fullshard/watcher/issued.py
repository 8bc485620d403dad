"""The log of what a rank issued: an integer per event, in a bounded deque, so that recording costs a single append.

An integer holds, from its lowest bits, the verb, the unit (its index plus `ROOT` times the number of its root) and the
turn. As turns count up, each integer differs from the previous, and the last shows whether a rank makes progress.
The step is recorded before each pass, as a separate integer with the number of finished steps in place of the turn.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

VERBS = (
    *("forward", "gather", "backward", "gather for backward", "reduce", "end of backward", "compare", "agreement"),
    *("check of what stayed gathered", "beginning of keep_gathered", "step"),
)
"""The kinds of events; an integer holds the index."""
FORWARD, GATHER, BACKWARD, REGATHER, REDUCE, END, COMPARE, AGREEMENT, CHECK, KEEP, STEP = range(len(VERBS))
_MOVES = (GATHER, REGATHER, REDUCE)
LENGTH = 2048

VERB_BITS = 4
_UNIT_BITS = 28
ROOT = 1 << 16
TURN = 1 << VERB_BITS + _UNIT_BITS
"""The increment of an integer per turn."""
MOST_ROOTS = (1 << _UNIT_BITS) // ROOT
_MOST_STEPS = 1 << 32


class Record(NamedTuple):
    """One event that the engine issued.

    Attributes:
        word: the integer in the log.
        turn: its position among the events of its root, from 1 (restarts after 2^31): equal on ranks that run alike.
        step: the root's finished steps at that time (modulo 2^32), if the log goes back that far; otherwise those of
            the root that stepped last.
        unit: index in its root, plus `ROOT` times the number of the root; root 0 means no root.
        verb: an index into `VERBS`.
    """

    word: int
    turn: int
    step: int
    unit: int
    verb: int

    def named(self, names: dict[int, list[str]], nbytes: dict[int, list[int]]) -> dict[str, Any]:
        """The record as a dict, with names for indices, and the bytes that its unit gathers or reduces (else 0).

        Args:
            names, nbytes: number of a root -> the names and bytes of its units.
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
    """The integer of an event without its turn; add `TURN` times the turn."""
    return verb | unit << VERB_BITS


def step_word(unit: int, step: int) -> int:
    """The integer that records the finished steps of a unit's root, for the integers that follow it in the log."""
    return STEP + (unit << VERB_BITS) + step % _MOST_STEPS * TURN


def records_of(log: deque[int], steps: int) -> list[Record]:
    """Decode the log, oldest record first.

    Args:
        log: may grow while it is read: other threads append.
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
    for entry in words:
        rest, verb = divmod(entry, 1 << VERB_BITS)
        turn, unit = divmod(rest, 1 << _UNIT_BITS)
        if verb == STEP:
            step_of[unit // ROOT] = turn
        else:
            records.append(Record(entry, turn, step_of.get(unit // ROOT, steps), unit, verb))
    return records
