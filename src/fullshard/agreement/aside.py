"""What all ranks say: integers, wherever they are, over connections of their own (`Axis.aside`); and short texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..mesh import Axis, MeshAxes
from ..watcher import RANK

_ROOM = 512  # bytes


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


def agree_on(
    token: int,
    flags: int,
    axes: MeshAxes,
    comm: Comm,
    differ: Callable[[Sequence[int], Sequence[int]], DivergenceError],
) -> int:
    """Raise on all ranks of the mesh if any of them says another token. Collective over it.

    Args:
        flags: that are set on this rank.
        differ: makes the error, of two ranks and the token of each.

    Returns:
        The flags that are set on any rank.
    """
    for axis in axes.all if comm.communicates else ():
        rows = rows_of_all([(token, flags)], [axis], comm, axes.device)
        other = next((i for i, (theirs, _) in enumerate(rows) if theirs != rows[0][0]), None)
        if other is not None:
            ranks = axis.ranks or range(axis.size)
            raise differ((ranks[0], ranks[other]), (rows[0][0], rows[other][0]))
        flags = reduce(or_, [theirs for _, theirs in rows])
    return flags


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device, room: int = _ROOM) -> list[str]:
    """Every rank's text, in the order of the axis; cut after `room` bytes. Collective over the axis."""
    data = text.encode()[:room].ljust(room, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    found = torch.empty(axis.size * room, dtype=torch.uint8, device=device)
    RANK.talks("texts")
    comm.gather(axis, found, mine).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found.view(axis.size, room).tolist()]
