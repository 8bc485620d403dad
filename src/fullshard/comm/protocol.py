"""The communication protocol of the engine, and the implementations that need no network.

Every call returns a `Pending` at once; the output may be used, and the input reused, after its `wait()`. On an
accelerator `wait()` makes the current stream wait, not the host. Buffers are contiguous and belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..mesh import Axis
from .messages import no_exchange


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Make the output usable by the work that the calling thread issues next."""


class Done:
    """A collective that finished when it was issued."""

    wait = staticmethod(bool)  # a call in C that does nothing


DONE = Done()


class Several:
    """Collectives that are started one after the other; if one cannot start, waits for those before it and raises."""

    __slots__ = ("_pending",)

    def __init__(self, calls: Sequence[Callable[[], Pending]]) -> None:
        self._pending: list[Pending] = []
        try:
            for call in calls:
                self._pending.append(call())
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        """Wait for all, once; raises the first failure when all are over."""
        pending, failed = self._pending, None
        while pending:
            try:
                pending.pop(0).wait()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


def gathers_of(
    comm: Gathers, axis: Axis, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> list[Callable[[], Pending]]:
    """Functions that start the gathers of these segments at each call; by `comm.plan_gathers` if it exists."""
    plan = getattr(comm, "plan_gathers", None)
    if plan is not None:
        calls: list[Callable[[], Pending]] = plan(axis, outs, shards)
        return calls
    return [partial(comm.gather, axis, out, shard) for out, shard in zip(outs, shards, strict=True)]


def reduction_of(
    comm: Comm, axis: Axis, outs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], mean: bool
) -> Callable[[], Pending]:
    """A function that starts all reductions at each call; by `comm.plan_reductions` if it exists."""
    plan = getattr(comm, "plan_reductions", None)
    calls: list[Callable[[], Pending]]
    if plan is not None:
        calls = plan(axis, outs, buffers, mean)
    else:
        calls = [partial(comm.reduce, axis, out, buffer, mean) for out, buffer in zip(outs, buffers, strict=True)]
    return calls[0] if len(calls) == 1 else partial(Several, calls)


def exchange_of(comm: Comm) -> Callable[[Axis, torch.Tensor, torch.Tensor], Pending]:
    """The `exchange` of a `Comm`.

    Raises:
        ConfigError: it has no such method.
    """
    method: Callable[[Axis, torch.Tensor, torch.Tensor], Pending] | None = getattr(comm, "exchange", None)
    if method is None:
        raise no_exchange(comm.kind)
    return method


@dataclass(frozen=True)
class Costs:
    """A rough estimate of a backend's costs on an axis; decides between a copy and an additional collective.

    Attributes:
        latency: seconds per additional collective.
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
    """Collectives over one axis. Implementations keep no state of any unit.

    `gather`: out [world * S] from every rank's shard [S]. `reduce`: out [S], the sum (or mean) over ranks of this
    rank's slice of their buffers [world * S]. `all_reduce`: in place. `broadcast`: from index `source` of the axis.
    Optional: `exchange(axis, out, buffer)`, in which slice r of every buffer [world * n] goes to rank r (needed for
    `scatter_dtype` and `all_reduce_dtype`); `plan_gathers(axis, outs, shards)` and `plan_reductions(axis, outs,
    buffers, mean)`. These two return a list of functions that start collectives on exactly these tensors, several at
    once where that is faster, and return a `Pending`: made once, and called in every step. And `plan_all_reduce(axis,
    out, mean, matrices, others, residuals)`, if something other than sums is sent (`hook.py`): one such function.
    """

    kind: str
    communicates: bool  # False if nothing leaves the process, so that ranks cannot compare

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending: ...

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending: ...

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending: ...

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending: ...

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        """Bytes, besides `out`, that `reduce` of `buffer` allocates until its wait."""

    def costs(self, axis: Axis) -> Costs: ...


class NullComm:
    """No communication: nothing leaves the process, so that everything else can be timed.

    Results are meaningless for more than one rank: a gather fills only this rank's slice and leaves the rest
    uninitialized, a reduction returns this rank's own gradients.
    """

    kind = "null"
    communicates = False

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        out.narrow(0, axis.rank * shard.numel(), shard.numel()).copy_(shard)
        return DONE

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        out.copy_(buffer.narrow(0, axis.rank * out.numel(), out.numel()))
        return DONE

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        out.copy_(buffer)
        return DONE

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        return DONE

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        return DONE

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return 0

    def costs(self, axis: Axis) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1e10)


class Forwarding:
    """A `Comm` in front of another; delegates whatever a subclass does not implement.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.kind, self.communicates = inner.kind, inner.communicates

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self.inner.gather(axis, out, shard)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        return self.inner.reduce(axis, out, buffer, mean)

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        return exchange_of(self.inner)(axis, out, buffer)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        return self.inner.all_reduce(axis, tensor, mean)

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        return self.inner.broadcast(axis, tensor, source)

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return self.inner.scratch_bytes(axis, buffer)

    def costs(self, axis: Axis) -> Costs:
        return self.inner.costs(axis)


@dataclass(frozen=True)
class RecordedCollective:
    """A collective, as recorded by `RecordingComm`. `nbytes` counts the larger of its buffers."""

    verb: str
    world: int
    nbytes: int
    dtype: torch.dtype


class RecordingComm(Forwarding):
    """A `Comm` that records every call in `calls`."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.kind = f"recording({inner.kind})"
        self.calls: list[RecordedCollective] = []

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        self._record("gather", axis, out)
        return super().gather(axis, out, shard)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        self._record("reduce", axis, buffer)
        return super().reduce(axis, out, buffer, mean)

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        self._record("exchange", axis, buffer)
        return super().exchange(axis, out, buffer)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        self._record("all_reduce", axis, tensor)
        return super().all_reduce(axis, tensor, mean)

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        self._record("broadcast", axis, tensor)
        return super().broadcast(axis, tensor, source)

    def _record(self, verb: str, axis: Axis, tensor: torch.Tensor) -> None:
        self.calls.append(RecordedCollective(verb, axis.size, tensor.numel() * tensor.element_size(), tensor.dtype))
