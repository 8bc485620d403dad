"""Whether all ranks train the same thing: asked once, before the first gather could hang, and along the first pass.

Every rank describes its units, parameters, shapes, dtypes and layouts in lines of text. Digests of 32 bytes are
compared over every axis; only if they differ are the texts exchanged, to name the first line that does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..mesh import Axis


def check_agreement(lines: Sequence[str], axes: Iterable[Axis], comm: Comm, device: torch.device) -> None:
    """Raise on every rank if `lines` differ between the ranks of any axis. Collective over each axis.

    Raises:
        DivergenceError: names both ranks and the first line that differs.
    """
    if not comm.communicates:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    for axis in axes:
        if axis.size == 1:
            continue
        found = torch.empty(axis.size * mine.numel(), dtype=torch.uint8, device=device)
        comm.gather(axis, found, mine).wait()
        rows = found.view(axis.size, -1).cpu()
        if bool((rows == rows[0]).all()):
            continue
        other = next(i for i in range(1, axis.size) if not torch.equal(rows[i], rows[0]))
        texts = _exchange(lines, axis, comm, device)
        raise DivergenceError(_difference(texts[0], texts[other], axis.ranks[0], axis.ranks[other]))


def _exchange(lines: Sequence[str], axis: Axis, comm: Comm, device: torch.device) -> list[list[str]]:
    """Every rank's lines, on every rank."""
    payload = bytearray("\n".join(lines).encode())
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = torch.empty(axis.size, dtype=torch.int64, device=device)
    comm.gather(axis, lengths, length).wait()
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8).to(device)
    found = torch.empty(axis.size * longest, dtype=torch.uint8, device=device)
    comm.gather(axis, found, mine).wait()
    rows = found.view(axis.size, -1).cpu()
    return [bytes(row[:n].tolist()).decode().split("\n") for row, n in zip(rows, lengths.tolist(), strict=True)]


def _difference(first: list[str], second: list[str], rank_a: int, rank_b: int) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    line_a = first[at] if at < len(first) else "(nothing: it has no more parameters)"
    line_b = second[at] if at < len(second) else "(nothing: it has no more parameters)"
    return (
        "ranks disagree on what they train (checked once, at the first forward).\n"
        f"  rank {rank_a} has   {line_a}\n"
        f"  rank {rank_b} has   {line_b}\n"
        f"  First difference: line {at + 1} of {max(len(first), len(second))}.\n"
        "  remedy:    build the same model, with the same dtypes and the same fully_shard calls, on every rank"
    )


END = -1  # in place of a unit's index: the pass is over


def check_order(index: int, names: Sequence[str], axes: Iterable[Axis], comm: Comm, device: torch.device) -> None:
    """Raise on every rank if the ranks of an axis are about to gather different units. Collective over each axis.

    Without this, gathers of equal sizes would swap two units' parameters and say nothing, and others would hang.

    Args:
        index: of the unit in `names`; `END` when the pass is over.

    Raises:
        DivergenceError: names two ranks and what each is about to run.
    """
    mine = torch.tensor([index], dtype=torch.int64, device=device)
    for axis in axes:
        if axis.size == 1:
            continue
        found = torch.empty(axis.size, dtype=torch.int64, device=device)
        comm.gather(axis, found, mine).wait()
        indices = found.tolist()
        other = next((i for i, found in enumerate(indices) if found != indices[0]), None)
        if other is None:
            continue

        def told(at: int, indices: list[int] = indices) -> str:
            unit = indices[at]
            return "has come to the end of its forward" if unit == END else f"runs unit {names[unit] or '(root)'!r}"

        raise DivergenceError(
            "ranks run their units in different orders (checked along the first forward).\n"
            f"  rank {axis.ranks[0]} {told(0)}\n"
            f"  rank {axis.ranks[other]} {told(other)}\n"
            "  remedy:    let every rank run the same units in the same order: where a rank has nothing to compute in "
            "one, call it all the same and multiply its result by zero"
        )
