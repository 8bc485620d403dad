"""What happens before what, on a CPU: simulated streams, and PyTorch's own sanitizer to say where two of them race.

    stream      an id. Kernels are what torch dispatches while it is current; they run at once, on the CPU
    group       each process group has a stream of its own: it waits for the current one at issue, `wait()` for it
    host        a "stream" too: what runs on page-locked memory (optimizers, sums). Everything waits for it that is
                launched later; it waits for others only where the engine makes it
    memory      a storage is one tensor to the sanitizer, under a number that is never used again. One that is freed
                goes back to the stream it was allocated under, which writes to it as soon as anything on that stream
                can be seen: before its next kernel, and before anybody next waits for it

Strict where the real thing is looser: reading a value to the host (`item()`, `tolist()`) makes nobody wait. A single
value of the device's that the host computes with was copied by a `.to()` that waits for it, and does nothing here.

`torch.cuda._sanitizer` is pure Python, and private; only tests use it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.cuda import _sanitizer as sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.comm import lanes
from fullshard.comm.protocol import DONE
from fullshard.shard.offload import Home

API, WRAPPER = (
    importlib.import_module("fullshard.api.functional.fully_shard"),
    importlib.import_module("fullshard.api.wrapper.instances"),
)
CPU = torch.device("cpu")


class World:
    """All streams, storages and accesses of one check. `races` says what was found, in words."""

    def __init__(self) -> None:
        self.handler = sanitizer.EventHandler()
        self.ids = itertools.count(1)
        self.streams: list[Stream] = []
        self.races: list[str] = []
        self.kernels = 0
        self.muted = 0  # above zero: what is dispatched is not looked at
        self.known: dict[int, tuple[int, Any]] = {}  # by a storage's address: its number, a weak reference
        self.owner: dict[int, Stream] = {}  # by number
        self.pinned: set[int] = set()  # numbers of storages of the host's
        self.host = Stream("host", self)
        self.compute = Stream("compute", self)
        self.current = self.compute
        self.groups: dict[int, Stream] = {}

    # Storages.

    def number(self, storage: torch.UntypedStorage, pinned: bool = False) -> int:
        """Of a storage; a new one belongs to the current stream, or to the host."""
        key = storage._cdata
        found = self.known.get(key)
        if found is not None:
            return found[0]
        number = next(self.ids)
        self.known[key] = number, weakref.ref(storage, partial(self._died, key))
        self.owner[number] = self.current
        if pinned:
            self.pinned.add(number)
        return number

    def _died(self, key: int, _: object) -> None:
        self.freed(key)

    def freed(self, key: int) -> None:
        """A storage's memory went back to where it came from."""
        found = self.known.pop(key, None)
        if found is not None and found[0] not in self.pinned:
            self.owner[found[0]].returned.add(found[0])

    # Accesses.

    def launch(self, stream: Stream, reads: set[int], writes: set[int], what: str) -> None:
        """Something runs on a stream."""
        self._launched(stream)
        self.reuse(stream)
        self._access(stream, reads - writes, writes, what)

    def reuse(self, stream: Stream) -> None:
        """Memory that came back to a stream may be in use again, by whatever it does next."""
        returned, stream.returned = stream.returned, set()
        if returned:
            self._launched(stream)
            self._access(stream, set(), returned, "whoever gets the freed memory")

    def _launched(self, stream: Stream) -> None:
        """Whatever the host launches comes after what it did, and waited for, before."""
        if stream is not self.host:
            self.wait(stream, self.host)

    def _access(self, stream: Stream, reads: set[int], writes: set[int], what: str) -> None:
        self.kernels += 1
        names = {number: [] for number in (*reads, *writes)}
        for error in self.handler._handle_kernel_launch(stream.id, reads, writes, set(), what, names):
            before, now = error.previous_access, error.current_access
            self.races.append(
                f"{self.streams[now.stream].name}: {now.operator}, not after "
                f"{self.streams[before.stream].name}: {before.operator}"
            )

    def wait(self, waiter: Stream, other: Stream) -> None:
        """`waiter` waits for all that `other` was given so far."""
        Event(other).wait(waiter)


