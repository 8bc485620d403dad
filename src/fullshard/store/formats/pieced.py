"""Checkpoints whose tensors are split over several files: the common base of FSDP1's and DeepSpeed's formats.

file of rank 0    [ weight 0 .. 7 | bias 0 .. 2 |pad]
file of rank 1    [ weight 7 ..14 | bias 2 .. 3 |pad]
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..pickles import PickledTensor
from ..source import Source, TensorEntry
from .archive import Archive


@dataclass(frozen=True)
class FilePiece:
    """A tensor in one of the files."""

    archive: Archive
    stored: PickledTensor

    def run(self, start: int, count: int) -> FilePiece:
        """Elements [start, start + count) of a one-dimensional tensor."""
        offset = self.stored.offset + start * self.stored.stride[0]
        return FilePiece(self.archive, replace(self.stored, offset=offset, shape=(count,)))


class PiecedSource(Source):
    """A checkpoint of several files of `torch.save`.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archives: list[Archive] = []
        # By name: a piece with the whole tensor, or consecutive one-dimensional pieces. Checked.
        self._pieces: dict[str, FilePiece | Sequence[FilePiece]] = {}
        self.entries: dict[str, TensorEntry] = {}
        self.values: Mapping[str, Any] = {}
        self.ties: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Open the files, and read the lists of tensors and the values."""

    def _add(self, name: str, pieces: FilePiece | Sequence[FilePiece], entry: TensorEntry) -> None:
        if name in self.entries:
            raise CheckpointError(f"{self._path} has two tensors of the same name.", parameter=name)
        self._pieces[name], self.entries[name] = pieces, entry

    def _add_whole(self, name: str, archive: Archive, stored: Any) -> None:
        """Add a tensor that is whole in a single file."""
        if not isinstance(stored, PickledTensor):
            raise CheckpointError(f"{archive.path} has a value in place of a tensor.", parameter=name)
        archive.check(name, stored)
        self._add(name, FilePiece(archive, stored), TensorEntry(stored.shape, stored.dtype))

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        pieces, shape = self._pieces[name], self.entries[name].shape
        if isinstance(pieces, FilePiece):
            return pieces.archive.read(pieces.stored, offsets, sizes)
        if not shape:
            return _elements(pieces, 0, 1, self.entries[name].dtype).reshape(())
        offsets = [0] * len(shape) if offsets is None else offsets
        sizes = [full - at for full, at in zip(shape, offsets, strict=True)] if sizes is None else sizes
        row = math.prod(shape[1:])
        start, stop = offsets[0] * row, (offsets[0] + sizes[0]) * row
        rows = _elements(pieces, start, stop, self.entries[name].dtype).reshape(sizes[0], *shape[1:])
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows

    def files_of(self, name: str) -> list[str]:
        pieces = self._pieces[name]
        return [piece.archive.path.name for piece in ([pieces] if isinstance(pieces, FilePiece) else pieces)]

    def close(self) -> None:
        for archive in self._archives:
            archive.close()


def _elements(pieces: Sequence[FilePiece], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements [start, stop) of the concatenated pieces. One-dimensional."""
    elements = torch.empty(stop - start, dtype=dtype, device="cpu")
    begin = 0  # where the piece begins in the concatenation
    for piece in pieces:
        end = begin + piece.stored.shape[0]
        first, last = max(start, begin), min(stop, end)
        if first < last:
            elements[first - start : last - start] = piece.archive.read(piece.stored, (first - begin,), (last - first,))
        begin = end
    return elements
