"""What a save is going to write, and into which folder: agreed on by all ranks before anything is written."""

from __future__ import annotations

import secrets
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
from .known import Known, OfAll, forget, keep, outline_of
from .manifest import Manifest, versions
from .metadata import without_collection
from .packed import Packed
from .piece import Piece, whole_piece
from .plan import Settled, settle_plan
from .ranks import Ranks
from .source import MODEL, OPTIMIZER, Entry
from .telling import AllTold, compare_several, tell_first
from .tree import to_json
from .write import metadata_of, value_items, write_items

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


@without_collection()
def planned(request: Request, folder: Folder, ranks: Ranks) -> Planned:
    """Agree on what is written by whom, and make the folder. Collective."""
    contents: Contents | None = None
    with ranks.step("reading the model to save"):
        contents = contents_of(request.model, request.optimizers, ranks.is_first)
    assert contents is not None
    given = {key: _giving(value) for key, value in request.state.items()}
    given |= {name: module.get_extra_state for name, module in contents.extra.items()}
    entries = entries_of(given, ranks)
    pieces = [*contents.pieces, *entries.pieces]
    order: _Order | None = None
    while order is None:
        told = tell_first(request.model, contents, entries, pieces, request.step, ranks)
        compare_several(told, pieces, ranks)
        first, order = _ordered(request, contents, entries, told, folder, ranks)
    name, plan, number = order
    if plan is not None:
        packed = Packed(plan)
    else:
        assert told.known is not None
        packed = told.known.plan
    known = Known(number, told.outline, packed, None if first is None else first.of_all)
    keep(request.model, ranks.rank, ranks.size, known)
    if first is None:
        return Planned(Job(folder, name, packed, {}), pieces, None)
    return Planned(Job(folder, name, packed, first.values), [*pieces, *first.added], first.ending)


_Order = tuple[str, SavePlan | None, str]
"""What the first rank hands to each: the folder's name, what to write (None: as at the last save), and its number."""


def _ordered(
    request: Request, contents: Contents, entries: Entries, told: AllTold, folder: Folder, ranks: Ranks
) -> tuple[_First | None, _Order | None]:
    """What the first rank settled, there; and what this rank is to do. None: all have to tell their pieces first."""
    first: _First | None = None
    orders: list[_Order | None] = []
    with ranks.step("planning the save", files=True):
        if ranks.is_first:
            first = _first(request, contents, entries, told)
            if first is None:
                orders = [None] * ranks.size
            else:
                name = folder.begin(request.step)
                orders = [(name, plan, first.number) for plan in first.plans]
    try:
        order: _Order | None = ranks.scatter(orders)
        if order is None:
            forget(request.model)
            return None, None
        with ranks.step("looking for the folder that the first rank made", files=True):
            if not folder.sees(order[0]):
                raise CheckpointError(
                    "A rank cannot see the folder that rank 0 created.",
                    rank=ranks.rank,
                    expected=f"{order[0]} in {folder}",
                    remedy="save into a folder that all ranks share, on every machine under the same path",
                    code="K135",
                )
    except BaseException:
        if orders and orders[0] is not None:
            folder.discard(orders[0][0])
        raise
    return first, order


@dataclass
class _First:
    """What the first rank settles.

    Attributes:
        plans: of every rank; None: as at the last save.
        number: of what was settled.
        added, values: what the first rank writes for all: tensors, and what is none.
        ending: see there.
        of_all: kept for the next save.
    """

    plans: list[SavePlan | None]
    number: str
    added: list[Piece]
    values: dict[str, Any]
    ending: Ending
    of_all: OfAll


def _first(request: Request, contents: Contents, entries: Entries, told: AllTold) -> _First | None:
    """Settle who writes what, and what the whole is; None if it is another than at the last save, as nobody told."""
    known = told.known.of_all if told.known is not None else None
    settled = settle_plan(told.each, None if known is None else known.entries)
    held = {name: entry for name, entry in settled.entries.items() if name not in settled.scalars}
    added, values, groups, scalars = _of_first(contents, settled)
    outline = (outline_of(added), (*values, *contents.ties, *contents.ties.values()))
    if told.known is not None and known is not None and known.added == outline:
        plans: list[SavePlan | None] = [None] * len(told.each)
        number, of_all = told.known.number, known
    elif told.known is not None:
        return None
    else:
        items = [one.items for one in told.each]
        items[0] += [*write_items(added), *value_items(values)]
        made = [SavePlan(each, storage_data=StoragePrefix(f"__{rank}_")) for rank, each in enumerate(items)]
        plans, number = [*made], secrets.token_hex(8)
        metadata = Packed(metadata_of(made, _paths(contents, made)))
        of_all = OfAll(told.several, held, outline, metadata)
    manifest = _manifest(request, contents, settled, groups, scalars, entries, told.owned, added)
    ending = Ending(of_all.metadata, manifest, request.keep_last, request.keep_every)
    return _First(plans, number, added, values, ending, of_all)


def _giving(value: Any) -> Callable[[], Any]:
    return value.state_dict if isinstance(value, Stateful) else lambda: value


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


def _manifest(
    request: Request,
    contents: Contents,
    settled: Settled,
    groups: Any,
    scalars: Any,
    entries: Entries,
    owned: list[Any],
    added: list[Piece],
) -> Manifest:
    return Manifest(
        step=request.step,
        world=len(owned),
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


def _paths(contents: Contents, plans: list[SavePlan]) -> dict[str, tuple[Any, ...]]:
    """See `path_of`."""
    names = {row.name: row for row in contents.table.parameters}
    written = {item.index.fqn for plan in plans for item in plan.items}
    return {name: path_of(name, names) for name in [*written, *contents.ties]}


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
