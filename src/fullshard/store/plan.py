"""What a save is going to write, settled by the first rank from what every rank holds.

Pure: descriptions in, descriptions out. Ranks that hold other things than each other are found here, before anything is
written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..errors import CheckpointError, DivergenceError
from .piece import Key, Scalar
from .source import OPTIMIZER, Entry


@dataclass
class Told:
    """What one rank tells the first.

    Attributes:
        step: the training step it saves.
        plan: the pieces it can write; None: as at the last save, whose number is `known` (see `known.py`).
        scalars: of optimizer state, by parameter and key.
        groups: of its optimizers, as JSON, parameters sorted.
    """

    step: int
    plan: SavePlan | None
    scalars: dict[str, dict[str, Scalar]]
    groups: str
    known: str | None = None

    @property
    def items(self) -> list[WriteItem]:
        """Of the plan."""
        assert self.plan is not None
        return list(self.plan.items)


@dataclass
class Settled:
    """What the first rank makes of it.

    Attributes:
        entries: all tensors.
        scalars: those of optimizer state that are tensors, by name; the first rank writes them.
        plain: those that are Python values, by parameter and key.
    """

    entries: dict[str, Entry]
    scalars: dict[str, torch.Tensor]
    plain: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Number:
    """A 0-d tensor as it is sent: pickled tensors take 200 us each."""

    value: Any
    dtype: torch.dtype


def sent(value: Any) -> Any:
    """A scalar as it is sent to the first rank."""
    return _Number(value.item(), value.dtype) if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _received(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype, device="cpu") if isinstance(value, _Number) else value


def held_by_several(told: Sequence[Told]) -> dict[Key, list[int]]:
    """The ranks of every piece that more than one is going to write: nothing says that they have the same.

    A norm beside tensor-parallel layers is such a one: each group of data-parallel ranks holds it, and knows of no
    other.
    """
    ranks: dict[Key, list[int]] = {}
    for rank, one in enumerate(told):
        for item in one.items:
            if item.tensor_data is not None:
                ranks.setdefault((item.index.fqn, tuple(item.tensor_data.chunk.offsets)), []).append(rank)
    return {key: found for key, found in ranks.items() if len(found) > 1}


def compare_values(several: dict[Key, list[int]], hashes: Sequence[dict[Key, str]]) -> None:
    """Let pieces that several ranks hold be the same on these.

    Args:
        hashes: each rank's, of the values of its pieces.

    Raises:
        DivergenceError: ranks have other values.
    """
    for key, ranks in several.items():
        first = ranks[0]
        for rank in ranks[1:]:
            if hashes[rank][key] != hashes[first][key]:
                raise DivergenceError(
                    "Ranks hold different tensors under one name; nothing was written.",
                    parameter=key[0],
                    rank=rank,
                    expected=f"the values of rank {first}",
                    got="others",
                    remedy="say how it is split (as a DTensor, or over one mesh of all ranks), or give each rank's a "
                    "name of its own; if ranks should have the same, find out why they do not (fullshard.verify)",
                    code="D011",
                )


def share_out(told: Sequence[Told], several: dict[Key, list[int]]) -> None:
    """Let one rank write each of these pieces, in turns."""
    writer = {key: ranks[turn % len(ranks)] for turn, (key, ranks) in enumerate(several.items())}
    for rank, one in enumerate(told):
        kept = [
            item
            for item in one.items
            if item.tensor_data is None
            or writer.get((item.index.fqn, tuple(item.tensor_data.chunk.offsets)), rank) == rank
        ]
        one.plan = SavePlan(kept)


def settle_plan(told: Sequence[Told], known: dict[str, Entry] | None = None) -> Settled:
    """Compare what the ranks tell, and put it together.

    Args:
        known: all tensors, if these were compared before.

    Raises:
        DivergenceError: ranks save different steps, tensors of other shapes or dtypes, or other optimizers.
        CheckpointError: together they hold not every element, or some twice.
    """
    for rank, one in enumerate(told):
        for what, mine, first in (("step", one.step, told[0].step), ("optimizer groups", one.groups, told[0].groups)):
            if mine != first:
                raise DivergenceError(
                    f"Ranks save different things: the {what} differs; nothing was written.",
                    rank=rank,
                    expected=f"as on rank 0: {_short(first)}",
                    got=_short(mine),
                    remedy="let all ranks call save() after the same step, with the same optimizers",
                    code="D012",
                )
    entries = _entries(told) if known is None else dict(known)
    scalars: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, key, value in _scalars(told):
        if isinstance(value, torch.Tensor):
            name = f"{OPTIMIZER}{parameter}.{key}"
            scalars[name], entries[name] = value, Entry((), value.dtype)
        else:
            plain.setdefault(parameter, {})[key] = value
    return Settled(entries, scalars, plain)


def _entries(told: Sequence[Told]) -> dict[str, Entry]:
    found: dict[str, tuple[Entry, int]] = {}
    counted: dict[str, int] = {}
    for rank, one in enumerate(told):
        for item in one.items:
            if item.tensor_data is None:
                continue
            name, data = item.index.fqn, item.tensor_data
            entry = Entry(tuple(data.size), data.properties.dtype)
            known, first = found.setdefault(name, (entry, rank))
            if known != entry:
                raise DivergenceError(
                    "Ranks hold one tensor in different shapes or dtypes; nothing was written.",
                    parameter=name,
                    rank=rank,
                    expected=f"shape {known.shape}, {known.dtype}, as on rank {first}",
                    got=f"shape {entry.shape}, {entry.dtype}",
                    code="D013",
                )
            counted[name] = counted.get(name, 0) + math.prod(data.chunk.sizes)
    for name, (entry, _) in found.items():
        if counted[name] != entry.numel:
            raise CheckpointError(
                "The ranks that save do not hold every element of a tensor once; nothing was written.",
                parameter=name,
                expected=f"{entry.numel} elements",
                got=f"{counted[name]} in all",
                remedy="save over all ranks of the model's mesh (process_group=), the same model on each",
                code="K134",
            )
    return {name: entry for name, (entry, _) in found.items()}


def _scalars(told: Sequence[Told]) -> list[tuple[str, str, Any]]:
    """Parameter, key and value of every scalar: what a rank says that holds some of the parameter."""
    found: dict[tuple[str, str], Scalar] = {}
    for one in told:
        for parameter, own in one.scalars.items():
            for key, scalar in own.items():
                known = found.get((parameter, key))
                if known is None or (scalar.owns and not known.owns):
                    found[parameter, key] = scalar
    return [(parameter, key, _received(scalar.value)) for (parameter, key), scalar in found.items()]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
