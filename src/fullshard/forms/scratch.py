"""Buffers whose memory is freed and allocated again while their views stay.

A gathered bucket exists for a fraction of a step, but creating its hundreds of views each time would cost more than the
gather. So the tensor and its views live as long as the bucket, and only their common storage is freed and allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


class Scratch:
    """A one-dimensional buffer with storage on demand.

    Ownership: allocated and freed by its bucket, on the compute stream, never recorded on other streams; if the compute
    stream changes, the bucket's `comm.Turns` makes one stream wait for the other. Contents are undefined after
    `allocate`. While freed, no kernel may touch `tensor` or a view of it.

    Args:
        numel: length in elements.
        dtype, device: of the buffer.

    Attributes:
        take: allocates; only while nothing is allocated.
        free: frees the memory, if there is any.
    """

    __slots__ = ("free", "nbytes", "storage", "take", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)  # [numel], storage only while allocated
        self.storage = self.tensor.untyped_storage()
        self.nbytes = numel * dtype.itemsize
        self.take: Callable[[], object] = partial(self.storage.resize_, self.nbytes)
        self.free: Callable[[], object] = partial(self.storage.resize_, 0)

    @property
    def allocated(self) -> bool:
        return self.nbytes == 0 or self.storage.nbytes() != 0

    def allocate(self) -> None:
        """Allocate, unless allocated already."""
        if self.nbytes and not self.storage.nbytes():
            self.storage.resize_(self.nbytes)
