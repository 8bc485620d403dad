"""Integers of all ranks, which may be at different points: over connections of their own (`Axis.aside`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..comm import Comm
from ..mesh import Axis


def rows_of_all(
    rows: Sequence[Sequence[int]], axes: Iterable[Axis], comm: Comm, device: torch.device
) -> list[list[int]]:
    """The rows of all ranks, in the order of the axes. Collective over each of them.

    Args:
        rows: this rank's, of equal length, and as many on every rank.
        axes: one after the other: rows of the second one's ranks are those of all of the first one's.
        device: of the axes' mesh.
    """
    for axis in axes:
        if axis.size > 1:
            aside = axis.aside
            where = device if aside is axis else torch.device("cpu")
            mine = torch.tensor(rows, dtype=torch.int64, device=where)
            found = mine.new_empty(axis.size * mine.numel())
            comm.gather(aside, found, mine.view(-1)).wait()
            rows = found.view(-1, mine.shape[1]).tolist()
    return [list(row) for row in rows]
