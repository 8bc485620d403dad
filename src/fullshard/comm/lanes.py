"""Streams: those beside the compute stream, on which shards go in and gradients go out; and whose turn it is.

    compute  --|-- unit 1 --|-- unit 2 --------|-- unit 3 --->     . waits for, by an event
               .            .        ^         .
    inward     '-copy 2-.   '-copy 3-|-.       '-copy 4 ...        host to device; casts there
                        .            |  .
    the group's         '-gather 2---'   '-gather 3 ...            waits for the copy, not for compute

Without a host that waits. It does so in three places, which say when: `Lanes.settle`, `Lanes.copy_out`, and the thread
that hands over a snapshot (`store/background.py`).

This is the one file that names streams and events of a device; `has_streams`, `new_stream` and `current_stream` are all
that it asks of one. Where there are none (a CPU) nothing here is made.

Memory. A caching allocator gives memory that was freed to the next who asks on the stream it was allocated under, at
once, whatever other streams still do with it. So whoever frees sees to it that that stream waits first:

- What a gather fills is allocated under the compute stream, as always, and freed there once it has waited for the
  collective.
- What a lane copies in, and casts, is allocated under the lane and goes back to it. The copy in storage dtype is read
  by the lane alone. The one in compute dtype is read by the collective; it stays referenced (`Bucket`) until the
  compute stream was made to wait for that, and a lane begins every use by waiting for the compute stream.
- What is copied out stays referenced until the streams that it may go back to have waited for the copy.
- What several streams had in turn: see `Turns`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..mesh import Axis
from .protocol import Gathers, Pending

MOST_LEAVING = 2
"""Slices on their way out at once: one is copied while the next is reduced."""


@functools.cache  # asked in every backward; the accelerator of a process stays
def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of its own."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The one that this thread's work goes to."""
    return torch.accelerator.current_stream(device)


def host_buffer(numel: int) -> torch.Tensor:
    """[numel] int64 in page-locked memory, for values that come from a device or go there."""
    return torch.empty(numel, dtype=torch.int64, pin_memory=True)


def begin_copy_to_host(values: torch.Tensor, out: torch.Tensor) -> torch.Event:
    """Queue a copy into page-locked memory, which holds nothing before the host has waited for the event.

    Args:
        values: on a device.
        out: from `host_buffer`; stays alive until then.
    """
    out.copy_(values, non_blocking=True)
    return current_stream(values.device).record_event()


def page_lock(address: int, nbytes: int) -> bool:
    """Let an accelerator copy into memory that `torch` did not allocate; whether it can, without the host waiting.

    Args:
        address, nbytes: of whole pages, which stay until `page_unlock`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda":
        return False
    portable = 1  # for all devices of the process
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, portable)) == 0


def page_unlock(address: int) -> None:
    """Undo `page_lock`: nothing is copied there any more."""
    torch.cuda.cudart().cudaHostUnregister(address)


def copy_to_host(copies: Iterable[tuple[torch.Tensor, torch.Tensor]], locked: bool) -> list[torch.Event]:
    """Copy values into the host's memory; the events that the host waits for before it reads them there.

    They are copied on the current streams, in the order of what changes them next: the host goes on, and need not know
    who that will be (an optimizer, buffers in the next forward, the user).

    Args:
        copies: where to, and what.
        locked: whether all of that memory is page-locked; without, the host waits here.
    """
    devices: dict[torch.device, None] = {}
    for target, values in copies:
        queued = locked and has_streams(values.device)
        target.copy_(values, non_blocking=queued)
        if queued:
            devices[values.device] = None
    return [current_stream(device).record_event() for device in devices]


class Turns:
    """The streams that the memory of one bucket was used under: each waits for the one before it.

    A unit may be gathered under one stream (`unshard()`, a prefetch), run under another, and be freed by a backward
    under a third. `take` comes before whatever the engine does with the bucket: the stream that is current now waits
    for the one that was then. `give` comes where memory is freed: the others wait for this one, as any of them may get
    that memory back. Both wait for what the other stream was given so far, its owner's own kernels included.

    A forward that itself spreads over several streams has to join them before it returns, as without sharding; so has
    its backward, in which autograd waits for inputs' gradients and not for parameters'.

    Args:
        device: whose streams.
    """

    __slots__ = ("device", "last", "seen")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = current_stream(device)
        self.seen = [self.last]  # a handful, as streams come from a pool

    def take(self) -> None:
        """The current stream goes on with what the last one began."""
        now = current_stream(self.device)
        if now != self.last:
            if not _captures(now) and not _captures(self.last):
                now.wait_stream(self.last)
            self.last = now
            if now not in self.seen:
                self.seen.append(now)

    def give(self) -> None:
        """Memory is freed: nobody gets it before the current stream, whose turn it is, is done with it."""
        if len(self.seen) > 1 and not _captures(self.last):
            for other in self.seen:
                if other != self.last:
                    other.wait_stream(self.last)

    def wait(self, event: torch.Event) -> None:
        """All streams that were seen wait for `event`."""
        for stream in self.seen:
            stream.wait_event(event)


class OneStream:
    """`Turns` where there are no streams."""

    __slots__ = ()

    # Nobody is waited for, and nobody waits: calls that do nothing, in C, for there are twenty in a unit's step.
    take = staticmethod(bool)
    give = staticmethod(bool)

    def wait(self, event: torch.Event) -> None:
        """There are no events."""


ONE_STREAM = OneStream()


def turns_on(device: torch.device) -> Turns | OneStream:
    """Of memory on `device`; the current stream's turn."""
    return Turns(device) if has_streams(device) else ONE_STREAM


