"""What a rank does now, in memory that its watcher reads: also while the rank is stopped, stuck in native code or dead.

    bytes 0..71      header, one field each
    ring             the last 2,048 things that the engine issued, a word of 8 bytes each (`word`)
    note             what the rank raised, as text
    verdict          what the watcher found, as text, which the rank raises

The rank writes header, ring and note; the watcher writes verdict, and `VERDICT` last. What a training step writes is as
little as can be: two words per gather or reduction. Which step it is stands before each pass, as a record of its own.
In a step none of this is in the processor's caches, so that every object touched counts (`benchmarks/checks.py`).

Only the standard library is imported here, and in all files that the watcher's process loads: it must start in
milliseconds and live without torch.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

VERBS = (
    *("forward", "gather", "backward", "gather for backward", "reduce", "end of backward", "compare", "agreement"),
    *("check of what stayed gathered", "beginning of keep_gathered", "step"),
)
"""What a record may tell; written as an index."""
FORWARD, GATHER, BACKWARD, REGATHER, REDUCE, END, COMPARE, AGREEMENT, CHECK, KEEP, _STEP = range(len(VERBS))

ROOT = 1 << 16
TURN = 1 << 32
"""What one turn adds to a record's word."""
_RING = 2048
LAST = _RING - 1
_TEXT = 64 * 1024

# Header: offset of each field. All are 8 bytes.
_COUNT, _WAITING, _WAIT_SINCE, _STEPS, _NOTE_AT, _ENDED, VERDICT, _LEAVES, _TICKS = range(0, 72, 8)
_AT_RING = 72
_AT_NOTE = _AT_RING + _RING * 8
_AT_VERDICT = _AT_NOTE + _TEXT
SIZE = _AT_VERDICT + _TEXT

COUNT_WORD, VERDICT_WORD, RING_WORD = _COUNT // 8, VERDICT // 8, _AT_RING // 8
VERB_BITS = 4
_UNIT_BITS = 28  # of a word, from the lowest the verb, the unit, the turn
MOST_ROOTS = (1 << _UNIT_BITS) // ROOT
_MOST_STEPS = 1 << 32  # that a record tells, in the place of the turn

_u64 = struct.Struct("<Q")
_f64 = struct.Struct("<d")
_now = time.time  # of one clock for all processes of a machine, and near that of others


class Record(NamedTuple):
    """One thing that the engine issued.

    Attributes:
        number: of this rank's records, from 1.
        turn: which of its root's this is, from 1 (anew after 2^31): alike on ranks that run alike. 0: of no root.
        step: finished steps of the root then (modulo 2^32); those of the last one that stepped if that is too long ago.
        unit: index in its root, plus `ROOT` times the number of the root.
        verb: see `VERBS`.
    """

    number: int
    turn: int
    step: int
    unit: int
    verb: int


def word(verb: int, unit: int) -> int:
    """A record without turn and step. `TURN` times its turn is added to it."""
    return verb | unit << VERB_BITS


