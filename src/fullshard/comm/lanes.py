"""Streams beside the compute stream that copy shards in and gradients out, and the order in which streams use memory.

    compute  --|-- unit 1 --|-- unit 2 --------|-- unit 3 --->     . waits for, by an event
               .            .        ^         .
    inward     '-copy 2-.   '-copy 3-|-.       '-copy 4 ...        host to device; casts there
                        .            |  .
    the group's         '-gather 2---'   '-gather 3 ...            waits for the copy, not for compute

The host does not wait, except in three places that document when: `Lanes.settle`, `Lanes.copy_out`, and the thread that
hands over a snapshot (`store/background.py`).

This is the only file that names streams and events of a device; `has_streams`, `new_stream` and `current_stream` are
all that it needs of a device. Without streams (a CPU) nothing here is made.

Memory. A caching allocator reuses freed memory at once for the next request on the stream it was allocated under,
whatever other streams still do with it. So code that frees memory first lets that stream wait:

- The full buffers of a gather are allocated under the compute stream, as always, and freed there once that has waited
  for the collective.
- A lane's copies of shards are allocated under the lane and return to it. Only the lane reads the copy in storage
  dtype. The collective reads the one that is cast, packed, or made by a tensor subclass, which stays referenced
  (`Bucket`, `SubclassFull`) until the compute stream waits for the collective; and a lane begins every use by waiting
  for the compute stream.
- Tensors that are copied out stay referenced until the streams that their memory may return to wait for the copy.
- For memory that several streams use in turn, see `Turns`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..mesh import Axis
from .protocol import Gathers, Pending

T = TypeVar("T")

MOST_LEAVING = 2
"""Slices being copied out at once: one is copied while the next is reduced."""


@functools.cache  # called in every backward; a process keeps its accelerator
def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def new_stream(device: torch.device) -> torch.Stream:
    """A new stream."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread's work is queued on."""
    return torch.accelerator.current_stream(device)


def host_buffer(numel: int) -> torch.Tensor:
    """[numel] int64 in page-locked memory, for values copied from or to a device."""
    return torch.empty(numel, dtype=torch.int64, device="cpu", pin_memory=True)


def begin_copy_to_host(values: torch.Tensor, out: torch.Tensor) -> torch.Event:
    """Queue a copy into page-locked memory, which is valid once the host has waited for the returned event.

    Args:
        values: on a device.
        out: from `host_buffer`; must stay alive until then.
    """
    out.copy_(values, non_blocking=True)
    return current_stream(values.device).record_event()


def page_lock(address: int, nbytes: int) -> bool:
    """Page-lock memory that `torch` did not allocate, so that copies there need no wait; returns whether that worked.

    Args:
        address, nbytes: whole pages, which must stay allocated until `page_unlock`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda":
        return False
    portable = 1  # for all devices of the process
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, portable)) == 0


def page_unlock(address: int) -> None:
    """Undo `page_lock`, once no copy into the memory is under way."""
    torch.cuda.cudart().cudaHostUnregister(address)


def copy_to_host(copies: Iterable[tuple[torch.Tensor, torch.Tensor]], locked: bool) -> list[torch.Event]:
    """Copy values into host memory; returns the events to wait for before reading them there.

    Copies are queued on the current streams, so before anything that changes the values later (an optimizer, buffers in
    the next forward, the user), and the host need not wait.

    Args:
        copies: pairs of target and values.
        locked: whether all targets are page-locked; if not, the host waits here.
    """
    devices: dict[torch.device, None] = {}
    for target, values in copies:
        queued = locked and has_streams(values.device)
        target.copy_(values, non_blocking=queued)
        if queued:
            devices[values.device] = None
    return [current_stream(device).record_event() for device in devices]


class Turns:
    """The streams that have used the memory of one bucket; each waits for the one before it.

    A unit may be gathered under one stream (`unshard()`, a prefetch), run under a second, and be freed by a backward
    under a third. `take` precedes whatever the engine does with the bucket: the current stream waits for the previous
    one. `give` precedes a free: the other streams wait for the current one, as the memory may return to any of them.
    Both wait for all work queued on the other stream so far, including the user's own kernels.

    A forward that itself uses several streams has to join them before it returns, as without sharding; so does its
    backward, in which autograd waits for the gradients of inputs but not of parameters.

    Args:
        device: the device of the streams.
    """

    __slots__ = ("device", "last", "seen")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = current_stream(device)
        self.seen = [self.last]  # a handful, as streams come from a pool

    def take(self) -> None:
        """Make the current stream wait for the one that used the memory last."""
        now = current_stream(self.device)
        if now != self.last:
            if not _captures(now) and not _captures(self.last):
                now.wait_stream(self.last)
            self.last = now
            if now not in self.seen:
                self.seen.append(now)

    def give(self) -> None:
        """Make all other streams wait for the current one, before memory is freed."""
        if len(self.seen) > 1 and not _captures(self.last):
            for stream in self.seen:
                if stream != self.last:
                    stream.wait_stream(self.last)

    def wait(self, event: torch.Event) -> None:
        """Make all streams that used the memory wait for `event`."""
        for stream in self.seen:
            stream.wait_event(event)


class OneStream:
    """Replaces `Turns` on devices without streams."""

    __slots__ = ()

    # No stream waits. `bool` is a call in C that does nothing: there are twenty of these in a unit's step.
    take = staticmethod(bool)
    give = staticmethod(bool)

    def wait(self, event: torch.Event) -> None:
        """Do nothing: there are no events."""


ONE_STREAM = OneStream()


def turns_on(device: torch.device) -> Turns | OneStream:
    """`Turns` for memory on `device`, first used by the current stream."""
    return Turns(device) if has_streams(device) else ONE_STREAM


def captures(device: torch.device) -> bool:
    """Whether the current stream of `device` captures a graph, which does not contain the host."""
    return has_streams(device) and _captures(current_stream(device))


def timed_event(device: torch.device) -> torch.Event | None:
    """An event of the current stream whose time can be read later; None while the stream is captured."""
    if captures(device):
        return None
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _captures(stream: torch.Stream) -> bool:
    """Whether a graph is being captured; capture starts on an idle device and must not depend on outside work."""
    asks = getattr(stream, "is_capturing", None)  # newer than torch 2.11, which can only ask the current stream
    return bool(asks() if asks else getattr(torch.get_device_module(), "is_current_stream_capturing", bool)())


@dataclass(slots=True)
class _Leaving:
    """A slice being copied out: the tensor to keep, its streams, the copy's event, and what the host does then."""

    reduced: torch.Tensor
    turns: Turns | OneStream
    copied: torch.Event
    then: Callable[[], object] | None


