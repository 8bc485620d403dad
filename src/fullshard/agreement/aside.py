"""Exchange integers and short texts among all ranks, over connections of their own (`Axis.aside`)."""

from __future__ import annotations

import pickle
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
    alone: str = "",
) -> int:
    """Raise on all ranks of the mesh if their tokens differ. Collective over the mesh.

    Args:
        flags: the bits set on this rank.
        make_error: builds the error from two ranks and their tokens.
        alone: a note on the watcher's error for a rank that compares alone.

    Returns:
        The bits set on any rank.
    """
    if not comm.communicates:
        return flags
    try:
        rows = rows_of_all([(token, flags)], axes.all, comm, axes.device)
    except DivergenceError as error:
        if alone:
            error.add_note(alone)
        raise
    other = next((i for i, (rank_token, _) in enumerate(rows) if rank_token != rows[0][0]), None)
    if other is not None:
        ranks = axes.mesh.mesh.flatten().tolist()  # [replicate, shard], as the rows
        raise make_error((ranks[0], ranks[other]), (rows[0][0], rows[other][0]))
    return reduce(or_, [rank_flags for _, rank_flags in rows])


def raise_on_all(error: DivergenceError | None, axes: Iterable[Axis], comm: Comm, device: torch.device) -> None:
    """Raise an error that any rank found, on all ranks. Collective over each axis, in turn.

    A comparison over one axis finds a difference on the ranks of one line only. If these raised alone, ranks that share
    another axis with them would wait for them.

    Args:
        error: found by this rank, over any of the axes.
        axes: all those over which ranks compared. Ranks may have different ones, of which those that they share are in
            the same order.
        device: of the axes' mesh.
    """
    for axis in axes if comm.communicates else ():
        if axis.size == 1:  # on this rank: others may have a longer axis here
            continue
        found = [bool(flag) for (flag,) in rows_of_all([[error is not None]], [axis], comm, device)]
        if any(found):
            error = pickle.loads(bytes_from(found.index(True), pickle.dumps(error), axis, comm, device))
    if error is not None:
        raise error


def bytes_from(source: int, data: bytes, axis: Axis, comm: Comm, device: torch.device) -> bytes:
    """The data of the axis' rank `source`. Collective over the axis."""
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    comm.broadcast(axis, length, source).wait()
    received = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if axis.rank == source:
        received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(axis, received, source).wait()
    return bytes(received.tolist())


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device, room: int = _TEXT_BYTES) -> list[str]:
    """Gather every rank's text, in axis order, truncated to `room` bytes. Collective over the axis."""
    data = text.encode()[:room].ljust(room, b"\0")
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = torch.empty(axis.size * room, dtype=torch.uint8, device=device)
    RANK.talks("texts")
    comm.gather(axis, gathered, local).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.view(axis.size, room).tolist()]
