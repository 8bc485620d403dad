"""Where a rank is: what it is about to issue, told to its watcher, and compared with other ranks where that is new.

Ranks that issue different collectives at one time swap units' values without a word where sizes agree; where they do
not, gloo ends the process and NCCL waits for ever. So nothing is issued that ranks have not agreed on: along the first
pass of every kind (`first_pass.py`), and whenever this rank leaves what it has issued before (`log.py`). Ranks that
leave it alike compare, and go on; one that leaves it alone waits for the others, which wait for it in turn, until the
watcher tells all of them.
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
from ..errors import DivergenceError
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
from .aside import agree_on
from .log import MODEL, MOST_UNITS, NOTHING, SIZES, VERB, Log
from .messages import goes_on_differently, other_forward_order, unknown_setting

_MOST_TURNS = (1 << 31) * TURN
_MOVES = attrgetter("touched.moves")


class Position:
    """See the module's docstring. One per root.

    Args:
        units: all under the root.
        names: theirs.
        comm: collectives.
        check: see `Check`.
        unused: see `Unused`.

    Attributes:
        log: what is issued.
        axes: over which ranks compare; None if there is nobody to compare with.
        step: backwards that reduced so far.
        compares: whether what is new is compared here; not along a first pass, which compares more.
        reduced: whether the pass that runs now reduced something.
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
            state: in which it begins, see `Log.begin`.

        Raises:
            DivergenceError: other ranks begin another one.
        """
        self.reduced = False
        RANK.record(step_word(self._place, self.step))
        if self._record(verb, index // 2 if verb == FORWARD else 0) > _MOST_TURNS:
            self.turns = self._count_turns()
        kind = word(verb, index)
        if self.check != "first" or not self.log.expects(kind):
            self._compare(kind)  # first: where this raises, nothing has begun
        self.log.begin(kind, state)

    def begin_model(self) -> None:
        """This model is used for the first time. Ranks that have met say so before anything else: others may gather.

        Raises:
            DivergenceError: other ranks do something else.
        """
        if self.axes is not None and all(axis.lines.is_open for axis in self.axes.all if axis.size > 1):
            self._compare(MODEL)

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
                self._compare(word(SIZES, found))

    def _gathered(self) -> int:
        """A checksum of what units gather, in bytes and dtypes."""
        facts = [(str(bucket.storage_dtype), unit.gathered_bytes) for unit in self.units for bucket in unit.buckets]
        return zlib.crc32(repr(facts).encode())

    def issue(self, verb: int, index: int) -> None:
        """A unit's gather or reduction is about to be issued.

        Raises:
            DivergenceError: other ranks are about to issue another one; or the watchers found the ranks stuck.
        """
        # The only thing here that runs with every collective, out of cold caches, where a call takes as long as ten
        # lines: `Log.next` is written out for what goes on as it did.
        log, token = self.log, verb | index << VERB_BITS
        if log.expected == token:
            log.expected = next(log.ahead, NOTHING)
        elif not log.next(token):
            self._leave_log(token)
        RANK.record(token + next(self.turns))

    def stray(self, expected: int, index: int) -> None:
        """A unit is about to be gathered as it is needed, though another one was expected first and gathered ahead.

        Raises:
            DivergenceError: other ranks do not leave that one out; the watchers name it.
        """
        token = word(GATHER, expected)
        self.log.stray(token, word(GATHER, index))
        self._leave_log(token)

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
        if (left := self.log.end()) is not None and not self._warned:
            self._warn_of_another_order(*left)
        if self.reduced:
            self.reduced = False
            self.step += 1
            RANK.steps = self.step
            self._record(END, 0)

    def lose(self) -> None:
        """After an exception, maybe on this rank alone: what was issued was issued by all."""
        self.compares = True
        self.log.lose()

    def forget(self) -> None:
        """Each rank learned its own order: all begin anew."""
        self.compares = True
        self.log.forget()

    def _warn_of_another_order(self, kind: int, *tokens: int) -> None:
        """Say once, under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, that a forward left the order of the one before it.

        PyTorch's wrapper gives this warning there. Ranks are compared along a first pass and wherever one leaves what
        it issued before; this names the units.
        """
        if kind & VERB != FORWARD or dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
            return
        self._warned = True
        before, now = [None if token == NOTHING else token >> VERB_BITS for token in tokens]
        warnings.warn(other_forward_order(self.names, self.units[0].rank, before, now), stacklevel=5)

    def _leave_log(self, token: int) -> None:
        """What comes next is not what came there before."""
        if self.compares:
            self._compare(token)

    def _record(self, verb: int, index: int) -> int:
        turn = next(self.turns)
        RANK.record(word(verb, index) + turn)
        return turn

    def _compare(self, token: int) -> None:
        """Raise if other ranks are about to do something else. Collective."""
        if self.axes is not None:
            of_unit = token & VERB in (GATHER, REGATHER, REDUCE, CHECK)
            self._record(COMPARE, token >> VERB_BITS if of_unit else 0)
            agree_on(token, 0, self.axes, self.comm, self._differ)

    def _differ(self, ranks: Sequence[int], tokens: Sequence[int]) -> DivergenceError:
        self.forget()
        return goes_on_differently(self.step, self.names, ranks, tokens, self._zeros)


class Every(Position):
    """Where `check="every"`: also what is known is compared."""

    def issue(self, verb: int, index: int) -> None:
        """See `Position.issue`."""
        self._compare(word(verb, index))
        super().issue(verb, index)

    def _leave_log(self, token: int) -> None:
        """Nothing: it was compared before."""


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
