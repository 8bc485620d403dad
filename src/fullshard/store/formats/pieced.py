"""Checkpoints whose tensors lie in runs in several files: what FSDP1's and DeepSpeed's have in common.

file of rank 0    [ weight 0 .. 7 | bias 0 .. 2 |pad]
file of rank 1    [ weight 7 ..14 | bias 2 .. 3 |pad]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        archives: the files. They are closed with this.
        where: for each tensor the runs that it is made of, in order, or the whole; checked.
        entries, values, ties: see `Source`.
    """

    def __init__(
        self,
        archives: Sequence[Archive],
        where: Mapping[str, Sequence[Run] | Whole],
        entries: Mapping[str, Entry],
        values: Mapping[str, Any],
        ties: Mapping[str, str],
    ) -> None:
        self._archives = archives
        self._where = where
        self.entries, self.values, self.ties = entries, values, ties

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
    found = torch.empty(stop - start, dtype=dtype, device="cpu")
    at = 0  # where a run begins in the whole
    for run in runs:
        first, last = max(start, at), min(stop, at + run.count)
        if first < last:
            found[first - start : last - start] = run.read(first - at, last - at)
        at += run.count
    return found
