"""Every rank tells the first what it can write; what it told at the last save it does not tell again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.checkpoint.planner import SavePlan

from .contents import Contents
from .entries import Entries
from .known import Known, Outline, forget, known_of, outline_of
from .piece import Key, Piece, Scalar
from .plan import Told, compare_values, held_by_several, sent, share_out
from .ranks import Ranks
from .tree import to_json
from .write import bytes_of, write_items


@dataclass
class AllTold:
    """What the first rank was told; on the others `known` and `asked` alone say something.

    Attributes:
        each: of every rank.
        owned: values that are a rank's own, of every rank.
        several: see `held_by_several`.
        asked: the keys of `several`.
        outline: of this rank's pieces.
        known: this rank's, of the last save, if no rank tells anything else than then: then no plan was told.
    """

    each: list[Told]
    owned: list[Any]
    several: dict[Key, list[int]]
    asked: list[Key]
    outline: Outline
    known: Known | None


def tell_first(
    model: nn.Module, contents: Contents, entries: Entries, pieces: Sequence[Piece], step: int, ranks: Ranks
) -> AllTold:
    """Tell the first rank what this one can write. Collective."""
    outline = outline_of(pieces)
    while True:
        known = known_of(model, ranks.rank, ranks.size)
        if known is not None and known.outline != outline:
            known = None
        mine: Told | None = None
        with ranks.step("describing what is to be saved"):
            plan = None if known is not None else SavePlan(write_items(piece for piece in pieces if piece.writes))
            mine = _told(contents, plan, step, known.number if known is not None else None)
        received = ranks.gather((mine, entries.own))
        each = [one for one, _ in received]
        agreed = len({one.known for one in each}) <= 1  # if some ranks told a plan, and others did not: all tell one
        several: dict[Key, list[int]] = {}
        if agreed and ranks.is_first:
            several = held_by_several(each) if known is None or known.of_all is None else known.of_all.several
        agreed, asked = ranks.share((agreed, list(several)))
        if agreed:
            return AllTold(each, [own for _, own in received], several, asked, outline, known)
        forget(model)


def _told(contents: Contents, plan: SavePlan | None, step: int, known: str | None) -> Told:
    """What this rank tells; see `Told`."""
    scalars: dict[str, dict[str, Scalar]] = {}
    for one in contents.states:
        for name, own in one.scalars.items():
            kept = {k: Scalar(sent(s.value), s.owns) for k, s in own.items()}
            scalars.setdefault(name, {}).update(kept)
    groups = [{**to_json(g, "param_groups", {}), "params": sorted(g["params"])} for g in contents.groups]
    return Told(step, plan, scalars, json.dumps(groups), known)


def compare_several(told: AllTold, pieces: Sequence[Piece], ranks: Ranks) -> None:
    """Let one rank write what several hold that do not know of each other; compare its values first. Collective."""
    if not told.asked:
        return
    wanted = set(told.asked)
    hashes = {
        (p.name, p.offsets): hashlib.sha256(bytes_of(p.tensor)).hexdigest()
        for p in pieces
        if p.writes and (p.name, p.offsets) in wanted
    }
    everyone: list[Any] = ranks.gather(hashes)
    with ranks.step("comparing what several ranks hold"):
        if ranks.is_first:
            compare_values(told.several, everyone)
            if told.known is None:
                share_out(told.each, told.several)
