"""What the engine did, as a stream of small frozen records; tests, timelines and checks all read this one.

Nobody listening costs one attribute test per event site. `Ledger` is the running account of the bytes that
come and go within a step; its counters are always kept, because they are two integer additions per change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One thing the engine did.

    Attributes:
        verb: "gather" (an all-gather was issued), "gathered" (its result may be used), "free" (the full bucket was
            released), "collect" (a backward's gradients were moved into the reduction buffer), "reduce" (a gradient
            reduction was issued), "all_reduce" (over the replicate axis), "reduced" (gradients are in `.grad`).
        unit: name of the unit, from the root ("(root)" is the root itself).
        nbytes: bytes of the collective's gathered or reduced buffer, padding included (all ranks' slices together).
        rank: global rank of the process that recorded it.
        time: seconds, `time.perf_counter()` of that process.
        live: bytes of gathered units, staging and reduction buffers alive on this rank right after the event.
    """

    verb: str
    unit: str
    nbytes: int
    rank: int
    time: float
    live: int


class EventStream:
    """Fan-out of events to listeners. `listeners` is empty unless somebody records."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []

    def emit(self, verb: str, unit: str, nbytes: int, rank: int, live: int) -> None:
        """Tell every listener; call only under `if stream.listeners`."""
        event = Event(verb, unit, nbytes, rank, time.perf_counter(), live)
        for listener in self.listeners:
            listener(event)


stream = EventStream()
"""The process's event stream: every engine in this process writes to it."""


@contextmanager
def record_events(listener: Callable[[Event], None] | None = None) -> Iterator[list[Event]]:
    """Collect the engine's events while the block runs.

    Args:
        listener: called with each event as it happens, on the thread that caused it (the autograd thread in
            backward), besides the list being filled.

    Returns:
        The list that fills up, in order.
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
    """Bytes that are alive only for part of a step, on this rank. One per root.

    Attributes:
        gathered: full buckets of gathered units, copies kept after a reshard to a smaller group, buffers of gathers in
            flight that need a copy out, and low-precision copies of shards.
        reducing: unsharded gradients in reduction buffers and the buffers of reductions in flight.
        peak: largest sum of the two so far.
    """

    gathered: int = 0
    reducing: int = 0
    peak: int = 0

    @property
    def live(self) -> int:
        return self.gathered + self.reducing

    def take_over(self, other: Ledger) -> None:
        """Count what `other` counted; it is not used from now on."""
        if other is not self:
            self.gathered += other.gathered
            self.reducing += other.reducing
            self.note()

    def note(self) -> None:
        """Call after raising a counter: keeps the peak."""
        self.peak = max(self.peak, self.gathered + self.reducing)
