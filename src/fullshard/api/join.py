"""Ranks with unequal numbers of batches train to the end of the longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ..comm import Comm, Pending
from ..mesh import MeshAxes
from ..runtime import runners_in
from ..shard import Share
from . import messages

Batch = TypeVar("Batch")


class join(Generic[Batch]):
    """Iterate over this rank's batches until no rank has any left.

        for batch in (batches := fullshard.join(model, loader)):
            loss_fn(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    A rank that has run out is given its last batch again, so that it makes every call that the others make: gathers,
    reductions, clipping, optimizer steps, a program's own collectives. Its gradients are dropped, and the mean is taken
    over the ranks that still have data: gradients are those of one process with the batches that there are. (With
    `reduction="sum"` and "tokens" nothing is divided by ranks; a rank without data gives a count of 0, which
    `active` tells.) What the model keeps besides, such as running averages of batch norm, sees the batch again.

    One batch is read ahead, and one small all-reduce a batch, issued a batch ahead, tells whether anybody has more.
    PyTorch's `Join` (`torch.distributed.algorithms.join`) shadows collectives instead, which a program's own and the
    optimizer's steps would have to take part in.

    Args:
        model: sharded; the root, before or after its first forward.
        batches: this rank's, of any length; on at least one rank there is one. Ranks may be given none if there is an
            `example`.
        example: what a rank is given that never had a batch.

    Attributes:
        active: whether the batch that was given out last is this rank's own, and new.
        ranks: how many ranks have one of their own.

    Raises:
        ConfigError: the model has no units, or is in another `join`; `batches` cannot be iterated over; a rank has no
            batch at all and no example (on every rank, naming it).
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], *, example: Batch | None = None) -> None:
        self._runners = runners_in(model) if isinstance(model, nn.Module) else []
        held = [bucket.axes for runner in self._runners for bucket in runner.unit.buckets]
        if not held:
            raise messages.nothing_to_join(type(model).__name__)
        if not isinstance(batches, Iterable) or (isinstance(batches, torch.Tensor) and not batches.dim()):
            raise messages.not_batches(batches)
        self._axes: MeshAxes = max(held, key=lambda axes: axes.world)
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
            yield from self._given_out(share)
        finally:
            for runner in self._runners:
                runner.set(share=None)

    def _given_out(self, share: Share) -> Iterator[Batch]:
        ahead = iter(self._batches)
        following, has = _next(ahead)
        counts = self._count(has)
        self._refuse_empty(counts, has)
        batch: Any = following if has else self._example
        while (ranks := counts.read()) > 0:
            self.active, self.ranks = has, ranks
            if has:
                batch = following
            following, has_more = _next(ahead) if has else (None, False)
            counts = self._count(has_more)
            share.active = self.active
            means = self._runners[0].settings.reduce.reduction == "mean"
            share.factor = self._axes.world / ranks if means else 1.0
            yield batch
            has = has_more

    def _count(self, has: bool) -> Count:
        return Count(has, self._axes, self._comm)

    def _refuse_empty(self, counts: Count, has: bool) -> None:
        """Ranks without any batch need an example; whether all have one is asked once, of all."""
        lacks = Count(not has and self._example is None, self._axes, self._comm).read()
        if counts.read() and lacks:
            raise messages.no_batch(self._axes.global_rank, has, lacks)


class Count:
    """How many ranks say yes; asked when it is made, waited for when it is read.

    Args:
        yes: of this rank.
        axes, comm: whom to ask, and how.
    """

    def __init__(self, yes: bool, axes: MeshAxes, comm: Comm) -> None:
        several = [axis for axis in axes.all if axis.size > 1]
        asides = [axis.aside for axis in several]
        on_host = not any([aside is axis for aside, axis in zip(asides, several, strict=True)])
        self._value = torch.tensor([int(yes)], dtype=torch.int64, device="cpu" if on_host else axes.device)
        self._axes, self._comm = asides if on_host else several, comm
        self._pending: list[Pending] = []
        if self._axes:
            self._pending = [comm.all_reduce(self._axes[0], self._value, False)]

    def read(self) -> int:
        """The number, which is 1 or 0 where there is one rank."""
        while self._pending:
            self._pending.pop().wait()
            self._axes.pop(0)
            if self._axes:
                self._pending = [self._comm.all_reduce(self._axes[0], self._value, False)]
        return int(self._value)


def _next(batches: Iterator[Any]) -> tuple[Any, bool]:
    """The next batch, and whether there is one."""
    try:
        return next(batches), True
    except StopIteration:
        return None, False
