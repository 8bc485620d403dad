"""Exchange integers and short texts among all ranks, over connections of their own (`Axis.aside`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..mesh import Axis, MeshAxes
from ..watcher import RANK

_TEXT_BYTES = 512  # per rank


def rows_of_all(
    rows: Sequence[Sequence[int]], axes: Iterable[Axis], comm: Comm, device: torch.device
) -> list[list[int]]:
    """Gather the rows of all ranks, in rank order. Collective over each axis.

    Args:
        rows: this rank's rows: all of equal length, and the same number of them on every rank.
        axes: gathered over in turn; the second axis gathers the results of the first.
        device: of the axes' mesh.
    """
    for axis in axes:
        if axis.size > 1:
            aside = axis.aside
            lines_device = device if aside is axis else torch.device("cpu")
            local = torch.tensor(rows, dtype=torch.int64, device=lines_device)
            gathered = local.new_empty(axis.size * local.numel())
            comm.gather(aside, gathered, local.view(-1)).wait()
            rows = gathered.view(-1, local.shape[1]).tolist()
    return [list(row) for row in rows]


def agree_on(
    token: int,
    flags: int,
    axes: MeshAxes,
    comm: Comm,
    make_error: Callable[[Sequence[int], Sequence[int]], DivergenceError],
) -> int:
    """Raise on all ranks of the mesh if their tokens differ. Collective over the mesh.

    Args:
        flags: the bits set on this rank.
        make_error: builds the error from two ranks and their tokens.

    Returns:
        The bits set on any rank.
    """
    for axis in axes.all if comm.communicates else ():
        rows = rows_of_all([(token, flags)], [axis], comm, axes.device)
        other = next((i for i, (rank_token, _) in enumerate(rows) if rank_token != rows[0][0]), None)
        if other is not None:
            ranks = axis.ranks or range(axis.size)
            raise make_error((ranks[0], ranks[other]), (rows[0][0], rows[other][0]))
        flags = reduce(or_, [rank_flags for _, rank_flags in rows])
    return flags


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device, room: int = _TEXT_BYTES) -> list[str]:
    """Gather every rank's text, in axis order, truncated to `room` bytes. Collective over the axis."""
    data = text.encode()[:room].ljust(room, b"\0")
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = torch.empty(axis.size * room, dtype=torch.uint8, device=device)
    RANK.talks("texts")
    comm.gather(axis, gathered, local).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.view(axis.size, room).tolist()]