class Lanes:
    """The streams beside a device's compute stream: `inward` for shards, `outward` for reduced gradients.

    Ownership: see the module's docstring. One per device and process, shared by all units that offload.

    Args:
        device: on which units compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inward, self.outward = new_stream(device), new_stream(device)
        self._read: torch.Event | None = None  # after the last copy in; None once the host has waited for it
        self._leaving: deque[_Leaving] = deque()  # oldest first

    def copy_in(self, tensors: Iterable[torch.Tensor], prepare: Callable[..., T]) -> T:
        """Copy page-locked tensors of any class to the device, and return what `prepare` makes of the copies.

        For use on `inward` (`gathering`), on which `prepare` runs. The lane first waits for the compute stream, because
        work queued there may still use memory that the lane or the following gather will reuse.
        """
        self.inward.wait_stream(current_stream(self.device))
        with self.inward:
            copies = [tensor.to(self.device, non_blocking=True, copy=True) for tensor in tensors]
            self._read = self.inward.record_event()
            return prepare(*copies)

    def join(self) -> None:
        """Make the compute stream wait for the copies in so far."""
        current_stream(self.device).wait_stream(self.inward)

    def gathering(self, comm: Gathers) -> Gathers:
        """Wrap `comm` to issue gathers from `inward`: they wait for the copy; the compute stream waits for neither."""
        return _FromLane(self, comm)

    def copy_out(
        self,
        target: torch.Tensor,
        reduced: torch.Tensor,
        turns: Turns | OneStream,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy `reduced` [n] into `target`, which is page-locked; `settle` waits for the copy.

        If two copies are under way already, finish the oldest first: the compute stream waits for it, or the host if it
        has something to do afterwards.

        Args:
            target, reduced: of any dtype; the caller keeps `target` alive.
            turns: of the memory of `reduced`.
            then: called by the host when the copy is complete.
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
        """Make the host wait until shards are no longer read and may be written, and gradients have arrived.

        At the end of a pass it waits only up to the last copy in; at the end of a backward also for the last copy out.
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
        except BaseException:  # possibly with kernels queued on the lane; `out` is about to be freed
            current_stream(self.lanes.device).wait_stream(lane)
            raise
        return _Arriving(self.lanes.device, pending, lane.record_event())


class _Arriving:
    """A gather in flight that was issued from a lane.

    Without a collective (an axis of one rank) the lane itself copies, so `wait` also waits for the lane.
    """

    __slots__ = ("device", "event", "pending")

    def __init__(self, device: torch.device, pending: Pending, event: torch.Event) -> None:
        self.device, self.pending, self.event = device, pending, event

    def wait(self) -> None:
        current_stream(self.device).wait_event(self.event)
        self.pending.wait()


_LANES: dict[torch.device, Lanes] = {}


def lanes_of(device: torch.device) -> Lanes | None:
    """The device's lanes, made at the first call; None on a device without streams."""
    if not has_streams(device):
        return None
    if device not in _LANES:
        _LANES[device] = Lanes(device)
    return _LANES[device]
