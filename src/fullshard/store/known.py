"""What the ranks settled at the last save of a model: while no rank's pieces change, it need not be settled again.

Telling, comparing and handing out what 1,000 ranks write takes the first rank seconds, in which all others wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from .packed import Packed
from .piece import Key, Piece
from .source import Entry

Outline = tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype], ...]
"""What a rank writes, without values: name, offsets, sizes and the whole shape of each piece, and its dtype."""


@dataclass
class OfAll:
    """What the first rank keeps.

    Attributes:
        several: see `held_by_several`.
        entries: all tensors that ranks hold pieces of.
        added: what the first rank adds: tensors, and the names of values and ties.
        metadata: DCP's.
    """

    several: dict[Key, list[int]]
    entries: dict[str, Entry]
    added: tuple[Outline, tuple[str, ...]]
    metadata: Packed[Metadata]


@dataclass
class Known:
    """What one rank keeps of the last save.

    Attributes:
        number: of what was settled, on all ranks the same.
        outline: of the pieces that this rank said it can write.
        plan: what it writes.
        of_all: on the first rank.
    """

    number: str
    outline: Outline
    plan: Packed[SavePlan]
    of_all: OfAll | None = None


_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], Known]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module, rank: int, size: int) -> Known | None:
    """What was settled when this model was saved last, as this rank of so many."""
    return _known.get(model, {}).get((rank, size))


def keep(model: nn.Module, rank: int, size: int, known: Known) -> None:
    """Keep what was settled now."""
    _known.setdefault(model, {})[rank, size] = known


def forget(model: nn.Module) -> None:
    """Let everything be settled anew."""
    _known.pop(model, None)


def outline_of(pieces: Iterable[Piece]) -> Outline:
    """Of those that are written."""
    return tuple((p.name, p.offsets, p.sizes, p.shape, p.dtype) for p in pieces if p.writes)
