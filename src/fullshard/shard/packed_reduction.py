"""Reductions that send gradients in 8 bits: over the shard axis, and between replicas.

Error feedback: the rounding error of the gradients that this rank packs is kept, and added to the next ones that it
packs. So over any number of steps the sum of the gradients sent differs from their true sum by a single rounding
(Karimireddy et al. 2019, arXiv:1901.09847, section 4). The error is itself kept in 8 bits, which loses less than a
hundredth of it per step. A block with a gradient that is not finite keeps no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm import Comm, Packing, Pending, Residuals, exchange_of, packed_bytes
from ..forms import Scratch
from ..mesh import Axis

_MOST = 2**18
"""Elements that are packed at once with error feedback, to keep the temporary memory small."""


class _Feedback:
    """Packs floats with error feedback, and overwrites them.

    Ownership: allocates its residual (uint8: the error packed in int8), which `residuals` keeps.

    Args:
        dtype, floats, packed: see `Packing`; one tensor of floats for each segment.
        residuals: the bucket's.
        name: the residual's name among them.
    """

    def __init__(
        self, dtype: torch.dtype, floats: Sequence[torch.Tensor], packed: torch.Tensor, residuals: Residuals, name: str
    ) -> None:
        error = residuals.get(name)
        error = torch.zeros_like(packed) if error is None else error.to(packed.device)  # zeros are packed zeros
        residuals[name] = error
        self._floats, self._packing = floats, Packing(dtype, floats, packed, most=_MOST)
        self._error = Packing(torch.int8, floats, error, consumes=True, most=_MOST)

    def pack(self) -> None:
        """Write the bytes of the floats plus the residual, and a new residual."""
        self._error.add(1.0)
        self._packing.pack()
        self._packing.add(-1.0)
        for floats in self._floats:
            floats.nan_to_num_(0.0, 0.0, 0.0)  # otherwise a NaN would never leave the error
        self._error.pack()


def _packer(
    dtype: torch.dtype, floats: Sequence[torch.Tensor], packed: torch.Tensor, residuals: Residuals | None, name: str
) -> Callable[[], None]:
    """A function that packs floats and may overwrite them, with error feedback if there are residuals."""
    if residuals is None:
        return Packing(dtype, floats, packed, consumes=True).pack
    return _Feedback(dtype, floats, packed, residuals, name).pack


class PackedReduction:
    """A reduce-scatter that sends gradients in 8 bits: packed, exchanged, unpacked, and summed in float32.

    Ownership: allocates and frees its two buffers between `start` and `wait`, on the compute stream, and overwrites the
    gradients: the received ones are unpacked in their place.

    Args:
        comm: collectives.
        axis: the ranks.
        outs, buffers: for each segment, a slice [n], and the gradients [world * n].
        mean: whether to average.
        dtype: the 8-bit dtype.
        residuals: for error feedback; None: without.

    Attributes:
        sent_bytes: of all ranks' slices together, packed.
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
        residuals: Residuals | None = None,
    ) -> None:
        world, device = axis.size, buffers[0].device
        self._exchange, self._axis, self._outs = exchange_of(comm), axis, outs
        self._scale = 1.0 / world if mean else 1.0
        numel = world * sum([packed_bytes(out.numel()) for out in outs])
        self._sent, self._received = (Scratch(numel, torch.uint8, device) for _ in range(2))
        self._slices = [buffer.view(world, -1) for buffer in buffers]  # per segment, [world, n]
        self._pack = _packer(dtype, self._slices, self._sent.tensor.view(world, -1), residuals, "gradients")
        self._unpack = Packing(dtype, self._slices, self._received.tensor.view(world, -1)).unpack
        self._pending: Pending | None = None
        self.sent_bytes, self.nbytes = numel, 2 * numel
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
        residuals: for error feedback, of the slice and of the sum of this rank's piece; None: without.

    Attributes:
        sent_bytes: of all ranks' pieces together, packed.
        nbytes: of the three buffers.

    Raises:
        ConfigError: `comm` cannot exchange bytes.
    """

    def __init__(
        self,
        comm: Comm,
        axis: Axis,
        out: torch.Tensor,
        mean: bool,
        dtype: torch.dtype,
        residuals: Residuals | None = None,
    ) -> None:
        world, numel, device = axis.size, out.numel(), out.device
        length = -(-numel // world)
        width = packed_bytes(length)
        self._exchange, self._gather, self._axis, self._out = exchange_of(comm), comm.gather, axis, out
        self._scale = 1.0 / world if mean else 1.0
        self._floats = Scratch(
            world * length, torch.float32, device
        )  # all ranks' floats, then their sum in the first row
        self._sent, self._received = (Scratch(world * width, torch.uint8, device) for _ in range(2))
        self._buffers = self._floats, self._sent, self._received
        self._content, self._padding = self._floats.tensor.split([numel, world * length - numel])
        self._rows = self._floats.tensor.view(world, length)
        self._piece = self._sent.tensor.narrow(0, axis.rank * width, width)
        received = self._received.tensor.view(world, width)
        self._pack = _packer(dtype, [self._rows], self._sent.tensor.view(world, width), residuals, "slice")
        self._pack_sum = _packer(dtype, [self._rows[:1]], self._piece.view(1, width), residuals, "sum")
        self._unpack = Packing(dtype, [self._rows], received).unpack
        self._pending: Pending | None = None
        self._gathers = False  # whether `_pending` is the gather of sums
        self.sent_bytes, self.nbytes = self._sent.nbytes, sum([buffer.nbytes for buffer in self._buffers])
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
