"""Whether all ranks train the same model: asked once, before the first gather could hang.

Every rank describes its parameters in lines: name, shape, dtypes, unit, layout. Digests of 32 bytes are compared over
every axis; only if they differ is the first rank's text sent, and compared line by line.

Names may differ where ranks leave different modules alone: the number of experts that a rank ignores moves the numbers
of the layers after them. Beside a module that some rank ignores, the parts of names that stand where its own does
are not compared; everything else about a parameter is. A name that one rank shards and the other ignores with the same
shape stays a difference: it could be either's mistake.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ..comm import Comm
from ..mesh import Axis
from ..watcher import RANK
from .aside import rows_of_all
from .messages import different_models


@dataclass(frozen=True)
class Line:
    """One parameter, in order.

    Attributes:
        name: from the root.
        shape: as text.
        facts: dtypes, whether it trains, layout; None of a parameter that is ignored.
        unit: the name of its unit.
    """

    name: str
    shape: str
    facts: str | None = None
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name}: shape {self.shape}, {self.facts}, unit {self.unit or '(root)'!r}"


def check_same_model(
    lines: Sequence[Line], ignored: Sequence[Line], axes: Iterable[Axis], comm: Comm, device: torch.device
) -> None:
    """Raise on every rank if the ranks of any axis do not train the same model. Collective over each axis.

    Args:
        lines: this rank's sharded parameters.
        ignored: those that it leaves alone.

    Raises:
        DivergenceError: names both ranks and the first line that differs.
    """
    if not comm.communicates:
        return
    digest = struct.unpack("4q", hashlib.sha256("\n".join(map(str, lines)).encode()).digest())
    for axis in axes:
        if axis.size == 1:
            continue
        rows = _of_all(digest, axis, comm, device)
        if rows.count(rows[0]) == axis.size:
            continue
        first = _sent([*lines, *ignored], 0, axis, comm, device)
        at = _difference(first, [*lines, *ignored])
        found = _of_all([-1 if at is None else at], axis, comm, device)
        other = next((i for i, (at,) in enumerate(found) if at >= 0), None)
        if other is not None:
            second = _sent([*lines, *ignored], other, axis, comm, device)
            (at,), counts = found[other], [sum(line.facts is not None for line in each) for each in (first, second)]
            pair = zip((first, second), counts, strict=True)
            texts = [str(each[at]) if at < count else "(nothing: it has no more parameters)" for each, count in pair]
            raise different_models((axis.ranks[0], axis.ranks[other]), texts, at, max(counts))


def _of_all(numbers: Sequence[int], axis: Axis, comm: Comm, device: torch.device) -> list[list[int]]:
    """Those of every rank of the axis."""
    RANK.talks("the same model")
    return rows_of_all([numbers], [axis], comm, device)


def _sent(lines: Sequence[Line], source: int, axis: Axis, comm: Comm, device: torch.device) -> list[Line]:
    """The lines of the axis' rank `source`, on every rank."""
    fields = ("\t".join([line.name, line.shape, line.unit, *([line.facts] if line.facts else [])]) for line in lines)
    payload = bytearray("\n".join(fields).encode())
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    comm.broadcast(axis, length, source).wait()
    text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if axis.rank == source:
        text.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    comm.broadcast(axis, text, source).wait()
    parts = [line.split("\t") for line in bytes(text.tolist()).decode().split("\n")]
    return [Line(name, shape, rest[0] if rest else None, unit) for name, shape, unit, *rest in parts]


def _difference(first: Sequence[Line], second: Sequence[Line]) -> int | None:
    """The number of the first sharded parameter in which the ranks differ; None if there is none."""
    left = {(line.name, line.shape) for lines in (first, second) for line in lines if line.facts is None}
    loose_a, loose_b = _beside_ignored(first), _beside_ignored(second)
    sharded = [[line for line in lines if line.facts is not None] for lines in (first, second)]
    for at, (a, b) in enumerate(zip_longest(*sharded)):
        if a is None or b is None or (a.shape, a.facts) != (b.shape, b.facts):
            return at
        if not _alike(a.name, b.name, loose_a, loose_b) or not _alike(a.unit, b.unit, loose_a, loose_b):
            return at
        if (a.name, a.shape) in left or (b.name, b.shape) in left:
            return at
    return None


def _beside_ignored(lines: Sequence[Line]) -> set[str]:
    """The modules that have a part, of whichever depth, of which everything is ignored."""
    kept = {prefix for line in lines if line.facts is not None for prefix in _prefixes(line.name)}
    found = set()
    for line in lines:
        if line.facts is None:
            whole = next((prefix for prefix in _prefixes(line.name) if prefix not in kept), line.name)
            found.add(whole.rpartition(".")[0])
    return found


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _alike(a: str, b: str, loose_a: set[str], loose_b: set[str]) -> bool:
    """Whether two names are one but for parts that stand beside something ignored."""
    if a == b:
        return True
    parts_a, parts_b = a.split("."), b.split(".")
    if len(parts_a) != len(parts_b):
        return False
    above_a = above_b = ""
    for x, y in zip(parts_a, parts_b, strict=True):
        if x != y and above_a not in loose_a and above_b not in loose_b:
            return False
        above_a, above_b = f"{above_a}.{x}".lstrip("."), f"{above_b}.{y}".lstrip(".")
    return True
