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
from .known import Known, forget, known_of, outline_of
from .piece import Key, Piece, Scalar
from .plan import Told, held_by_several, sent, share_out
from .ranks import Ranks
from .tree import to_json
from .write import bytes_of, write_items


@dataclass
class AllTold:
    """What the first rank was told; on the others `known` and `asked` alone say something.

    Attributes:
        each: of every rank.
        owned: values that are a rank's own, of every rank.
        can_write: every rank's plan, before any is shared out.
        several: see `held_by_several`.
        asked: the keys of `several`.
        known: this rank's, of the last save.
        as_known: whether no rank told anything else than then.
    """

    each: list[Told]
    owned: list[Any]
    can_write: list[SavePlan]
    several: dict[Key, list[int]]
    asked: list[Key]
    known: Known | None
    as_known: bool


def tell_first(
    model: nn.Module, contents: Contents, entries: Entries, pieces: Sequence[Piece], step: int, ranks: Ranks
) -> AllTold:
    """Tell the first rank what this one can write. Collective."""
    while True:
        known = known_of(model, ranks.rank, ranks.size)
        mine: Told | None = None
        with ranks.step("describing what is to be saved"):
            number = known.number if known is not None and known.outline == outline_of(pieces) else None
            plan = None if number else SavePlan(write_items(piece for piece in pieces if piece.writes))
            mine = _told(contents, plan, step, number)
        received = ranks.gather((mine, entries.own))
        each, of_all = [one for one, _ in received], known.of_all if known is not None else None
        complete = all(one.known is None or (of_all and known and one.known == known.number) for one in each)
        as_known = complete and all(one.known for one in each)
        several: dict[Key, list[int]] = {}
        if complete and ranks.is_first:
            for rank, one in enumerate(each):
                one.plan = one.plan or (of_all and of_all.told[rank])
            several = of_all.several if as_known and of_all is not None else held_by_several(each)
        complete, asked = ranks.share((complete, list(several)))
        if complete:
            can_write = [one.plan for one in each if one.plan is not None]
            return AllTold(each, [own for _, own in received], can_write, several, asked, known, as_known)
        forget(model)  # the first rank has lost, or never had, what others go by


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
            share_out(told.each, told.several, everyone)
