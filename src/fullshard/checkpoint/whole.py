"""Whole values of a sharded model, a bounded number of bytes at a time, out of the shards and beside what is gathered.

A `Batch` is what is gathered together: parameters of any units that are split over the same ranks, in one buffer (see
`layout/windows.py`); or one tensor that only its own class, or no unit, knows how to make whole. Every rank makes the
same ones: they follow from what the ranks have in common, names, shapes and layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import TorchComm, apart_of
from ..forms import full_of
from ..layout import window_of
from ..watcher import RANK
from . import values
from .names import Named

BATCH_BYTES = 256 * 2**20
"""Of whole values that are gathered together; a larger tensor is gathered alone."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor to be made whole.

    Attributes:
        name: what it will be called.
        tensor: a parameter's row in the model's table, or a buffer.
        dtype: to make it in; None: its own.
        local: of optimizer state like the parameter, this rank's part, or a value for all of it; None: the parameter's.
    """

    name: str
    tensor: Named | torch.Tensor
    dtype: torch.dtype | None = None
    local: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def own_dtype(self) -> torch.dtype:
        """Of its elements in the model."""
        row = self.tensor
        if self.local is not None:
            return self.local.dtype
        if isinstance(row, torch.Tensor):
            return row.dtype
        found: torch.dtype = row.parameter.dtype if row.bucket is None else row.bucket.storage_dtype
        return found

    @property
    def given_dtype(self) -> torch.dtype:
        """Of what it is made: floating-point numbers are cast, everything else stays what it is."""
        return self.dtype if self.dtype is not None and self.own_dtype.is_floating_point else self.own_dtype

    @property
    def is_odd(self) -> bool:
        """Whether it is of a tensor subclass, which no plain tensor stands for."""
        row = self.tensor
        if isinstance(row, torch.Tensor) or row.bucket is None:
            found = row if isinstance(row, torch.Tensor) else row.parameter
            return hasattr(found, "__tensor_flatten__") and not hasattr(found, "full_tensor")
        return not row.bucket.form.plain

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel() * self.given_dtype.itemsize


@dataclass(eq=False)
class Batch:
    """See the module's docstring.

    Memory: `pack` takes the buffer, of all ranks' parts; `gather` lets it go, its results are views of it where they
    can be, and hold copies else.
    """

    wanted: list[Wanted] = field(default_factory=list)
    _buffer: torch.Tensor | None = None

    def pack(self) -> None:
        """Take memory, and put this rank's parts into it. No communication."""
        first = self.wanted[0].tensor
        if not _in_windows(first) or first.bucket.shard.is_meta:  # type: ignore[union-attr]
            return
        window = self._window()
        axes = first.bucket.axes  # type: ignore[union-attr]
        # [window.numel], of which this rank fills [starts[rank], starts[rank] + lengths[rank])
        self._buffer = torch.empty(window.numel, dtype=self.wanted[0].given_dtype, device=axes.device)
        for one, lots in zip(self.wanted, window.lots, strict=True):
            bucket, member = one.tensor.bucket, one.tensor.member  # type: ignore[union-attr]
            for lot in lots:
                if lot.rank == axes.shard.rank:
                    target = self._buffer.as_strided(lot.part.shape, lot.part.stride, lot.at)
                    own = one.local if one.local is not None else bucket.part(bucket.shard, member)  # type: ignore[union-attr,arg-type]
                    target.copy_(own)

    def _window(self) -> Any:
        rows: Any = [one.tensor for one in self.wanted]
        return window_of([(row.bucket.layout, row.member.slot) for row in rows])

    def gather(self, joined: bool = True) -> list[tuple[Wanted, torch.Tensor]]:
        """The whole values, in memory that is the caller's. Collective, once `pack` was called.

        Args:
            joined: over tensor parallelism too; False: whole values of this rank's parts of such parameters.
        """
        with torch.no_grad():
            if self._buffer is None:
                return [(one, _made_whole(one)) for one in self.wanted]
            return self._from_window(self._buffer, joined)

    def _from_window(self, buffer: torch.Tensor, joined: bool) -> list[tuple[Wanted, torch.Tensor]]:
        self._buffer = None
        window = self._window()
        rows: Any = [one.tensor for one in self.wanted]
        comm = TorchComm()
        axis = apart_of(rows[0].bucket.axes.shard, comm)
        if axis.size > 1:
            RANK.talks("whole values")
            spans = list(zip(window.starts, window.lengths, strict=True))
            if window.even:
                start, length = spans[axis.rank]
                if length:
                    comm.gather(axis, buffer, buffer[start : start + length].clone()).wait()
            else:
                for rank, (start, length) in enumerate(spans):
                    if length:
                        comm.broadcast(axis, buffer[start : start + length], rank).wait()
        found = []
        for index, (one, row) in enumerate(zip(self.wanted, rows, strict=True)):
            whole = _assembled(buffer, window, index)
            if joined and row.member.split is not None:
                whole = full_of(row.member.split.unsharded(whole))
            found.append((one, whole))
        return found


