"""Where a rank is: what it is about to issue, told to its watcher, and compared with other ranks where that is new.

Ranks that issue different collectives at one time swap units' values without a word where sizes agree; where they do
not, gloo ends the process and NCCL waits for ever. So nothing is issued that ranks have not agreed on: along the first
pass of every kind (`first_pass.py`), and whenever this rank leaves the course that it has taken before. Ranks that
leave it alike compare, and go on; one that leaves it alone waits for the others, which wait for it in turn, until the
watcher tells all of them.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist

from ..comm import Comm
from ..mesh import Axis, MeshAxes
from ..policies import Check, Unused
from ..shard import Unit
from ..watcher import BACKWARD, COMPARE, END, FORWARD, GATHER, KEEP, RANK, TURN, VERB_BITS, step_word, word
from .aside import rows_of_all
from .course import MODEL, MOST_UNITS, NOTHING, SIZES, VERB, Course
from .messages import goes_on_differently, other_forward_order, unknown_setting

_MOST_TURNS = (1 << 31) * TURN


_MOVES = attrgetter("unit.touched.moves")


class Holder(Protocol):
    """What is known here of a unit: its `Runner`."""

    unit: Unit


class Position:
    """See the module's docstring. One per root.

    Args:
        units: all under the root.
        names: theirs.
        comm: collectives.
        check: see `Check`.
        unused: see `Unused`.

    Attributes:
        step: backwards that reduced so far.
        compares: whether what is new is compared here; not along a first pass, which compares more.
        reduced: whether the pass that runs now reduced something.
    """

    def __init__(
        self,
        units: Sequence[Holder],
        names: list[str],
        comm: Comm,
        check: Check = "first",
        unused: Unused = "error",
    ) -> None:
        self.units, self.names, self.comm, self.check = units, names, comm, check
        self._zeros = unused == "zeros" and check != "every"
        self.step = 0
        self.compares, self.reduced = True, False
        self.course = Course()
        self._mixed = 0  # see `fingerprint`, as far as it was worked out
        self._axes = _compared([one.unit for one in units], comm)
        self._place = RANK.new_root(self, names, [one.unit.gathered_bytes for one in units])
        self._gathers = (0, self._gathered())  # after so many moves of storage, a checksum
        self._warned = False  # that an order changed
        self.turns = self._count_turns()

    def _count_turns(self) -> count[int]:
        """What is recorded next, but for its token."""
        return count(word(0, self._place) + TURN, TURN)

    def begin(self, verb: int, index: int, state: Hashable = None) -> None:
        """A pass begins.

        Args:
            verb: `FORWARD` or `BACKWARD`.
            index: of its kind.
            state: in which it begins, see `Course.begin`.

        Raises:
            DivergenceError: other ranks begin another one.
        """
        self.reduced = False
        RANK.record(step_word(self._place, self.step))
        if self._record(verb, index // 2 if verb == FORWARD else 0) > _MOST_TURNS:
            self.turns = self._count_turns()
        kind = verb, index
        if self.check != "first" or not self.course.expects(kind):
            self._compare(verb, index)  # first: where this raises, nothing has begun
        self.course.begin(kind, state)

    def turn(self, state: Hashable) -> None:
        """The pass goes on as one that began in this state."""
        self._mixed = _mixed(self.course.running.untold(), self._mixed)
        self.course.turn(state)

    def begin_model(self) -> None:
        """This model is used for the first time. Ranks that have met say so before anything else: others may gather.

        Raises:
            DivergenceError: other ranks do something else.
        """
        if self._axes is not None and all(axis.lines.is_open for axis in self._axes.all if axis.size > 1):
            self._compare(MODEL, 0)

    def compare_sizes(self) -> None:
        """Compare with the other ranks if units have changed their storage on this one, and gather other sizes now.

        Raises:
            DivergenceError: other ranks gather other sizes, or begin a pass.
        """
        before, sizes = self._gathers
        moves = sum(map(_MOVES, self.units))
        if moves != before:
            self._gathers = (moves, found := self._gathered())
            if found != sizes:
                self._compare(SIZES, found)

    def _gathered(self) -> int:
        """A checksum of what units gather, in bytes and dtypes."""
        facts = [
            (str(bucket.storage_dtype), one.unit.gathered_bytes) for one in self.units for bucket in one.unit.buckets
        ]
        return zlib.crc32(repr(facts).encode())

    def issue(self, verb: int, index: int) -> None:
        """A unit's gather or reduction is about to be issued.

        Raises:
            DivergenceError: other ranks are about to issue another one; or the watchers found the ranks stuck.
        """
        # The only thing here that runs with every collective, out of cold caches, where a call takes as long as ten
        # lines: `Course.next` is written out for what goes on as it did.
        running, token = self.course.running, verb | index << VERB_BITS
        if running.expected == token:
            running.expected = next(running.ahead, NOTHING)
        elif self.course.next(token):  # outside of passes
            self._mixed = _mixed([token], self._mixed)
        else:
            self._leave_course(verb, index)
        RANK.record(token + next(self.turns))

    def next_gather(self) -> int | None:
        """The unit whose gather a pass issues next if it goes on as it is known to; None if that is no gather."""
        token = self.course.running.expected
        return token >> VERB_BITS if token & VERB == GATHER else None

    def stray(self, expected: int, index: int) -> None:
        """A unit is about to be gathered as it is needed, though another one was expected first and gathered ahead.

        Raises:
            DivergenceError: other ranks do not leave that one out; the watchers name it.
        """
        self.course.running.strays(*[GATHER | unit << VERB_BITS for unit in (expected, index)])
        self._leave_course(GATHER, expected)

    def next_gathers(self, depth: int) -> Sequence[int]:
        """The units that are gathered next in the pass that runs now; see `Running.next_gathers`."""
        return self.course.running.next_gathers(depth)

    def take_fingerprint(self) -> int:
        """Of what was issued since the ranks last agreed, which they do now; below 2^32.

        A checksum of the tokens: worked out once a pass rather than with each, which costs a step less.
        """
        found, self._mixed = _mixed(self.course.untold(), self._mixed), 0
        return found

    def tell(self, verb: int, index: int) -> None:
        """A unit is gathered as a user asks for it, outside of passes and maybe on one rank alone."""
        RANK.record(word(verb, self._place + index))

    def keep(self, index: int, count: int) -> None:
        """A user asks, between passes, for units to stay gathered, on every rank: the passes to come run otherwise.

        Args:
            index: of the first of them.
            count: how many they are.

        Raises:
            DivergenceError: other ranks ask for others, or begin a pass.
        """
        self.begin(KEEP, index * MOST_UNITS + min(count, MOST_UNITS - 1))
        self.end()

    def end(self) -> None:
        """The pass is over."""
        self.compares = True
        over = self.course.running
        self._mixed = _mixed(over.untold(), self._mixed)
        self.course.end()
        if over.left is not None and over.known and not self._warned:
            self._warn_of_another_order(over.kind[0], over.left)
        if self.reduced:
            self.reduced = False
            self.step += 1
            RANK.steps = self.step
            self._record(END, 0)

    def lose(self) -> None:
        """After an exception, maybe on this rank alone: what was issued was issued by all."""
        self.compares = True
        self._mixed = _mixed(self.course.untold(), self._mixed)
        self.course.lose()

    def forget(self) -> None:
        """Each rank learned its own course: all begin anew."""
        self._mixed, self.compares = 0, True
        self.course.forget()

    def _warn_of_another_order(self, kind: Any, left: tuple[int, int]) -> None:
        """Say once, under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, that a forward left the order of the one before it.

        PyTorch's wrapper gives this warning there. Ranks are compared along a first pass and wherever one leaves its
        course; this names the units.
        """
        verb, _ = kind
        if verb != FORWARD or dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
            return
        self._warned = True
        rank = self.units[0].unit.rank
        before, now = [None if token == NOTHING else token >> VERB_BITS for token in left]
        warnings.warn(other_forward_order(self.names, rank, before, now), stacklevel=5)

    def _leave_course(self, verb: int, index: int) -> None:
        """What comes next is not what came there before."""
        if self.compares:
            self._compare(verb, index)

    def _record(self, verb: int, index: int) -> int:
        turn = next(self.turns)
        RANK.record(word(verb, index) + turn)
        return turn

    def _compare(self, verb: int, index: int) -> None:
        axes = self._axes
        if axes is None:
            return
        self._record(COMPARE, index if verb not in (FORWARD, BACKWARD, KEEP, SIZES, MODEL) else 0)
        for axis in axes.all:
            if axis.size > 1:
                self._compare_over(axis, verb, index, axes.device)

    def _compare_over(self, axis: Axis, verb: int, index: int, device: torch.device) -> None:
        rows = rows_of_all([[verb, index]], [axis], self.comm, device)
        other = next((i for i, row in enumerate(rows) if row != rows[0]), None)
        if other is None:
            return
        self.forget()
        ranks = axis.ranks or tuple(range(axis.size))
        raise goes_on_differently(self.step, self.names, (ranks[0], ranks[other]), (rows[0], rows[other]), self._zeros)


class Every(Position):
    """Where `check="every"`: also what is known is compared."""

    def issue(self, verb: int, index: int) -> None:
        """See `Position.issue`."""
        self._compare(verb, index)
        super().issue(verb, index)

    def _leave_course(self, verb: int, index: int) -> None:
        """Nothing: it was compared before."""


def _mixed(tokens: Sequence[int], before: int) -> int:
    return zlib.crc32(array("Q", tokens).tobytes(), before) if tokens else before


def checked(check: str, unused: str) -> tuple[Check, Unused]:
    """These settings, if they are ones.

    Raises:
        ConfigError: one is none.
    """
    for name, value, kinds in (("check", check, get_args(Check)), ("unused", unused, get_args(Unused))):
        if value not in kinds:
            raise unknown_setting(name, value, kinds)
    return check, unused  # type: ignore[return-value]


def _compared(units: Sequence[Unit], comm: Comm) -> MeshAxes | None:
    """The largest mesh of these units; None if there is nobody to compare with."""
    found = [bucket.axes for unit in units for bucket in unit.buckets]
    axes = max(found, key=lambda axes: axes.world, default=None)
    if axes is None or axes.world == 1 or not comm.communicates or axes.shard.backend == "fake":
        return None
    return axes