class Stream:
    """As much of `torch.Stream` as is used."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.id = name, world, len(world.streams)
        self.returned: set[int] = set()  # numbers of storages whose memory came back
        world.streams.append(self)
        if self.id != sanitizer.DEFAULT_STREAM_ID:
            world.handler._handle_stream_creation(self.id)

    def wait_stream(self, other: Stream) -> None:
        self.world.wait(self, other)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        Event(self).wait(self.world.host)

    def __enter__(self) -> Stream:
        self.before, self.world.current = self.world.current, self
        return self

    def __exit__(self, *args: object) -> None:
        self.world.current = self.before


class Event:
    """As much of `torch.Event` as is used; recorded when it is made."""

    def __init__(self, stream: Stream) -> None:
        self.world, self.stream, self.id = stream.world, stream, next(stream.world.ids)
        self.world.reuse(stream)
        self.world.handler._handle_event_creation(self.id)
        self.world.handler._handle_event_record(self.id, stream.id)

    def wait(self, stream: Stream) -> None:
        self.world.handler._handle_event_wait(self.id, stream.id)

    def synchronize(self) -> None:
        self.wait(self.world.host)

    def query(self) -> bool:
        return False


class Watch(TorchDispatchMode):
    """Tells a `World` what every operator reads and writes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # of DTensor's, which only asks for shapes
            return func(*args, **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass: what it does inside is what runs
        world = self.world
        if world.muted:
            return func(*args, **kwargs)
        factory = bool(sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name.removeprefix("aten::")))
        found = Accesses(world)
        found.parse_inputs(func._schema, args, kwargs, is_factory=factory)
        inputs = found.every
        outputs = func(*args, **kwargs)
        # Beside a lane, what touches the host's memory is the host's own work.
        hosts = world.current.name not in ("inward", "outward") and not inputs.isdisjoint(world.pinned)
        found.pins = hosts
        found.parse_outputs(func._schema, outputs, is_factory=False)
        reads, writes = found.dataptrs_read, found.dataptrs_written
        if hosts:
            reads -= found.single - world.pinned
        if reads or writes:
            world.launch(world.host if hosts else world.current, reads, writes, func._schema.name)
        return outputs


class Accesses(sanitizer.ArgumentHandler):
    """An operator's accesses by numbers of storages. `every`: also what it only looks at; `single`: single values."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.every, self.single, self.pins = world, set(), set(), False

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and value.numel():
            number = self.world.number(value.untyped_storage(), self.pins)
            self.every.add(number)
            if value.dim() == 0:
                self.single.add(number)
            if is_write:
                self.dataptrs_written.add(number)
            elif not metadata_only:
                self.dataptrs_read.add(number)


class GroupComm:
    """Another kind of `Comm`, each of whose groups has a stream of its own."""

    def __init__(self, inner: Any, world: World) -> None:
        self.inner, self.world = inner, world
        self.kind, self.communicates = inner.kind, inner.communicates

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Any:
        if axis.size == 1:
            return self.inner.gather(axis, out, shard)
        with muted(self.world):
            sent = shard.clone()  # gloo would hold what it is given; what an accelerator is given nobody holds
        return self._run("gather", axis, [shard], [out], lambda: self.inner.gather(axis, out, sent))

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return self._run("reduce", axis, [buffer], [out], lambda: self.inner.reduce(axis, out, buffer, mean))

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        return self._run("all_reduce", axis, [], [tensor], lambda: self.inner.all_reduce(axis, tensor, mean))

    def broadcast(self, axis: Any, tensor: Tensor, source: int) -> Any:
        return self._run("broadcast", axis, [], [tensor], lambda: self.inner.broadcast(axis, tensor, source))

    def scratch_bytes(self, axis: Any, buffer: Tensor) -> int:
        return self.inner.scratch_bytes(axis, buffer)

    def costs(self, axis: Any) -> Any:
        return self.inner.costs(axis)

    def _run(self, verb: str, axis: Any, read: list[Tensor], written: list[Tensor], issue: Callable[[], Any]) -> Any:
        if axis.size == 1:
            return issue()  # no collective: copies on the current stream
        world = self.world
        group = world.groups.get(id(axis.group))
        if group is None:
            group = world.groups[id(axis.group)] = Stream(f"group {len(world.groups)}", world)
        reads, writes = ({world.number(t.untyped_storage()) for t in some if t.numel()} for some in (read, written))
        hosts = not world.pinned.isdisjoint(reads | writes)  # stands for a copy to the device, and one back
        world.wait(group, world.host if hosts else world.current)
        world.launch(group, reads, writes, verb)
        with muted(world):
            inner = issue()
        return InFlight(world, verb, inner, group.record_event(), hosts)


class InFlight:
    """A collective in flight on its group's stream."""

    def __init__(self, world: World, verb: str, inner: Any, done: Event, hosts: bool) -> None:
        self.world, self.verb, self.inner, self.done, self.hosts = world, verb, inner or DONE, done, hosts

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())

    def wait(self) -> None:
        with muted(self.world):
            self.inner.wait()
        self.order()

    def order(self) -> None:
        """Make the current stream wait, or the host."""
        if self.hosts:
            self.done.synchronize()
        else:
            self.done.wait(self.world.current)


