"""Checkpoints whose tensors lie in runs in several files: what FSDP1's and DeepSpeed's have in common.

file of rank 0    [ weight 0 .. 7 | bias 0 .. 2 |pad]
file of rank 1    [ weight 7 ..14 | bias 2 .. 3 |pad]
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..source import Entry, Source
from .archive import Archive
from .built import Stored


@dataclass(frozen=True)
class Run:
    """Elements [start, start + count) of a one-dimensional tensor in a file."""

    archive: Archive
    stored: Stored
    start: int
    count: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the run. One-dimensional."""
        return self.archive.read(self.stored, (self.start + start,), (stop - start,))


@dataclass(frozen=True)
class Whole:
    """A tensor that one file holds."""

    archive: Archive
    stored: Stored


class PiecedSource(Source):
    """A checkpoint of several files of `torch.save`.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archives: list[Archive] = []
        self._where: dict[str, Sequence[Run] | Whole] = {}  # the runs that a tensor is made of, in order; checked
        self.entries: dict[str, Entry] = {}
        self.values: Mapping[str, Any] = {}
        self.ties: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Open the files, and read what they say of tensors and values."""

    def _add(self, name: str, runs: Sequence[Run], entry: Entry) -> None:
        if name in self.entries:
            raise CheckpointError(f"{self._path} says twice what a tensor is.", parameter=name)
        self._where[name], self.entries[name] = runs, entry

    def _add_whole(self, name: str, archive: Archive, stored: Any) -> None:
        """Add a tensor that one file holds."""
        if not isinstance(stored, Stored):
            raise CheckpointError(f"{archive.path} has something else in place of a tensor.", parameter=name)
        archive.check(name, stored)
        self._add(name, (), Entry(stored.shape, stored.dtype))
        self._where[name] = Whole(archive, stored)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        place, shape = self._where[name], self.entries[name].shape
        if isinstance(place, Whole):
            return place.archive.read(place.stored, offsets, sizes)
        if not shape:
            return _elements(place, 0, 1, self.entries[name].dtype).reshape(())
        offsets = [0] * len(shape) if offsets is None else offsets
        sizes = [full - at for full, at in zip(shape, offsets, strict=True)] if sizes is None else sizes
        row = math.prod(shape[1:])
        start, stop = offsets[0] * row, (offsets[0] + sizes[0]) * row
        rows = _elements(place, start, stop, self.entries[name].dtype).reshape(sizes[0], *shape[1:])
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows

    def files_of(self, name: str) -> list[str]:
        """Names of the files that hold an entry."""
        place = self._where[name]
        parts = [place] if isinstance(place, Whole) else place
        return list(dict.fromkeys(part.archive.path.name for part in parts))

    def close(self) -> None:
        for archive in self._archives:
            archive.close()


def _elements(runs: Sequence[Run], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements [start, stop) of what the runs are together. One-dimensional."""
    elements = torch.empty(stop - start, dtype=dtype, device="cpu")
    at = 0  # where a run begins in the whole
    for run in runs:
        first, last = max(start, at), min(stop, at + run.count)
        if first < last:
            elements[first - start : last - start] = run.read(first - at, last - at)
        at += run.count
    return elements
