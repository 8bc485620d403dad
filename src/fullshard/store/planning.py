"""What a save is going to write, and into which folder: agreed on by all ranks before anything is written."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan

from ..errors import CheckpointError
from ..torch_private.dcp_files import StoragePrefix
from .contents import Contents, contents_of
from .entries import Entries, Stateful, entries_of
from .folder import Folder
from .job import Ending, Job
from .manifest import Manifest, versions
from .piece import Piece, whole_piece
from .plan import Settled, Told, held_by_several, settle_plan, share_out, tell
from .ranks import Ranks
from .source import MODEL, OPTIMIZER, Entry
from .tree import to_json
from .write import bytes_of, metadata_of, value_items, write_items

GROUPS = "optimizer.param_groups"
SCALARS = "optimizer.scalars"
"""What the names of tensors within optimizer state begin with, such as L-BFGS's lists of them."""


@dataclass
class Request:
    """What a user asks to be saved; see `save`."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: int
    state: Mapping[str, Any]
    keep_last: int | None
    keep_every: int | None


@dataclass
class Planned:
    """A save that only has to be written.

    Attributes:
        job, pieces: this rank's.
        ending: on the first rank.
    """

    job: Job
    pieces: list[Piece]
    ending: Ending | None


def planned(request: Request, folder: Folder, ranks: Ranks) -> Planned:
    """Agree on what is written by whom, and make the folder. Collective."""
    contents: Contents | None = None
    with ranks.step("reading the model to save"):
        contents = contents_of(request.model, request.optimizers, ranks.is_first)
    assert contents is not None
    given = {key: _giving(value) for key, value in request.state.items()}
    given |= {name: module.get_extra_state for name, module in contents.extra.items()}
    entries = entries_of(given, ranks)
    pieces, mine = [*contents.pieces, *entries.pieces], None
    with ranks.step("describing what is to be saved"):
        mine = tell(contents, SavePlan(write_items(piece for piece in pieces if piece.writes)), request.step)
    told: list[Told] = ranks.gather(mine)
    _share_out(told, pieces, ranks)
    owned: list[Any] = ranks.gather(entries.own)
    name, ending, plans = "", None, []
    values: dict[str, Any] = {}
    with ranks.step("planning the save", files=True):
        if ranks.is_first:
            settled = settle_plan(told)
            added, values, groups, scalars = _of_first(contents, settled)
            pieces += added
            told[0].plan = SavePlan([*told[0].plan.items, *write_items(added), *value_items(values)])
            plans = [_prefixed(one.plan, rank) for rank, one in enumerate(told)]
            ending = _ending(request, contents, settled, groups, scalars, entries, owned, plans, added)
            name = folder.begin(request.step)
    try:
        name = ranks.share(name)
        plan = ranks.scatter(plans)
        with ranks.step("looking for the folder that the first rank made", files=True):
            if not folder.sees(name):
                raise CheckpointError(
                    "This rank does not see the folder that the first rank made.",
                    rank=ranks.rank,
                    expected=f"{name} in {folder}",
                    remedy="save into a folder that all ranks share, on every machine under the same path",
                )
    except BaseException:
        if ranks.is_first:
            folder.discard(name)
        raise
    return Planned(Job(folder, name, plan, values), pieces, ending)


def _share_out(told: list[Told], pieces: list[Piece], ranks: Ranks) -> None:
    """Let one rank write what several hold that do not know of each other; compare its values first. Collective."""
    several = held_by_several(told)
    asked = ranks.share(list(several))
    if not asked:
        return
    wanted = set(asked)
    hashes = {
        (p.name, p.offsets): hashlib.sha256(bytes_of(p.tensor)).hexdigest()
        for p in pieces
        if p.writes and (p.name, p.offsets) in wanted
    }
    everyone: list[Any] = ranks.gather(hashes)
    with ranks.step("comparing what several ranks hold"):
        if ranks.is_first:
            share_out(told, several, everyone)


def _giving(value: Any) -> Callable[[], Any]:
    return value.state_dict if isinstance(value, Stateful) else lambda: value


def _prefixed(plan: SavePlan, rank: int) -> SavePlan:
    return SavePlan(plan.items, storage_data=StoragePrefix(f"__{rank}_"))


def _of_first(contents: Contents, settled: Settled) -> tuple[list[Piece], dict[str, Any], Any, Any]:
    """What the first rank writes for all: scalars of optimizer state, and settings of groups, which are also JSON."""
    tensors: dict[str, torch.Tensor] = dict(settled.scalars)
    groups = to_json(contents.groups, GROUPS, tensors)
    scalars = to_json(settled.plain, SCALARS, tensors)
    values = {
        f"{GROUPS}.{i}.{key}": value
        for i, group in enumerate(contents.groups)
        for key, value in group.items()
        if not isinstance(value, torch.Tensor)
    }
    for parameter, own in settled.plain.items():
        values |= {f"{OPTIMIZER}{parameter}.{key}": value for key, value in own.items()}
    return [whole_piece(name, tensor, True) for name, tensor in tensors.items()], values, groups, scalars


def _ending(
    request: Request,
    contents: Contents,
    settled: Settled,
    groups: Any,
    scalars: Any,
    entries: Entries,
    owned: list[Any],
    plans: list[SavePlan],
    added: list[Piece],
) -> Ending:
    names = {row.name: row for row in contents.table.parameters}
    paths = {name: path_of(name, names) for plan in plans for name in {item.index.fqn for item in plan.items}}
    paths |= {name: path_of(name, names) for name in contents.ties}
    manifest = Manifest(
        step=request.step,
        world=len(plans),
        time=time.time(),
        tensors={**settled.entries, **{p.name: Entry(p.shape, p.dtype) for p in added}},
        ties=contents.ties,
        values={
            "optimizer": {"param_groups": groups, "scalars": scalars},
            "state": entries.common,
        },
        ranks=owned if any(owned) else [],
        files={},
        layouts={
            unit.name or "(root)": ", ".join(b.layout.name for b in unit.buckets) for unit, _ in contents.table.units
        },
        writer=versions(),
    )
    return Ending(metadata_of(plans, paths), manifest, request.keep_last, request.keep_every)


def path_of(name: str, parameters: Container[str]) -> tuple[Any, ...]:
    """The keys that lead to a name in the nested state dict that PyTorch's programs expect."""
    if name.startswith(MODEL):
        return "model", name.removeprefix(MODEL)
    if name.startswith(OPTIMIZER):
        rest = name.removeprefix(OPTIMIZER)
        known = [n for n in _prefixes(rest) if n in parameters]
        if known:
            return "optimizer", "state", known[-1], rest.removeprefix(f"{known[-1]}.")
    if name.startswith(f"{GROUPS}."):
        number, _, key = name.removeprefix(f"{GROUPS}.").partition(".")
        return "optimizer", "param_groups", int(number), key
    return (name,)


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))