def _captures(stream: torch.Stream) -> bool:
    """Whether a graph is captured: that begins on an idle device, and must not depend on anything outside of it."""
    return bool(getattr(stream, "is_capturing", bool)())  # newer than torch 2.11


@dataclass(slots=True)
class _Leaving:
    """A slice on its way out: what to hold, for whom, until when, and what the host does with it then."""

    reduced: torch.Tensor
    turns: Turns | OneStream
    copied: torch.Event
    then: Callable[[], object] | None


class Lanes:
    """The streams beside a device's compute stream: `inward` for shards, `outward` for reduced gradients.

    Ownership: see the module's docstring. One for a device and process; all units that offload share it.

    Args:
        device: where units compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inward, self.outward = new_stream(device), new_stream(device)
        self._read: torch.Event | None = None  # after the last copy in; None: the host has waited for it
        self._leaving: deque[_Leaving] = deque()  # oldest first

    def copy_in(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `shard` [n], which is page-locked, on the device in `dtype`. To be used on `inward` (`gathering`).

        The wait is for memory: what the lane gets back, and what the gather that follows is allocated in, may still be
        in use by what the compute stream was given so far.
        """
        self.inward.wait_stream(current_stream(self.device))
        with self.inward:
            copied = shard.to(self.device, non_blocking=True, copy=True)
            self._read = self.inward.record_event()
            return copied.to(dtype)

    def gathering(self, comm: Gathers) -> Gathers:
        """`comm`, whose gathers are issued from `inward`: they wait for the copy there, and compute for neither."""
        return _FromLane(self, comm)

    def copy_out(
        self,
        target: torch.Tensor,
        reduced: torch.Tensor,
        turns: Turns | OneStream,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy `reduced` [n] into `target`, which is page-locked; there once `settle` has returned.

        Where two are on their way already the oldest is done with first: the compute stream waits for it; so does the
        host if it has something to do with it.

        Args:
            target, reduced: of any dtype; the caller keeps `target`.
            turns: of the streams that `reduced` goes back to.
            then: what the host does when it has arrived.
        """
        while len(self._leaving) >= MOST_LEAVING:
            oldest = self._leaving.popleft()
            if oldest.then is None:
                oldest.turns.wait(oldest.copied)
            else:
                oldest.copied.synchronize()
                oldest.then()
        self.outward.wait_stream(current_stream(self.device))
        with self.outward:
            target.copy_(reduced.to(target.dtype), non_blocking=True)
            copied = self.outward.record_event()
        self._leaving.append(_Leaving(reduced, turns, copied, then))

    def settle(self) -> None:
        """The host waits: shards are no longer read and may be written, gradients have arrived.

        At the end of a pass it waits for the last copy in, and for nothing that comes after it; at the end of a
        backward also for the last copy out.
        """
        if self._read is not None:
            event, self._read = self._read, None
            event.synchronize()
        if self._leaving:
            self.outward.synchronize()
            while self._leaving:
                if (then := self._leaving.popleft().then) is not None:
                    then()


class _FromLane:
    """Gathers issued from a lane. See `Lanes.gathering`."""

    __slots__ = ("inner", "lanes")

    def __init__(self, lanes: Lanes, inner: Gathers) -> None:
        self.lanes, self.inner = lanes, inner

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        lane = self.lanes.inward
        try:
            with lane:
                pending = self.inner.gather(axis, out, shard)
        except BaseException:  # maybe after kernels on the lane: `out` is about to be freed
            current_stream(self.lanes.device).wait_stream(lane)
            raise
        return _Arriving(self.lanes.device, pending, lane.record_event())


class _Arriving:
    """A gather in flight that was issued from a lane.

    One that needs no collective (an axis of one rank) was done by the lane itself, which `wait` therefore waits for.
    """

    __slots__ = ("device", "event", "pending")

    def __init__(self, device: torch.device, pending: Pending, event: torch.Event) -> None:
        self.device, self.pending, self.event = device, pending, event

    def wait(self) -> None:
        current_stream(self.device).wait_event(self.event)
        self.pending.wait()


_LANES: dict[torch.device, Lanes] = {}


def lanes_of(device: torch.device) -> Lanes | None:
    """The device's, made when first asked for; None where there are no streams."""
    if not has_streams(device):
        return None
    if device not in _LANES:
        _LANES[device] = Lanes(device)
    return _LANES[device]
