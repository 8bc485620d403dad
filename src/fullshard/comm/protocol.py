"""What the engine asks of communication, and the kinds that need no network.

Every call returns at once with a `Pending`; the output may be used, and the input reused, after its `wait()`. On an
accelerator `wait()` makes the current stream wait, not the host. Buffers are contiguous and belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..mesh import Axis


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Make the output usable by what the calling thread issues next."""


class Done:
    """A collective that finished when it was issued."""

    wait = staticmethod(bool)  # nothing is in flight: a call that does nothing, in C


DONE = Done()


def wait_all(pending: list[Pending]) -> None:
    """Wait for all of these, and empty the list; what the first that failed raises is raised when all are over."""
    if len(pending) == 1:  # the usual case
        pending.pop().wait()
        return
    failed: BaseException | None = None
    while pending:
        try:
            pending.pop(0).wait()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


class Several:
    """Collectives that were started one after the other; if one cannot be, those before it are waited for."""

    __slots__ = ("_pending",)

    def __init__(self, calls: Sequence[Callable[[], Pending]]) -> None:
        self._pending: list[Pending] = []
        try:
            for call in calls:
                self._pending.append(call())
        except BaseException:
            wait_all(self._pending)
            raise

    def wait(self) -> None:
        """See `wait_all`."""
        wait_all(self._pending)


def gathers_of(
    comm: Gathers, axis: Axis, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> list[Callable[[], Pending]]:
    """What starts the gathers of these segments, whenever it is called: `comm.plan_gathers` if there is one."""
    plan = getattr(comm, "plan_gathers", None)
    if plan is not None:
        calls: list[Callable[[], Pending]] = plan(axis, outs, shards)
        return calls
    return [partial(comm.gather, axis, out, shard) for out, shard in zip(outs, shards, strict=True)]


def reduction_of(
    comm: Comm, axis: Axis, outs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], mean: bool
) -> Callable[[], Pending]:
    """As `gathers_of`, for reductions and `plan_reductions`; one call starts all of them."""
    plan = getattr(comm, "plan_reductions", None)
    calls: list[Callable[[], Pending]]
    if plan is not None:
        calls = plan(axis, outs, buffers, mean)
    else:
        calls = [partial(comm.reduce, axis, out, buffer, mean) for out, buffer in zip(outs, buffers, strict=True)]
    return calls[0] if len(calls) == 1 else partial(Several, calls)


@dataclass(frozen=True)
class Costs:
    """What a backend's collectives cost on an axis, roughly; decides between a copy and one more collective.

    Attributes:
        latency: seconds that one more collective costs.
        copy_bandwidth: bytes per second of a local strided copy.
        shares: whether parameters always share one collective and are copied out, whatever their size.
    """

    latency: float
    copy_bandwidth: float
    shares: bool = False

    @property
    def break_even_bytes(self) -> int:
        """A parameter of more bytes than this is cheaper to gather alone than to copy out of a shared buffer."""
        return int(self.latency * self.copy_bandwidth)


class Gathers(Protocol):
    """The part of `Comm` that gathers."""

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See `Comm`."""


class Comm(Protocol):
    """Collectives over one axis. Implementations hold no state of any unit.

    `gather`: out [world * S] from every rank's shard [S]. `reduce`: out [S], the sum (or mean) over ranks of this
    rank's slice of their buffers [world * S]. `all_reduce`: in place. `broadcast`: from index `source` of the axis.
    May have, besides, `plan_gathers(axis, outs, shards)` and `plan_reductions(axis, outs, buffers, mean)`, each a list
    of functions that start collectives on these very tensors, several at once where that is faster, and return pending
    ones: made once, and called in every step.
    """

    kind: str
    communicates: bool  # False where nothing leaves the process, so that ranks cannot be compared

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending: ...

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending: ...

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending: ...

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending: ...

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        """Bytes that `reduce` of `buffer` allocates until its wait, besides `out`."""

    def costs(self, axis: Axis) -> Costs: ...


class NullComm:
    """Communication taken out: nothing leaves the process, so that what remains can be timed.

    Results are meaningless for more than one rank: a gather fills only this rank's slice and leaves the rest as it
    was allocated, a reduction returns this rank's own gradients.
    """

    kind = "null"
    communicates = False

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        out.narrow(0, axis.rank * shard.numel(), shard.numel()).copy_(shard)
        return DONE

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        out.copy_(buffer.narrow(0, axis.rank * out.numel(), out.numel()))
        return DONE

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        return DONE

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        return DONE

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return 0

    def costs(self, axis: Axis) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1e10)


@dataclass(frozen=True)
class Call:
    """One collective, as `RecordingComm` saw it. `nbytes` counts the larger of its buffers."""

    verb: str
    world: int
    nbytes: int
    dtype: torch.dtype


class RecordingComm:
    """Another kind, with every call written down in `calls`."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.kind = f"recording({inner.kind})"
        self.communicates = inner.communicates
        self.calls: list[Call] = []

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        self._write("gather", axis, out)
        return self.inner.gather(axis, out, shard)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        self._write("reduce", axis, buffer)
        return self.inner.reduce(axis, out, buffer, mean)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        self._write("all_reduce", axis, tensor)
        return self.inner.all_reduce(axis, tensor, mean)

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        self._write("broadcast", axis, tensor)
        return self.inner.broadcast(axis, tensor, source)

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return self.inner.scratch_bytes(axis, buffer)

    def costs(self, axis: Axis) -> Costs:
        return self.inner.costs(axis)

    def _write(self, verb: str, axis: Axis, tensor: torch.Tensor) -> None:
        self.calls.append(Call(verb, axis.size, tensor.numel() * tensor.element_size(), tensor.dtype))
