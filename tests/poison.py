"""Communication and memory that punish whoever is early or late: what a CPU forgives, streams will not.

    issue   the inputs are copied; the collective runs between copies; outputs hold poison
    poll    `is_completed` says yes or no as it likes, differently on every rank, the same for the same seed
    wait    inputs must be what they were and outputs still poison; only now the results appear
    free    a storage is filled with poison before its memory goes, and when it comes back

Poison is bytes of 0xFF: NaN in every floating-point dtype, -1 in integers. Who reads a result before its wait, or
memory that it does not own, computes NaN; who writes one raises `Poisoned` at the wait.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard import Comm

POISON = 0xFF


class Poisoned(AssertionError):
    """A buffer of a collective in flight was written, or given back."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory; written to without autograd noticing, as a backend would."""
    return tensor.data.view(-1).view(torch.uint8)


def poison(tensor: Tensor) -> None:
    as_bytes(tensor).fill_(POISON)


class Late:
    """A collective in flight between copies. Holds its copies until the wait."""

    def __init__(self, comm: DelayedComm, what: str, inner: Any, inputs: list, outputs: list) -> None:
        self.comm, self.what, self.inner = comm, what, inner
        self.inputs: list[tuple[Tensor, Tensor]] = inputs  # the caller's, and the copy
        self.outputs: list[tuple[Tensor, Tensor]] = outputs  # the caller's, and where the result will be
        self.said_done = False
        for output, _ in outputs:
            poison(output)
        comm.in_flight.append(self)

    def is_completed(self) -> bool:
        """A coin's answer; a yes is not taken back."""
        self.said_done = self.said_done or self.comm.coin.random() < 0.5
        self.comm.polls.append(self.said_done)
        return self.said_done

    def wait(self) -> None:
        if self not in self.comm.in_flight:
            return
        self.comm.in_flight.remove(self)
        self.inner.wait()
        for given, copy in self.inputs:
            self._check_alive(given, "input")
            if not as_bytes(given).equal(as_bytes(copy)):
                raise Poisoned(f"{self.what}: its input was written between issue and wait")
        for output, result in self.outputs:
            self._check_alive(output, "output")
            if not bool((as_bytes(output) == POISON).all()):
                raise Poisoned(f"{self.what}: its output was written between issue and wait")
            as_bytes(output).copy_(as_bytes(result))
        self.said_done = True

    def _check_alive(self, tensor: Tensor, role: str) -> None:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise Poisoned(f"{self.what}: the memory of its {role} was given back between issue and wait")


class DelayedComm:
    """Another kind of `Comm` whose results arrive at `wait`, and at no other time. See the module's docstring.

    Args:
        inner: what communicates.
        seed: of the polls' answers; every rank draws its own.
    """

    def __init__(self, inner: Comm, seed: int = 0) -> None:
        self.inner, self.kind, self.communicates = inner, f"delayed({inner.kind})", inner.communicates
        self.coin = random.Random(f"{seed}, rank {dist.get_rank() if dist.is_initialized() else 0}")
        self.in_flight: list[Late] = []
        self.polls: list[bool] = []
        self.issued = 0

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Late:
        copy, result = shard.data.clone(), torch.empty_like(out)
        pending = self.inner.gather(axis, result, copy)
        return self._late("gather", axis, pending, [(shard, copy)], [(out, result)])

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Late:
        copy, result = buffer.data.clone(), torch.empty_like(out)
        pending = self.inner.reduce(axis, result, copy, mean)
        return self._late("reduce", axis, pending, [(buffer, copy)], [(out, result)])

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Late:
        result = tensor.data.clone()
        return self._late("all_reduce", axis, self.inner.all_reduce(axis, result, mean), [], [(tensor, result)])

    def broadcast(self, axis: Any, tensor: Tensor, source: int) -> Late:
        result = tensor.data.clone()
        return self._late("broadcast", axis, self.inner.broadcast(axis, result, source), [], [(tensor, result)])

    def __deepcopy__(self, _memo: dict) -> DelayedComm:
        """A copy of a model communicates as the model does."""
        return self

    def scratch_bytes(self, axis: Any, buffer: Tensor) -> int:
        return self.inner.scratch_bytes(axis, buffer)

    def costs(self, axis: Any) -> Any:
        return self.inner.costs(axis)

    def check_settled(self) -> None:
        """Every collective was waited for."""
        if self.in_flight:
            raise Poisoned("never waited for: " + ", ".join(late.what for late in self.in_flight))

    def _late(self, verb: str, axis: Any, inner: Any, inputs: list, outputs: list) -> Late:
        self.issued += 1
        shape = tuple(outputs[0][0].shape)
        return Late(self, f"{verb} {self.issued} over {axis.size} ranks into {shape}", inner, inputs, outputs)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Storages are poisoned when their memory goes and when it comes; so is all that torch leaves uninitialised."""
    resize = torch.UntypedStorage.resize_

    def poisoning(storage: torch.UntypedStorage, nbytes: int) -> Any:
        kept = min(storage.nbytes(), nbytes)
        if nbytes < storage.nbytes():
            tail(storage, kept).fill_(POISON)
        result = resize(storage, nbytes)
        if nbytes > kept:
            tail(storage, kept).fill_(POISON)
        return result

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with mock.patch.object(torch.UntypedStorage, "resize_", poisoning), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def tail(storage: torch.UntypedStorage, start: int) -> Tensor:
    """The storage's bytes from `start` on, as a tensor."""
    none = torch.tensor([], dtype=torch.uint8, device=storage.device)  # `torch.empty` may be one that fails
    return none.set_(storage, start, (storage.nbytes() - start,))


@contextlib.contextmanager
def delayed(seed: int, inner: Comm | None = None) -> Iterator[DelayedComm]:
    """`fully_shard` and `FullyShardedDataParallel` of `fullshard` are given a `DelayedComm`; memory is poisoned.

    Recipes that shard through `fullshard.fully_shard(...)` run under it unchanged. At the end nothing is in flight.
    """
    comm = DelayedComm(fullshard.TorchComm() if inner is None else inner, seed)

    class Delayed(fullshard.FullyShardedDataParallel):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **{"comm": comm, **keywords})

    with (
        mock.patch.object(fullshard, "fully_shard", partial(fullshard.fully_shard, comm=comm)),
        mock.patch.object(fullshard, "FullyShardedDataParallel", Delayed),
        poisoned_memory(),
    ):
        yield comm
    comm.check_settled()
