"""A rank's position: records what it is about to issue for its watcher, and compares it with other ranks where new.

Ranks that issue different collectives at the same time silently swap units' values if sizes agree; if they do not, gloo
aborts the process and NCCL waits forever. So ranks agree on everything before they issue it: during the first pass of
every kind (`first_pass.py`), and whenever a rank leaves the order that it issued before (`log.py`). If all ranks leave
it in the same way they compare and go on. A rank that leaves it alone waits for the others, and they for it, until the
watcher reports this on all of them.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import get_args

import torch.distributed as dist

from ..comm import Comm
from ..errors import DivergenceError, invalid_argument
from ..mesh import MeshAxes
from ..policies import Check, Unused
from ..shard import Unit
from ..watcher import (
    CHECK,
    COMPARE,
    END,
    FORWARD,
    GATHER,
    KEEP,
    RANK,
    REDUCE,
    REGATHER,
    TURN,
    VERB_BITS,
    step_word,
    word,
)
from .exchange import agree_on
from .first_pass import largest_mesh
from .log import MODEL, MOST_UNITS, NOTHING, SIZES, VERB, Log
from .messages import compared_alone, goes_on_differently, other_forward_order

_MOST_TURNS = (1 << 31) * TURN
_MOVES = attrgetter("touched.moves")


class Position:
    """See the module's docstring. One per root.

    Args:
        units: all units under the root.
        names: their names.
        comm: collectives.
        check: see `Check`.
        unused: see `Unused`.

    Attributes:
        log: the tokens issued.
        axes: the mesh whose ranks compare; None if there is no rank to compare with.
        step: number of backwards that have reduced.
        compares: whether new tokens are compared here; not during a first pass, which compares more.
        reduced: whether the current pass has reduced anything.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: list[str],
        comm: Comm,
        check: Check = "first",
        unused: Unused = "error",
    ) -> None:
        self.units, self.names, self.comm, self.check = units, names, comm, check
        self._zeros = unused == "zeros" and check != "every"
        self.log = Log()
        self.step = 0
        self.compares, self.reduced = True, False
        self.axes = _compared(units, comm)
        self._place = RANK.new_root(self, names, [unit.gathered_bytes for unit in units])
        self._gathers = (0, self._gathered())  # number of storage moves, and the checksum after them
        self._warned = False  # whether it warned of a changed order
        self.turns = self._count_turns()

    def _count_turns(self) -> count[int]:
        """The numbers to record, without their tokens."""
        return count(word(0, self._place) + TURN, TURN)

    def begin(self, verb: int, index: int, state: Hashable = None) -> None:
        """Begin a pass.

        Args:
            verb: `FORWARD` or `BACKWARD`.
            index: of its kind.
            state: in which it begins, see `Log.begin`.

        Raises:
            DivergenceError: other ranks begin a different pass.
        """
        self.reduced = False
        RANK.record(step_word(self._place, self.step))
        turn, unit = next(self.turns), index // 2 if verb == FORWARD else 0
        RANK.record((verb | unit << VERB_BITS) + turn)
        if turn > _MOST_TURNS:
            self.turns = self._count_turns()
        kind = verb | index << VERB_BITS
        if self.check != "first" or not self.log.expects(kind):
            self._compare(kind)  # before anything else: if it raises, no pass has begun
        self.log.begin(kind, state)

    def begin_model(self) -> None:
        """Compare before this model's first use, if the engine's connections are open: other ranks may be gathering.

        Raises:
            DivergenceError: other ranks do something else.
        """
        if self.axes is not None and all(axis.lines.is_open for axis in self.axes.all if axis.size > 1):
            self._compare(MODEL)

    def compare_sizes(self) -> None:
        """Compare with the other ranks if units' storage was replaced on this rank and their gather sizes changed.

        Raises:
            DivergenceError: other ranks gather different sizes, or begin a pass.
        """
        before, sizes = self._gathers
        moves = sum(map(_MOVES, self.units))
        if moves != before:
            self._gathers = (moves, checksum := self._gathered())
            if checksum != sizes:
                self._compare(word(SIZES, checksum))

    def _gathered(self) -> int:
        """A checksum of what units gather, in bytes and dtypes."""
        facts = [(str(bucket.storage_dtype), unit.gathered_bytes) for unit in self.units for bucket in unit.buckets]
        return zlib.crc32(repr(facts).encode())

    def issue(self, verb: int, index: int) -> None:
        """Record a unit's gather or reduction that is about to be issued, and compare it if it is new.

        Raises:
            DivergenceError: other ranks are about to issue a different one; or the watchers reported stuck ranks.
        """
        # Runs with every collective, with cold caches, where a call costs as much as ten lines: so `Log.next` is
        # inlined for expected tokens.
        log, token = self.log, verb | index << VERB_BITS
        if log.expected == token:
            log.expected = next(log.ahead, NOTHING)
        elif not log.next(token):
            self._leave_log(token)
        RANK.record(token + next(self.turns))

    def stray(self, expected: int, index: int) -> None:
        """Note that a unit is needed and gathered now, although a different one was expected and gathered ahead.

        Raises:
            DivergenceError: other ranks do run the expected unit; the watchers name it.
        """
        token = word(GATHER, expected)
        self.log.stray(token, word(GATHER, index))
        self._leave_log(token)

    def tell(self, verb: int, index: int) -> None:
        """Record a gather that the user requested, outside of passes and possibly on this rank only."""
        RANK.record(word(verb, self._place + index))

    def keep(self, index: int, count: int) -> None:
        """Compare the users' requests, between passes, for units to stay gathered: they change what passes issue.

        Args:
            index: of the first of the units.
            count: number of units.

        Raises:
            DivergenceError: other ranks request different units, or begin a pass.
        """
        self.begin(KEEP, index * MOST_UNITS + min(count, MOST_UNITS - 1))
        self.end()

    def end(self) -> None:
        """End the pass."""
        self.compares = True
        if (left := self.log.end()) is not None and not self._warned:
            self._warn_of_another_order(*left)
        if self.reduced:
            self.reduced = False
            self.step += 1
            RANK.steps = self.step
            self._record(END, 0)

    def lose(self) -> None:
        """End passes after an exception, possibly on this rank only: all ranks issued the same up to there."""
        self.compares = True
        self.log.lose()

    def forget(self) -> None:
        """Discard the order that this rank learned; all ranks start anew."""
        self.compares = True
        self.log.forget()

    def _warn_of_another_order(self, kind: int, *tokens: int) -> None:
        """Warn once, under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, that a forward left the order of the previous forward.

        PyTorch's wrapper gives this warning in that mode. Ranks that leave their order compare in any case; the warning
        names the units.
        """
        if kind & VERB != FORWARD or dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
            return
        self._warned = True
        before, now = [None if token == NOTHING else token >> VERB_BITS for token in tokens]
        warnings.warn(other_forward_order(self.names, self.units[0].rank, before, now), stacklevel=5)

    def _leave_log(self, token: int) -> None:
        """Compare a token that differs from the expected one."""
        if self.compares:
            self._compare(token)

    def _record(self, verb: int, index: int) -> None:
        RANK.record((verb | index << VERB_BITS) + next(self.turns))

    def _compare(self, token: int) -> None:
        """Raise if other ranks are about to do something else. Collective."""
        if self.axes is not None:
            of_unit = token & VERB in (GATHER, REGATHER, REDUCE, CHECK)
            self._record(COMPARE, token >> VERB_BITS if of_unit else 0)
            agree_on(token, 0, self.axes, self.comm, self._differ, compared_alone(token, self.names))

    def _differ(self, ranks: Sequence[int], tokens: Sequence[int]) -> DivergenceError:
        self.forget()
        return goes_on_differently(self.step, self.names, ranks, tokens, self._zeros)


class Every(Position):
    """With `check="every"`: compares every token, expected or not."""

    def issue(self, verb: int, index: int) -> None:
        """See `Position.issue`."""
        self._compare(word(verb, index))
        super().issue(verb, index)

    def _leave_log(self, token: int) -> None:
        """Do nothing: `issue` has compared the token."""


def checked(check: str, unused: str) -> tuple[Check, Unused]:
    """Return these settings if they are valid.

    Raises:
        ConfigError: an unknown value.
    """
    for name, value, kinds in (("check", check, get_args(Check)), ("unused", unused, get_args(Unused))):
        if value not in kinds:
            expected = " or ".join(map(repr, kinds))
            raise invalid_argument(name, value, expected, f"omit it for the default, {kinds[0]!r}")
    return check, unused  # type: ignore[return-value]


def _compared(units: Sequence[Unit], comm: Comm) -> MeshAxes | None:
    """The largest mesh of these units; None if there is no rank to compare with."""
    axes = largest_mesh(units) if any([unit.buckets for unit in units]) else None
    if axes is None or axes.world == 1 or not comm.communicates or axes.shard.backend == "fake":
        return None
    return axes
