"""What ranks exchange beside the collectives of training: integers, short texts, and sums that are read later.

Integers and texts go over connections of their own (`Axis.aside`). `LateSums` are sums over ranks that the host of an
accelerator reads a few rounds later, when they have long arrived: so the host never waits for the device, and all ranks
read a sum in the same round, whatever its value.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from ..comm import Comm, begin_copy_to_host, host_buffer
from ..errors import DivergenceError
from ..mesh import Axis, MeshAxes
from ..watcher import RANK

_TEXT_BYTES = 512  # per rank
_LATE = 2
"""Rounds between sending a sum and reading it."""


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
        rows = rows_of_all([(token, flags)], axes.spanning, comm, axes.device)
    except DivergenceError as error:
        if alone:
            error.add_note(alone)
        raise
    tokens = [rank_token for rank_token, _ in rows]
    other = first_different(tokens)
    if other is not None:
        ranks = ranks_of(axes)
        raise make_error((ranks[0], ranks[other]), (tokens[0], tokens[other]))
    return reduce(or_, [rank_flags for _, rank_flags in rows])


def first_different(values: Sequence[Any]) -> int | None:
    """The index of the first value that differs from that of the first rank; None if all ranks agree."""
    return next((i for i, value in enumerate(values) if value != values[0]), None)


def ranks_of(axes: MeshAxes) -> list[int]:
    """The ranks of a mesh, in the order of the rows that `rows_of_all` gathers over its `spanning` axes."""
    joint = axes.joint
    ranks: list[int] = axes.mesh.mesh.flatten().tolist() if joint is None else [*joint.ranks]  # [replicate, shard]
    return ranks


def raise_on_all(error: DivergenceError | None, axes: Iterable[Axis], comm: Comm, device: torch.device) -> None:
    """Raise an error that any rank found, on all ranks. Collective over each axis, in turn.

    A comparison over one axis finds a difference on that axis' ranks only. If these raised alone, ranks that share
    another axis with them would wait for them.

    Args:
        error: found by this rank, over any of the axes.
        axes: all axes over which ranks compared. Ranks may have different axes; those that they share are in
            the same order.
        device: of the axes' mesh.
    """
    for axis in axes if comm.communicates else ():
        if axis.size == 1:  # on this rank: others may have a longer axis here
            continue
        rows = rows_of_all([[error is not None]], [axis], comm, device)
        if [1] in rows:
            error = value_from(rows.index([1]), error, axis, comm, device)
    if error is not None:
        raise error


def value_from(source: int, value: Any, axis: Axis, comm: Comm, device: torch.device) -> Any:
    """The value of the axis' rank `source`, pickled. Collective over the axis."""
    data = pickle.dumps(value)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    comm.broadcast(axis, length, source).wait()
    received = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if axis.rank == source:
        received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(axis, received, source).wait()
    return pickle.loads(bytes(received.tolist()))


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device) -> list[str]:
    """Gather every rank's text, in axis order, truncated to `_TEXT_BYTES`. Collective over the axis."""
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = torch.empty(axis.size * _TEXT_BYTES, dtype=torch.uint8, device=device)
    RANK.talks("texts")
    comm.gather(axis, gathered, local).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.view(axis.size, _TEXT_BYTES).tolist()]


@dataclass
class _Round:
    """Owns three buffers [n] int64: this rank's numbers and the sums, both page-locked, and the sums on the device."""

    numbers: torch.Tensor
    sums: torch.Tensor
    result: torch.Tensor  # `sums`, once `arrived`
    arrived: torch.Event | None = None
    facts: Any = None


class LateSums:
    """Sums that are read some rounds later. One per mesh and purpose; every round calls `due`, then `send`.

    Ownership: the buffers of `_LATE` rounds, which are reused.

    Args:
        axes: the mesh whose ranks are summed over.
        comm: collectives.
    """

    def __init__(self, axes: MeshAxes, comm: Comm) -> None:
        self.axes, self.comm = axes, comm
        self._sent: deque[_Round] = deque()  # oldest first
        self._read: _Round | None = None  # its buffers are free for the next round

    def due(self) -> tuple[torch.Tensor, Any] | None:
        """The oldest round's sums, on the host, and the facts sent along; None until `_LATE` rounds are under way."""
        if len(self._sent) < _LATE:
            return None
        oldest = self._read = self._sent.popleft()
        assert oldest.arrived is not None
        oldest.arrived.synchronize()
        return oldest.result, oldest.facts

    def send(self, values: torch.Tensor, facts: Any) -> torch.Tensor:
        """Start summing this round's numbers. Collective over the mesh.

        Args:
            values: [n] int64, on the host or the device.
            facts: returned by `due` with the sums.

        Returns:
            [n] int64, the sums, on the device.
        """
        current, self._read = self._read, None
        if current is None or current.numbers.numel() != values.numel():
            numel = values.numel()
            sums = torch.empty(numel, dtype=torch.int64, device=self.axes.device)
            current = _Round(host_buffer(numel), sums, host_buffer(numel))
        if values.device.type == "cpu":
            current.numbers.copy_(values)
            values = current.numbers
        current.sums.copy_(values, non_blocking=True)
        sum_over(current.sums, self.axes, self.comm)
        current.arrived, current.facts = begin_copy_to_host(current.sums, current.result), facts
        self._sent.append(current)
        return current.sums


def sum_over(vector: torch.Tensor, axes: MeshAxes, comm: Comm) -> None:
    """Sum `vector` in place over all ranks of a mesh. Collective over it."""
    for axis in axes.spanning:
        if axis.size > 1:
            comm.all_reduce(axis, vector, False).wait()
