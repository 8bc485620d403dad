"""The engine's actions as a stream of small frozen records, the same for tests, timelines and checks.

Without listeners each event site costs one attribute test. `Ledger` counts the bytes that come and go within a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Event:
    """One action of the engine.

    Attributes:
        verb: "gather" (an all-gather was issued), "wait_gather" (its result is needed now), "gathered" (its result may
            be used), "free" (the full bucket was released), "collect" (a backward's gradients were moved into the
            reduction buffer), "reduce" (a gradient reduction was issued), "all_reduce" (over the replicate axis),
            "wait_reduce" (the result of one of the two is needed now), "reduced" (gradients are in `.grad`).
        unit: name of the unit relative to the root ("(root)" for the root itself).
        nbytes: bytes of all ranks' slices together, padding included, as the unit's gather or reduction sends them (in
            8 bits, say; a communication hook may send fewer); for "all_reduce" those of one slice, and for "collect"
            those of the buffer.
        rank: global rank of the process that recorded it.
        time: seconds, `time.perf_counter()` of that process.
        live: bytes of gathered units, staging and reduction buffers alive on this rank right after the event.
        ranks: global ranks of the collective that was issued (gather, reduce, all_reduce); empty for other verbs.
        model: class of the root's module, numbered from the second model of the same class on: "Net", "Net 2".
    """

    verb: str
    unit: str
    nbytes: int
    rank: int
    time: float
    live: int
    ranks: tuple[int, ...] = ()
    model: str = ""


class EventStream:
    """Fan-out of events to listeners. `listeners` is empty unless events are being recorded."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []

    def emit(self, verb: str, unit: str, nbytes: int, rank: int, ledger: Ledger, ranks: tuple[int, ...] = ()) -> None:
        """Pass an event to every listener; call only under `if stream.listeners`."""
        event = Event(verb, unit, nbytes, rank, time.perf_counter(), ledger.live, ranks, ledger.model)
        for listener in self.listeners:
            listener(event)


stream = EventStream()
"""The process's event stream, shared by all models of this process."""


@contextmanager
def record_events(listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
    """Collect the engine's events while the block runs.

    Args:
        listener: called, in addition, with each event as it happens, on the thread that caused it (the autograd thread
            in backward).

    Returns:
        The list to which events are appended, in order.
    """
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if listener is not None:
            listener(event)

    stream.listeners.append(listen)
    try:
        yield events
    finally:
        stream.listeners.remove(listen)


class Ledger:
    """Bytes on this rank that are alive only for part of a step. One per root.

    Changes are listed as they happen, and added up when somebody asks or a pass ends: a steady step lists its own by
    `list.append`, bound when it was planned.

    Args:
        gathered, reducing: bytes alive now.
        model: see `Event`.

    Attributes:
        changes: of both kinds, since they were last added up; negative where memory is released.
        reductions: those of them that belong to `reducing`.
    """

    __slots__ = ("_live", "_peak", "_reducing", "changes", "model", "reductions")

    def __init__(self, gathered: int = 0, reducing: int = 0, model: str = "") -> None:
        self.model = model
        self.changes: list[int] = []
        self.reductions: list[int] = []
        self._live = self._peak = gathered + reducing
        self._reducing = reducing

    def gather(self, nbytes: int) -> None:
        """Count memory of gathered units that was allocated, or (negative) released."""
        self.changes.append(nbytes)
        if len(self.changes) > _MOST_CHANGES:
            self.settle()

    def reduce(self, nbytes: int) -> None:
        """Count memory of gradients to reduce that was allocated, or (negative) released."""
        self.changes.append(nbytes)
        self.reductions.append(nbytes)

    def settle(self) -> None:
        """Add up the changes."""
        self._peak = max(self._peak, *accumulate(self.changes, initial=self._live))
        changes, reductions = len(self.changes), len(self.reductions)
        self._live += sum(self.changes[:changes])
        self._reducing += sum(self.reductions[:reductions])
        del self.changes[:changes], self.reductions[:reductions]

    def restart_peak(self) -> None:
        """Let `peak` begin with what is alive now."""
        self.settle()
        self._peak = self._live

    def take_over(self, other: Ledger) -> None:
        """Add the counts of `other`, which is no longer used."""
        if other is not self:
            self.gather(other.gathered)
            self.reduce(other.reducing)

    @property
    def live(self) -> int:
        """The sum of `gathered` and `reducing`."""
        return self._live + sum(self.changes)

    @property
    def reducing(self) -> int:
        """Bytes of unsharded gradients in reduction buffers, and of the buffers of reductions in flight."""
        return self._reducing + sum(self.reductions)

    @property
    def gathered(self) -> int:
        """Bytes of full buckets of gathered units, copies kept after a reshard to a smaller group, buffers of gathers
        in flight that need a copy out, and low-precision copies of shards.
        """
        return self.live - self.reducing

    @property
    def peak(self) -> int:
        """The largest `live` so far."""
        return max(self._peak, *accumulate(self.changes, initial=self._live))


_MOST_CHANGES = 4096  # before they are added up at the latest
