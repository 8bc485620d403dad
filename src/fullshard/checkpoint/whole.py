"""Whole values of a sharded model, a bounded number of bytes at a time, read from the shards.

What is gathered together is a `Batch`: parameters of any units that are split over the same ranks, in one buffer (see
`layout/windows.py`); or a single tensor that is in no unit, or that only its own class can make whole. All ranks form
the same batches, because these follow from names, shapes and layouts, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import TorchComm, apart_of
from ..layout import Window, window_of
from ..shard import Bucket
from ..watcher import RANK
from .table import Named
from .value_forms import StateForm, joined, saved_form, whole_of

BATCH_BYTES = 256 * 2**20
"""Whole values that are gathered together, in bytes; a larger tensor is gathered alone."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor to be made whole.

    Attributes:
        name: the name of the result.
        row: the parameter or buffer.
        dtype: the dtype of the result if it is floating-point; None: its own.
        local: this rank's part of optimizer state of the parameter's shape, or a 0-d value for all of it; None: the
            parameter itself is wanted.
    """

    name: str
    row: Named
    dtype: torch.dtype | None = None
    local: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def bucket(self) -> Bucket | None:
        return self.row.bucket

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of its elements in the model."""
        if self.local is not None:
            return self.local.dtype
        dtype: torch.dtype = self.row.parameter.dtype if self.bucket is None else self.bucket.storage_dtype
        return dtype

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the result: floating-point numbers are cast, everything else keeps its dtype."""
        return self.dtype if self.dtype is not None and self.own_dtype.is_floating_point else self.own_dtype

    @property
    def is_odd(self) -> bool:
        """Whether the value is of a tensor subclass that a plain tensor cannot represent."""
        if self.bucket is None:
            parameter = self.row.parameter
            return hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "full_tensor")
        return not self.bucket.form.plain

    @property
    def nbytes(self) -> int:
        """The size of the whole."""
        return torch.Size(self.shape).numel() * self.result_dtype.itemsize

    @property
    def batch_key(self) -> Any:
        """What all tensors of a batch have in common; None if this one is gathered alone."""
        if self.bucket is None or not self.bucket.form.plain:
            return None
        return self.bucket.axes.shard.ranks, self.bucket.axes.device, self.result_dtype

    def alone(self) -> torch.Tensor:
        """The whole of a tensor that does not go through a batch's buffer, in its own memory. Collective if split."""
        row = self.row
        if row.bucket is None or row.member is None:
            whole = whole_of(row.parameter, row.parameter.device)
        elif row.bucket.shard.is_meta and row.bucket.form.plain:
            return torch.empty(row.member.slot.shape, dtype=self.result_dtype, device="meta")
        else:
            whole = row.bucket.whole(row.member)
            if type(whole) is not torch.Tensor:
                return whole
        return whole.detach().to(self.result_dtype, copy=True)


