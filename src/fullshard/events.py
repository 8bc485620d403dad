"""The engine's actions as a stream of small frozen records, the same for tests, timelines and checks.

Without listeners each event site costs one attribute test. `Ledger` counts the bytes that come and go within a step;
its counters are always maintained, at two integer additions per change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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


@dataclass(slots=True)
class Ledger:
    """Bytes on this rank that are alive only for part of a step. One per root.

    Attributes:
        gathered: full buckets of gathered units, copies kept after a reshard to a smaller group, buffers of gathers in
            flight that need a copy out, and low-precision copies of shards.
        reducing: unsharded gradients in reduction buffers and the buffers of reductions in flight.
        peak: largest sum of the two so far.
        model: see `Event`.
    """

    gathered: int = 0
    reducing: int = 0
    peak: int = 0
    model: str = ""

    @property
    def live(self) -> int:
        return self.gathered + self.reducing

    def take_over(self, other: Ledger) -> None:
        """Add the counts of `other`, which is no longer used."""
        if other is not self:
            self.gathered += other.gathered
            self.reducing += other.reducing
            self.note()

    def note(self) -> None:
        """Update the peak; call after raising a counter."""
        self.peak = max(self.peak, self.gathered + self.reducing)