class Board:
    """See the module's docstring.

    Args:
        fd: of the shared memory; None: made here. Memory that no watcher can share (-1) where there are no descriptors.
        condemned: called when something is recorded though there is a verdict.

    Attributes:
        words: the memory as words of 8 bytes; `agreement/position.py` writes records there itself.
        number: of the record that was written last.
        moved: when `look` last found that something had been recorded; seconds since the epoch.
    """

    def __init__(self, fd: int | None = None, condemned: Callable[[], None] | None = None) -> None:
        if fd is None:
            try:
                fd = _shared_memory()
                os.ftruncate(fd, SIZE)
            except OSError:  # no descriptors are left: there will be no watcher either
                fd = -1
        self.fd = fd
        self._owner = os.getpid()
        self._memory = mmap.mmap(fd, SIZE)
        self.words = memoryview(self._memory).cast("Q")
        self.number = 0
        self.moved = 0.0
        self._seen = 0
        self._on_verdict = condemned

    # The rank writes.

    def record(self, word: int) -> None:
        """Note that something is issued.

        Args:
            word: see the function of that name.
        """
        words = self.words
        if words[VERDICT_WORD] and self._on_verdict is not None:
            self._on_verdict()
        self.number = number = self.number + 1
        words[RING_WORD + (number & LAST)] = word
        words[COUNT_WORD] = number

    def record_step(self, unit: int, step: int) -> None:
        """Note how many steps are finished; of the root that has this unit, for the records to come."""
        self.record(word(_STEP, unit) + step % _MOST_STEPS * TURN)

    def waits(self, number: int) -> None:
        """The rank has waited a while for what has this number (0: unknown); it goes on waiting."""
        _u64.pack_into(self._memory, _WAITING, number)
        _f64.pack_into(self._memory, _WAIT_SINCE, _now())

    def waits_no_more(self) -> None:
        """The wait is over."""
        _f64.pack_into(self._memory, _WAIT_SINCE, 0.0)

    def stepped(self, steps: int) -> None:
        """So many steps are done in all."""
        _u64.pack_into(self._memory, _STEPS, steps)

    def tick(self) -> None:
        """The rank gets on, though nothing else shows it: it writes or reads files."""
        _u64.pack_into(self._memory, _TICKS, self.ticks + 1)

    def note(self, text: str, over: bool = False) -> None:
        """What the rank raised; `over`: in a pass, and the program may go on."""
        self._write(_AT_NOTE, text)
        _u64.pack_into(self._memory, _NOTE_AT, self.number + (not over))

    def end(self) -> None:
        """The interpreter ends by itself: it was not killed. A forked child's end is not that of the process."""
        if os.getpid() == self._owner:
            _u64.pack_into(self._memory, _ENDED, 1)

    @property
    def verdict(self) -> str | None:
        """What the watcher found, if it found something."""
        return self._read(_AT_VERDICT) if self._memory[VERDICT] else None

    def condemned(self) -> bool:
        """Whether there is a verdict."""
        return self._memory[VERDICT] != 0

    # The watcher reads, and writes the verdict.

    def look(self) -> None:
        """See whether something was recorded since the last look: a rank spends no time on telling the time."""
        if (count := self.count) != self._seen:
            self._seen, self.moved = count, _now()

    def condemn(self, text: str) -> None:
        """Give the verdict."""
        self._write(_AT_VERDICT, text)
        self._memory[VERDICT] = 1

    def leave(self) -> None:
        """The rank raises the verdict now, or that a connection broke."""
        self._memory[_LEAVES] = 1

    @property
    def leaves(self) -> bool:
        """Whether the rank knows that it cannot go on."""
        return self._memory[_LEAVES] != 0 or self.ended

    def reprieve(self) -> None:
        """Take the verdict back."""
        self._memory[VERDICT] = self._memory[_LEAVES] = 0

    @property
    def count(self) -> int:
        """Number of the last record."""
        return int(_u64.unpack_from(self._memory, _COUNT)[0])

    @property
    def steps(self) -> int:
        """See `stepped`."""
        return int(_u64.unpack_from(self._memory, _STEPS)[0])

    @property
    def ticks(self) -> int:
        """See `tick`."""
        return int(_u64.unpack_from(self._memory, _TICKS)[0])

    @property
    def waiting(self) -> tuple[int, float] | None:
        """What is waited for, by number, and since when; None if nothing is, for long."""
        since = _f64.unpack_from(self._memory, _WAIT_SINCE)[0]
        return (int(_u64.unpack_from(self._memory, _WAITING)[0]), since) if since else None

    @property
    def ended(self) -> bool:
        """See `end`."""
        return self._memory[_ENDED] != 0

    @property
    def raised(self) -> str | None:
        """What the rank raised, unless it has gone on since."""
        at = _u64.unpack_from(self._memory, _NOTE_AT)[0]
        return self._read(_AT_NOTE) if at and at == self.count + 1 else None

    @property
    def caught(self) -> tuple[int, str] | None:
        """What the rank raised before it went on, and the number of the record after which it did."""
        at = _u64.unpack_from(self._memory, _NOTE_AT)[0]
        return (int(at), self._read(_AT_NOTE)) if at and at <= self.count else None

    @property
    def last(self) -> Record | None:
        """What was issued last."""
        records = self.records()
        return records[-1] if records else None

    def records(self) -> list[Record]:
        """The last records, oldest first. Those that are being written while this reads are left out."""
        count = self.count
        found: list[Record] = []
        steps: dict[int, int] = {}  # by root
        for number in range(max(1, count - _RING + 1), count + 1):
            rest, verb = divmod(self.words[RING_WORD + (number & LAST)], 1 << VERB_BITS)
            turn, unit = divmod(rest, 1 << _UNIT_BITS)
            root = unit // ROOT
            if verb == _STEP:
                steps[root] = turn
            else:
                found.append(Record(number, turn, steps.get(root, self.steps), unit, verb))
        oldest = self.count + 2 - _RING  # the one before it is maybe being written over
        return [record for record in found if record.number >= oldest]

    def _write(self, at: int, text: str) -> None:
        data = text.encode(errors="replace")[: _TEXT - 8]
        _u64.pack_into(self._memory, at, len(data))
        self._memory[at + 8 : at + 8 + len(data)] = data

    def _read(self, at: int) -> str:
        length = min(int(_u64.unpack_from(self._memory, at)[0]), _TEXT - 8)
        return self._memory[at + 8 : at + 8 + length].decode(errors="replace")


def _shared_memory() -> int:
    """A descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fullshard")
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd
