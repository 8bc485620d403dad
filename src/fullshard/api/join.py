"""`join`: train on unequal numbers of batches per rank until the last rank has run out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ..agreement import largest_mesh
from ..comm import Comm, Pending
from ..errors import invalid_argument
from ..mesh import MeshAxes
from ..shard import Share
from ..text import plain_class
from . import messages
from .preconditions import runners_of

Batch = TypeVar("Batch")


class join(Generic[Batch]):
    """Iterate over this rank's batches until no rank has any left.

        for batch in (batches := fullshard.join(model, loader)):
            loss_fn(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    A rank that has run out gets its last batch again, so that it takes part in every call of the others: gathers,
    reductions, clipping, optimizer steps, the program's own collectives. Its gradients are dropped, and the mean is
    taken over the ranks that still have data: gradients equal those of a single process with all real batches. (With
    `reduction="sum"` and "tokens" nothing is divided by ranks; a rank without data, where `active` is False, passes a
    count of 0.) Other state of the model, such as running averages of batch norm, sees the batch again.

    One batch is read ahead, and a small all-reduce per batch, issued a batch ahead, finds out whether any rank has
    more. PyTorch's `Join` (`torch.distributed.algorithms.join`) shadows collectives instead, in which the program's own
    collectives and the optimizer's steps would have to take part.

    Args:
        model: a sharded model's root, before or after its first forward.
        batches: this rank's batches, any number of them; at least one rank must have a batch. A rank may have none if
            there is an `example`.
        example: the batch for a rank without batches.

    Attributes:
        active: whether the batch yielded last is a new batch of this rank.
        ranks: the number of ranks that have a new batch.

    Raises:
        ConfigError: the model has no units, or is inside another `join`; `batches` is not iterable; a rank has neither
            a batch nor an example (raised on every rank, naming it).
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], *, example: Batch | None = None) -> None:
        self._runners = runners_of(model, "join")
        units = [runner.unit for runner in self._runners]
        if not any([unit.buckets for unit in units]):
            raise messages.no_units("join", plain_class(model).__name__, has_parameters=False)
        if not isinstance(batches, Iterable) or (isinstance(batches, torch.Tensor) and not batches.dim()):
            raise invalid_argument("join(batches=)", batches, "this rank's batches, as an iterable")
        self._axes: MeshAxes = largest_mesh(units)
        self._comm: Comm = self._runners[0].settings.comm
        self._batches, self._example = batches, example
        self.active, self.ranks = True, self._axes.world

    def __iter__(self) -> Iterator[Batch]:
        if any([runner.settings.share is not None for runner in self._runners]):
            raise messages.joined_twice()
        share = Share()
        for runner in self._runners:
            runner.set(share=share)
        try:
            yield from self._joined_batches(share)
        finally:
            for runner in self._runners:
                runner.set(share=None)

    def _joined_batches(self, share: Share) -> Iterator[Batch]:
        batches = iter(self._batches)
        next_batch, has_batch = _next(batches)
        counts = self._count(has_batch)
        self._refuse_empty(counts, has_batch)
        batch: Any = next_batch if has_batch else self._example
        while (ranks := counts.read()) > 0:
            self.active, self.ranks = has_batch, ranks
            if has_batch:
                batch = next_batch
            next_batch, has_more = _next(batches) if has_batch else (None, False)
            counts = self._count(has_more)
            share.active = self.active
            means = self._runners[0].settings.reduce.reduction == "mean"
            share.factor = self._axes.world / ranks if means else 1.0
            yield batch
            has_batch = has_more

    def _count(self, has_batch: bool) -> Count:
        return Count(has_batch, self._axes, self._comm)

    def _refuse_empty(self, counts: Count, has_batch: bool) -> None:
        """Raise on all ranks if any rank has neither a batch nor an example."""
        lacking = Count(not has_batch and self._example is None, self._axes, self._comm).read()
        if counts.read() and lacking:
            raise messages.no_batch(self._axes.global_rank, has_batch, lacking)


class Count:
    """The number of ranks whose answer is yes: an all-reduce issued on construction and awaited by `read`.

    Args:
        yes: this rank's answer.
        axes, comm: the ranks to ask, and the collectives to use.
    """

    def __init__(self, yes: bool, axes: MeshAxes, comm: Comm) -> None:
        spread = [axis for axis in axes.spanning if axis.size > 1]
        asides = [axis.aside for axis in spread]
        on_host = not any([aside is axis for aside, axis in zip(asides, spread, strict=True)])
        self._value = torch.tensor([int(yes)], dtype=torch.int64, device="cpu" if on_host else axes.device)
        self._axes, self._comm = asides if on_host else spread, comm
        self._pending: Pending | None = comm.all_reduce(self._axes[0], self._value, False) if self._axes else None

    def read(self) -> int:
        """Wait, and return the number of ranks (0 or 1 on a single rank)."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            for axis in self._axes[1:]:
                self._comm.all_reduce(axis, self._value, False).wait()
        return int(self._value)


def _next(batches: Iterator[Any]) -> tuple[Any, bool]:
    """The next batch, and whether it exists."""
    try:
        return next(batches), True
    except StopIteration:
        return None, False
