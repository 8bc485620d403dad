"""An accelerator that a rank on a CPU believes it has: late copies, hooks on another thread, reads that are counted.

    has_streams   true, in whichever module asks
    backend       "nccl"; comparisons go over connections of the host's, whose tensors are the host's
    copies        into page-locked memory arrive when the host waits for them and not before; until then it holds poison
    hooks         run on what says it is another thread, as autograd's thread of a device does
    allocations   in page-locked memory hold poison; `is_pinned` knows them
    reads         `item()`, `tolist()`, `bool()`, `cpu()`, ... of what is not known to be the host's: one line each
    waits         for an event or stream, of what is less than two passes old: one line each

Which stream waits for which is tested with `happens_before.py`; kernels run at once here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

import fullshard
from fullshard.comm import lanes
from fullshard.mesh import Axis, axes
from fullshard.runtime import root
from fullshard.runtime.root import Root
from fullshard.shard.offload import Home
from fullshard.torch_private import autograd_task

CPU = torch.device("cpu")
ENGINE = str(Path(fullshard.__file__).parent)
API, WRAPPER = (
    importlib.import_module("fullshard.api.functional.fully_shard"),
    importlib.import_module("fullshard.api.wrapper.instances"),
)
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
COMPARE = ("equal", "allclose", "is_nonzero")  # of torch's functions: those whose result is on the host
LATE = 2  # passes of a kind after which the device is done with what it was given


class ReadTooEarly(AssertionError):
    """The host read page-locked memory that a copy is on its way to, and did not wait for its event."""


class Device:
    """What one rank's device was asked.

    Attributes:
        waits: a line for every time that the host waited for the device, or read a value of the device's.
        streams: all that were made; the first is the compute stream.
        asked: functions of the engine, "file: name", that asked whether the device has streams and went on as it has.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.streams: list[Stream] = []
        self.asked: set[str] = set()
        self.compute = self.current = Stream("compute", self)
        self.passes = {"forward": 0, "backward": 0}
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # the host's, by address
        self._pinned: set[int] = set()  # those of them that copies arrive in late
        self._coming: dict[int, list[Copy]] = {}  # by storage: the last copy to each place that nobody waited for

    def now(self) -> tuple[str, int]:
        kind = "backward" if autograd_task.inside_backward() else "forward"
        return kind, self.passes[kind]

    def is_old(self, moment: tuple[str, int]) -> bool:
        kind, number = moment
        return self.passes[kind] - number >= LATE

    def wait(self, what: str, moment: tuple[str, int]) -> None:
        """The host waits for what the device was given at that moment."""
        if not self.is_old(moment):
            self.note(what)

    def note(self, what: str) -> None:
        inside = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ENGINE)]
        at = f"{Path(inside[-1].filename).name}: {inside[-1].name}" if inside else "the user"
        self.waits.append(f"{what} by {at}")

    def give_to_host(self, tensor: Tensor, pinned: bool = False) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._host[key] = weakref.ref(storage, lambda _: self._forget(key))
        if pinned:
            self._pinned.add(key)
        return tensor

    def _forget(self, key: int) -> None:
        self._host.pop(key, None)
        self._pinned.discard(key)
        self._coming.pop(key, None)

    def is_pinned(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._pinned

    def read(self, tensor: Tensor, how: str) -> None:
        """The host reads a value."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or is_functorch_wrapped_tensor(tensor):
            return  # of a subclass: what it does inside is what reads
        key = tensor.untyped_storage()._cdata
        if key in self._coming:
            raise ReadTooEarly(f"{how} of {tensor.dtype} {tuple(tensor.shape)}")
        if key not in self._host:
            self.note(f"{how} of {tensor.dtype} {tuple(tensor.shape)}")

    def queue(self, target: Tensor, values: Tensor) -> None:
        """A copy to page-locked memory begins."""
        with torch.no_grad(), _disable_current_modes():  # nothing that a device would do
            copy = Copy(target, values.detach().clone())
            target.fill_(poison_of(target))
        coming = self.current.coming
        coming[:] = [each for each in coming if each() is not None]
        coming.append(weakref.ref(copy))
        key, at = target.untyped_storage()._cdata, target.data_ptr()
        others = [
            each for each in self._coming.get(key, ()) if (there := each.target()) is None or there.data_ptr() != at
        ]
        self._coming[key] = [*others, copy]

    def arrive(self, copies: list[Copy]) -> None:
        for copy in copies:
            target = copy.target()
            if target is None:
                continue
            key = target.untyped_storage()._cdata
            with torch.no_grad():
                target.copy_(copy.values)
            left = [each for each in self._coming.pop(key, ()) if each is not copy]
            if left:
                self._coming[key] = left


def poison_of(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() else 113


class Copy:
    """On its way to page-locked memory."""

    def __init__(self, target: Tensor, values: Tensor) -> None:
        self.target, self.values = weakref.ref(target), values


class Stream:
    """As much of `torch.Stream` as is used."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self.device = name, device
        self.coming: list[weakref.ref[Copy]] = []  # alive while their memory or an event is
        self.before: list[Stream] = []
        self.capturing = False
        self.waited: list[Stream] = []
        device.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        """On the device."""
        self.waited.append(other)

    def wait_event(self, event: Event) -> None:
        """On the device."""

    def record_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        Event(self).synchronize()

    def is_capturing(self) -> bool:
        return self.capturing

    def __enter__(self) -> Stream:
        self.before.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current = self.before.pop()


class Event:
    """As much of `torch.Event` as is used; recorded when it is made."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.moment = stream, stream.device.now()
        self.copies = [copy for each in stream.coming if (copy := each()) is not None]

    def synchronize(self) -> None:
        device = self.stream.device
        device.wait(f"wait for {self.stream.name}", self.moment)
        device.arrive(self.copies)
        self.stream.coming = [each for each in self.stream.coming if each() not in self.copies]

    def query(self) -> bool:
        raise AssertionError("an event was polled: what follows depends on timing, and no graph can be captured")


def patched_everywhere(name: str, original: Any, value: Any) -> list[Any]:
    """Patches of a function of the engine in every module that has it under its name."""
    return [
        mock.patch.object(module, name, value)
        for key, module in list(sys.modules.items())
        if key.startswith("fullshard") and vars(module).get(name) is original
    ]


@contextlib.contextmanager
def simulated(offload: bool = False) -> Iterator[Device]:
    """Models that are sharded and trained inside run on a device of their own. On each rank.

    Args:
        offload: whether shards and gradients live in the host's memory.
    """
    _device_constructors()  # torch looks once which functions take a default device: before they are replaced
    device = Device()
    lane_names = iter(["inward", "outward"])
    ident, copy_, empty = threading.get_ident, Tensor.copy_, torch.empty

    def has_streams(where: torch.device) -> bool:
        code = sys._getframe(1).f_code
        if code.co_name.startswith("<"):  # a comprehension
            code = sys._getframe(2).f_code
        device.asked.add(f"{Path(code.co_filename).relative_to(ENGINE)}: {code.co_name}")
        return True

    def other_thread() -> int:
        return ident() + autograd_task.inside_backward()

    def copying(target: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking and target.is_pinned() and not values.is_pinned():
            device.queue(target, values)
            return target
        return copy_(target, values, non_blocking)

    def allocated(*size: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        made = empty(*size, **named)
        if pin_memory:
            device.give_to_host(made.fill_(poison_of(made)), pinned=True)
        return made

    def is_pinned(storage: torch.UntypedStorage) -> bool:
        return device.is_pinned(storage)

    def reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # the engine knows such functions by name
        def read(tensor: Tensor, *given: Any, **named: Any) -> Any:
            device.read(tensor, name)
            return original(tensor, *given, **named)

        return read

    def counting(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(owner: Root, *given: Any) -> Any:
            device.passes[kind] += 1
            return original(owner, *given)

        return begin

    def over_host(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(comm: Any, axis: Any, *given: Any) -> Any:
            for tensor in given if axis.backend == "gloo" else ():
                if isinstance(tensor, Tensor):
                    device.give_to_host(tensor)
            return original(comm, axis, *given)

        return call

    fakes: dict[str, Any] = {
        "has_streams": has_streams,
        "new_stream": lambda where: Stream(next(lane_names), device),
        "current_stream": lambda where: device.current,
    }
    patches: list[Any] = [
        patch for name, fake in fakes.items() for patch in patched_everywhere(name, getattr(lanes, name), fake)
    ]
    patches += [mock.patch.object(Tensor, name, reading(name, getattr(Tensor, name))) for name in READS]
    patches += [mock.patch.object(torch, name, reading(name, getattr(torch, name))) for name in COMPARE]
    patches += [mock.patch.object(Tensor, "copy_", copying), mock.patch.dict(lanes._LANES, clear=True)]
    patches += [
        mock.patch.object(torch, "empty", allocated),
        mock.patch.object(Tensor, "is_pinned", lambda tensor: device.is_pinned(tensor.untyped_storage())),
        mock.patch.object(torch.UntypedStorage, "is_pinned", is_pinned),
    ]
    patches += [mock.patch.object(module, "get_ident", other_thread) for module in (root, autograd_task)]
    patches += [
        mock.patch.object(Root, f"begin_{kind}", counting(kind, getattr(Root, f"begin_{kind}")))
        for kind in device.passes
    ]
    patches += [
        mock.patch.object(fullshard.TorchComm, name, over_host(getattr(fullshard.TorchComm, name)))
        for name in ("gather", "all_reduce")
    ]
    if offload:
        home = Home(CPU, CPU, pinned=True)
        patches += [mock.patch.object(each, "home_of", lambda *asked: home) for each in (API, WRAPPER)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield device


@contextlib.contextmanager
def by_nccl() -> Iterator[None]:
    """Meshes that are resolved inside have groups that call themselves NCCL's, and lines on the host."""

    def over(axis: Axis, part: str) -> Axis:
        if axis.backend == "gloo" or part != "side":
            return axis
        return hosts.setdefault(axis, Axis(axis.group, axis.size, axis.rank, "gloo", axis.ranks))

    hosts: dict[Axis, Axis] = {}
    with mock.patch.object(axes, "backend_of", lambda group, kind: "nccl"), mock.patch.object(Axis, "_over", over):
        yield


def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)` on a device, for `--simulated`."""
    with by_nccl(), simulated():
        return fn(*args, **kwargs)
