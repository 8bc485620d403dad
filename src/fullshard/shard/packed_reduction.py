"""Reductions whose gradients are sent in 8 bits: over the shard axis, and between replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm import Comm, Packing, Pending, exchange_of, packed_bytes
from ..forms import Scratch
from ..mesh import Axis


class PackedReduction:
    """A reduce-scatter whose gradients are sent in 8 bits: packed, exchanged, unpacked, and summed in float32.

    Ownership: allocates and frees its two buffers between `start` and `wait`, on the compute stream, and overwrites the
    gradients: what was received is unpacked in their place.

    Args:
        comm: collectives.
        axis: the ranks.
        outs, buffers: for each segment, a slice [n], and the gradients [world * n].
        mean: whether to average.
        dtype: the 8-bit dtype.

    Attributes:
        nbytes: of the two buffers.

    Raises:
        ConfigError: `comm` cannot exchange bytes.
    """

    def __init__(
        self,
        comm: Comm,
        axis: Axis,
        outs: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        mean: bool,
        dtype: torch.dtype,
    ) -> None:
        world, device = axis.size, buffers[0].device
        self._exchange, self._axis, self._outs = exchange_of(comm), axis, outs
        self._scale = 1.0 / world if mean else 1.0
        numel = world * sum([packed_bytes(out.numel()) for out in outs])
        self._sent, self._received = (Scratch(numel, torch.uint8, device) for _ in range(2))
        self._slices = [buffer.view(world, -1) for buffer in buffers]  # per segment, [world, n]
        self._pack = Packing(dtype, self._slices, self._sent.tensor.view(world, -1), consumes=True).pack
        self._unpack = Packing(dtype, self._slices, self._received.tensor.view(world, -1)).unpack
        self._pending: Pending | None = None
        self.nbytes = 2 * numel
        self._free()

    def start(self) -> Pending:
        """Pack, and start the exchange."""
        try:
            self._sent.allocate()
            self._pack()
            self._received.allocate()
            self._pending = self._exchange(self._axis, self._received.tensor, self._sent.tensor)
        except BaseException:
            self._free()
            raise
        return self

    def wait(self) -> None:
        """Wait for the exchange, and sum in the order of ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.wait()
            self._unpack()
            for out, slices in zip(self._outs, self._slices, strict=True):
                out.copy_(slices.sum(0, dtype=torch.float32).mul_(self._scale))
        finally:
            self._free()

    def _free(self) -> None:
        self._sent.free()
        self._received.free()


class PackedAllReduce:
    """An all-reduce in 8 bits: ranks exchange packed pieces, each sums its own in float32, and they gather the sums.

    All ranks unpack the same bytes, their own piece included, so all get the same bits. The second collective starts at
    `go_on`, at the latest at `wait`.

    Ownership: allocates and frees its three buffers between `start` and `wait`, on the compute stream. Their size, in
    elements, is the slice's, rounded up to a multiple of the ranks.

    Args:
        comm: collectives.
        axis: the ranks.
        out: [n], in place.
        mean: whether to average.
        dtype: the 8-bit dtype.

    Attributes:
        nbytes: of the three buffers.

    Raises:
        ConfigError: `comm` cannot exchange bytes.
    """

    def __init__(self, comm: Comm, axis: Axis, out: torch.Tensor, mean: bool, dtype: torch.dtype) -> None:
        world, numel, device = axis.size, out.numel(), out.device
        length = -(-numel // world)
        width = packed_bytes(length)
        self._exchange, self._gather, self._axis, self._out = exchange_of(comm), comm.gather, axis, out
        self._scale = 1.0 / world if mean else 1.0
        self._floats = Scratch(world * length, torch.float32, device)  # of all ranks, then their sum in the first row
        self._sent, self._received = (Scratch(world * width, torch.uint8, device) for _ in range(2))
        self._buffers = self._floats, self._sent, self._received
        self._content, self._padding = self._floats.tensor.split([numel, world * length - numel])
        self._rows = self._floats.tensor.view(world, length)
        self._piece = self._sent.tensor.narrow(0, axis.rank * width, width)
        received = self._received.tensor.view(world, width)
        self._pack = Packing(dtype, [self._rows], self._sent.tensor.view(world, width), consumes=True).pack
        self._pack_sum = Packing(dtype, [self._rows[:1]], self._piece.view(1, width), consumes=True).pack
        self._unpack = Packing(dtype, [self._rows], received).unpack
        self._pending: Pending | None = None
        self._gathers = False  # whether `_pending` is the gather of sums
        self.nbytes = sum([buffer.nbytes for buffer in self._buffers])
        self._free()

    def start(self) -> Pending:
        """Pack, and start the exchange."""
        try:
            for buffer in self._buffers:
                buffer.allocate()
            self._content.copy_(self._out)
            self._padding.zero_()
            self._pack()
            self._gathers, self._pending = False, self._exchange(self._axis, self._received.tensor, self._sent.tensor)
        except BaseException:
            self._free()
            raise
        return self

    def go_on(self) -> None:
        """Wait for the exchange, sum in the order of ranks, and start the gather; does nothing if that was done."""
        pending = self._pending
        if pending is None or self._gathers:
            return
        self._pending = None
        try:
            pending.wait()
            self._unpack()
            first, *others = self._rows
            for row in others:
                first.add_(row)
            first.mul_(self._scale)
            self._pack_sum()
            self._gathers, self._pending = True, self._gather(self._axis, self._received.tensor, self._piece)
        except BaseException:
            self._free()
            raise

    def wait(self) -> None:
        """Wait for both collectives, and write the sums."""
        self.go_on()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.wait()
            self._unpack()
            self._out.copy_(self._content)
        finally:
            self._free()

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.free()