@dataclass(eq=False)
class Batch:
    """See the module's docstring.

    Memory: `pack` allocates the buffer for all ranks' parts, and another for this rank's if one gather fills it;
    `gather` releases them. Its results are views of the buffer where possible, otherwise copies.
    """

    wanted: list[Wanted] = field(default_factory=list)
    _window: Window | None = None
    _buffer: torch.Tensor | None = None  # [window.numel]
    _own: torch.Tensor | None = None  # [window.lengths[rank]], this rank's parts

    def pack(self) -> None:
        """Allocate the buffers and copy this rank's parts. No communication."""
        first = self.wanted[0]
        if first.bucket is None or first.batch_key is None or first.bucket.shard.is_meta:
            return
        axes = first.bucket.axes
        rows: Any = [wanted.row for wanted in self.wanted]
        window = self._window = window_of([(row.bucket.layout, row.member.slot) for row in rows])
        self._buffer = torch.empty(window.numel, dtype=first.result_dtype, device=axes.device)
        start = window.starts[axes.shard.rank]
        own = self._buffer[start : start + window.lengths[axes.shard.rank]]
        self._own = own = torch.empty_like(own) if window.even and axes.shard.size > 1 else own
        for wanted, row, lots in zip(self.wanted, rows, window.lots, strict=True):
            local = row.bucket.part(row.bucket.shard, row.member) if wanted.local is None else wanted.local
            for lot in lots:
                if lot.rank == axes.shard.rank:
                    at = own.storage_offset() + lot.at - start
                    own.as_strided(lot.part.shape, lot.part.stride, at).copy_(local)

    def gather(self, join: bool = True) -> list[tuple[Wanted, torch.Tensor]]:
        """The whole values, in memory that belongs to the caller. Collective; call `pack` first.

        Args:
            join: gather over tensor parallelism, too; False: give the whole of this rank's part of such parameters.
        """
        with torch.no_grad():
            window, buffer, own = self._window, self._buffer, self._own
            self._window = self._buffer = self._own = None
            if window is None or buffer is None or own is None:
                return [(wanted, wanted.alone()) for wanted in self.wanted]
            rows: Any = [wanted.row for wanted in self.wanted]
            comm = TorchComm()
            axis = apart_of(rows[0].bucket.axes.shard, comm)
            if axis.size > 1:
                RANK.talks("whole values")
                if not window.even:
                    for rank, (start, length) in enumerate(zip(window.starts, window.lengths, strict=True)):
                        if length:
                            comm.broadcast(axis, buffer[start : start + length], rank).wait()
                elif own.numel():
                    comm.gather(axis, buffer, own).wait()
            del own
            wholes = (_assembled(buffer, window, index) for index in range(len(rows)))
            if join:
                wholes = (joined(r.bucket, r.member, whole) for r, whole in zip(rows, wholes, strict=True))
            return list(zip(self.wanted, wholes, strict=True))


def _assembled(buffer: torch.Tensor, window: Window, index: int) -> torch.Tensor:
    """A parameter out of a window: a view, or a copy where its parts are not in the parameter's memory order."""
    layout, slot = window.slots[index]
    offset = window.whole_at(index)
    if offset is not None:
        return buffer.as_strided(slot.shape, slot.stride, offset)
    whole = buffer.new_empty(0).new_empty(slot.numel).as_strided(slot.shape, slot.stride)
    for lot in window.lots[index]:
        shape, strides, offset = layout.view_in_whole(slot, lot.part)
        whole.as_strided(shape, strides, offset).copy_(buffer.as_strided(shape, lot.part.stride, lot.at))
    return whole


def batches(wanted: Iterable[Wanted], bucket_bytes: int) -> Iterator[Batch]:
    """Batches of at most `bucket_bytes`, unless a single tensor is larger, in the order of `wanted`."""
    batch, key, nbytes = Batch(), None, 0
    for tensor in wanted:
        full = nbytes + tensor.nbytes > bucket_bytes
        if batch.wanted and (tensor.batch_key is None or tensor.batch_key != key or full):
            yield batch
            batch, nbytes = Batch(), 0
        batch.wanted.append(tensor)
        key, nbytes = tensor.batch_key, nbytes + tensor.nbytes
    if batch.wanted:
        yield batch


def whole_values(wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, torch.Tensor]]:
    """Yield whole values, each of this rank's tensor-parallel part, in order. Collective.

    One batch at a time is whole, if the caller drops each value before it asks for the next.
    """
    for batch in batches(wanted, BATCH_BYTES):
        batch.pack()
        gathered = batch.gather(join=False)[::-1]
        while gathered:
            yield gathered.pop()


def saved_values(wanted: Iterable[Wanted], form: StateForm, keep: bool) -> Iterator[Any]:
    """Parameters of units, or state of their shape, as `saved_form` gives them, in order. Collective."""
    for tensor, whole in whole_values(wanted):
        row = tensor.row
        assert row.bucket is not None and row.member is not None
        value = saved_form(row.bucket, row.member, whole, form, keep)
        del whole
        yield value