def _in_windows(tensor: Named | torch.Tensor) -> bool:
    """Whether a unit holds it in a plain shard."""
    return not isinstance(tensor, torch.Tensor) and tensor.bucket is not None and tensor.bucket.form.plain


def _assembled(buffer: torch.Tensor, window: Any, index: int) -> torch.Tensor:
    """One parameter out of a window: a view of it, or a copy where its parts do not lie in its own order."""
    layout, slot = window.slots[index]
    at = window.whole_at(index)
    if at is not None:
        return buffer.as_strided(slot.shape, slot.stride, at)
    whole = buffer.new_empty(0).new_empty(slot.numel).as_strided(slot.shape, slot.stride)
    for lot in window.lots[index]:
        shape, strides, offset = layout.view_in_whole(slot, lot.part)
        whole.as_strided(shape, strides, offset).copy_(buffer.as_strided(shape, lot.part.stride, lot.at))
    return whole


def _made_whole(one: Wanted) -> torch.Tensor:
    """A tensor that is in no window, in memory of its own. Collective if it is split."""
    row = one.tensor
    if isinstance(row, torch.Tensor):
        found = values.whole_of(row, row.device)
    elif row.bucket is not None and row.member is not None:
        if row.bucket.shard.is_meta and row.bucket.form.plain:
            return torch.empty(row.member.slot.shape, dtype=one.given_dtype, device="meta")
        found = row.bucket.whole(row.member)
        if type(found) is not torch.Tensor:
            return found
    else:
        found = values.whole_of(row.parameter, row.parameter.device)
    return found.detach().to(one.given_dtype, copy=True)


def batches(wanted: Iterable[Wanted], bucket_bytes: int) -> Iterator[Batch]:
    """What is gathered together, of at most `bucket_bytes` unless one tensor alone is larger; the order stays."""
    batch, known, held = Batch(), None, 0
    for one in wanted:
        key = _key(one)
        if batch.wanted and (key is None or key != known or held + one.nbytes > bucket_bytes):
            yield batch
            batch, held = Batch(), 0
        batch.wanted.append(one)
        known, held = key, held + one.nbytes
    if batch.wanted:
        yield batch


def _key(one: Wanted) -> Any:
    """What tensors that are gathered together have in common; None: it is alone."""
    row = one.tensor
    if isinstance(row, torch.Tensor) or row.bucket is None or not row.bucket.form.plain:
        return None
    axes = row.bucket.axes
    return axes.shard.ranks, axes.device, one.given_dtype


def wholes(wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, torch.Tensor]]:
    """Each whole value, of tensor parallelism this rank's part, batch by batch. Collective.

    They share memory: keep copies.
    """
    for batch in batches(wanted, BATCH_BYTES):
        batch.pack()
        yield from batch.gather(joined=False)