class PinnedHome(Home):
    """A home in what counts as page-locked memory, with lanes."""

    def __init__(self, world: World) -> None:
        super().__init__(CPU, CPU, pinned=True)
        self.world = world

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with muted(self.world):
            made = torch.empty(numel, dtype=dtype)
        self.world.number(made.untyped_storage(), pinned=True)
        return made

    def holds(self, tensor: Tensor) -> bool:
        return self.world.number(tensor.untyped_storage()) in self.world.pinned

    def fetch(self, shard: Tensor) -> Tensor:
        """A copy for which the host waits."""
        world, stream = self.world, self.world.current
        with muted(world):
            made = shard.clone()
        world.launch(
            stream, {world.number(shard.untyped_storage())}, {world.number(made.untyped_storage())}, "blocking copy"
        )
        stream.synchronize()
        return made


@contextlib.contextmanager
def muted(world: World) -> Iterator[None]:
    """What is dispatched inside is not looked at."""
    world.muted += 1
    try:
        yield
    finally:
        world.muted -= 1


@contextlib.contextmanager
def watched(offload: bool = False) -> Iterator[World]:
    """Models that are sharded inside run on simulated streams, with their shards in the host's memory if asked for."""
    world = World()
    names = iter(["inward", "outward"])
    comm = GroupComm(fullshard.TorchComm(), world)
    resize = torch.UntypedStorage.resize_

    class Wrapped(fullshard.FullyShardedDataParallel):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **{"comm": comm, **keywords})

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if world.muted == 0 and storage.nbytes() != nbytes:
            world.freed(storage._cdata)
            result = resize(storage, nbytes)
            if nbytes:
                world.number(storage)
            return result
        return resize(storage, nbytes)

    def home_of(policy: Any, device: torch.device) -> Home | None:
        return PinnedHome(world) if offload else None

    with (
        mock.patch.object(lanes, "has_streams", lambda device: True),
        mock.patch.object(lanes, "new_stream", lambda device: Stream(next(names), world)),
        mock.patch.object(lanes, "current_stream", lambda device: world.current),
        mock.patch.dict(lanes._LANES, clear=True),
        mock.patch.object(API, "home_of", home_of),
        mock.patch.object(WRAPPER, "home_of", home_of),
        mock.patch.object(fullshard, "fully_shard", partial(fullshard.fully_shard, comm=comm)),
        mock.patch.object(fullshard, "FullyShardedDataParallel", Wrapped),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        Watch(world),
    ):
        yield world
