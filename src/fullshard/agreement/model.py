"""Whether all ranks train the same model: checked once, before the first gather could hang.

Every rank describes its parameters in lines: name, shape, dtypes, unit, layout. Ranks compare 32-byte digests over
every axis; only if these differ is the first rank's text sent and compared line by line.

Names may differ where ranks ignore different modules: ignored experts shift the numbers of the layers after them. For
siblings of a module that some rank ignores, the component of the name at that module's position is not compared;
everything else about a parameter is. A name that a rank shards and another rank ignores, with the same shape, still
counts as a difference: either rank could be mistaken.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..mesh import Axis
from ..watcher import RANK
from .aside import bytes_from, raise_on_all, rows_of_all
from .messages import different_models


@dataclass(frozen=True)
class Line:
    """The description of a parameter.

    Attributes:
        name: from the root.
        shape: as text.
        facts: dtypes, whether it trains, layout; None for an ignored parameter.
        unit: the name of its unit.
    """

    name: str
    shape: str
    facts: str | None = None
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name}: shape {self.shape}, {self.facts}, unit {self.unit or '(root)'!r}"


def check_same_model(
    lines: Sequence[Line], ignored: Sequence[Line], axes: Collection[Axis], comm: Comm, device: torch.device
) -> None:
    """Raise on every rank if the ranks of any axis do not train the same model. Collective over each axis, in turn.

    Args:
        lines: this rank's sharded parameters, in order.
        ignored: this rank's ignored parameters.

    Raises:
        DivergenceError: names two ranks and the first line that differs.
    """
    if not comm.communicates:
        return
    digest = struct.unpack("4q", hashlib.sha256("\n".join(map(str, lines)).encode()).digest())
    error: DivergenceError | None = None
    for axis in axes:
        if axis.size == 1:
            continue
        rows = _of_all(digest, axis, comm, device)
        if rows.count(rows[0]) == axis.size:
            continue
        first = _sent([*lines, *ignored], 0, axis, comm, device)
        at = _difference(first, [*lines, *ignored])
        differences = _of_all([-1 if at is None else at], axis, comm, device)
        other = next((i for i, (at,) in enumerate(differences) if at >= 0), None)
        if other is not None:
            second = _sent([*lines, *ignored], other, axis, comm, device)
            (at,), both = differences[other], (first, second)
            counts = [sum(line.facts is not None for line in model) for model in both]
            pairs = zip(both, counts, strict=True)
            texts = [str(model[at]) if at < count else "(nothing: no more parameters)" for model, count in pairs]
            error = error or different_models((axis.ranks[0], axis.ranks[other]), texts, at, max(counts))
    raise_on_all(error, axes, comm, device)


def _of_all(numbers: Sequence[int], axis: Axis, comm: Comm, device: torch.device) -> list[list[int]]:
    """Gather every rank's numbers over the axis."""
    RANK.talks("the same model")
    return rows_of_all([numbers], [axis], comm, device)


def _sent(lines: Sequence[Line], source: int, axis: Axis, comm: Comm, device: torch.device) -> list[Line]:
    """Broadcast the lines of the axis' rank `source`."""
    fields = ("\t".join([line.name, line.shape, line.unit, *([line.facts] if line.facts else [])]) for line in lines)
    text = bytes_from(source, "\n".join(fields).encode(), axis, comm, device).decode()
    parts = [line.split("\t") for line in text.split("\n")]
    return [Line(name, shape, rest[0] if rest else None, unit) for name, shape, unit, *rest in parts]


def _difference(first: Sequence[Line], second: Sequence[Line]) -> int | None:
    """The index of the first sharded parameter in which two ranks differ; None if they agree."""
    ignored = {(line.name, line.shape) for lines in (first, second) for line in lines if line.facts is None}
    loose_a, loose_b = _beside_ignored(first), _beside_ignored(second)
    sharded = [[line for line in lines if line.facts is not None] for lines in (first, second)]
    for at, (a, b) in enumerate(zip_longest(*sharded)):
        if a is None or b is None or (a.shape, a.facts) != (b.shape, b.facts):
            return at
        if not _alike(a.name, b.name, loose_a, loose_b) or not _alike(a.unit, b.unit, loose_a, loose_b):
            return at
        if (a.name, a.shape) in ignored or (b.name, b.shape) in ignored:
            return at
    return None


def _beside_ignored(lines: Sequence[Line]) -> set[str]:
    """The modules with a submodule or parameter, at any depth, that is ignored completely."""
    with_sharded = {prefix for line in lines if line.facts is not None for prefix in _prefixes(line.name)}
    parents = set()
    for line in lines:
        if line.facts is None:
            whole = next((prefix for prefix in _prefixes(line.name) if prefix not in with_sharded), line.name)
            parents.add(whole.rpartition(".")[0])
    return parents


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _alike(a: str, b: str, loose_a: set[str], loose_b: set[str]) -> bool:
    """Whether two names are equal, except in components that are siblings of something ignored."""
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
