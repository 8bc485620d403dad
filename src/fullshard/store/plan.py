"""What a save writes: every rank knows its own pieces, and all compare before anything is written.

What a rank holds follows from layouts, meshes and placements, and where a piece lies in a file is reported when it is
written: nothing of it is sent before. Ranks exchange one small message, and one number a tensor:

    digests         of the step and the optimizers' groups; of names, shapes and dtypes of all tensors; of scalars of
                    optimizer state; of each value of the user's state
    fingerprints    of the rectangles that a rank writes of a tensor, which add up to that of the whole if, and only if,
                    the ranks write every element once

What only one rank knows is sent, and only where digests or fingerprints differ:

    to the first rank   values of the user's state that differ between ranks, and scalars of optimizer state
    to all              tensors that only some ranks have, such as those of a pipeline's stages
    to all              rectangles that several ranks hold which do not know each other, such as a norm beside
                        tensor-parallel layers, and hashes of their values: one of these ranks writes
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pickle
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.targets import settle_state
from ..errors import CheckpointError, DivergenceError
from .contents import Contents, contents_of
from .entries import Digest, Entries, Stateful, Values, entries_of, values_of
from .folder import Folder
from .hashed import FileFacts, Hashed
from .manifest import NAME as MANIFEST
from .manifest import Manifest, versions, without_collection
from .piece import Key, Piece, Scalar, whole_piece
from .ranks import Ranks
from .source import OPTIMIZER, Entry
from .storage import Stored
from .tree import to_json
from .write import bytes_of, file_of, write_pieces

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
class Ending:
    """What the first rank does when all have written.

    Attributes:
        manifest: without files.
        keep_last, keep_every: see `Folder.prune`.
    """

    manifest: Manifest
    keep_last: int | None
    keep_every: int | None


@dataclass
class Plan:
    """What one rank writes.

    Attributes:
        pieces: all that it writes.
        ending: on the first rank.
    """

    pieces: list[Piece]
    ending: Ending | None = None


@dataclass
class Written:
    """What one rank wrote.

    Attributes:
        stored: where each piece lies.
        facts: of the files.
    """

    stored: list[Stored]
    facts: dict[str, FileFacts]


_Digests = tuple[bytes, bytes, bytes, dict[str, Digest]]


@dataclass
class _Outline:
    """What ranks compare.

    Attributes:
        step: the training step that is saved.
        groups: of the optimizers, as JSON, parameters sorted.
        entries: all tensors that a rank knows of, whether or not it holds any of them.
        scalars: of optimizer state, by parameter and key.
        state: the user's values.
    """

    step: int
    groups: str
    entries: dict[str, Entry]
    scalars: dict[str, dict[str, Scalar]]
    state: Values

    def digests(self) -> _Digests:
        """Of the step and groups, of the entries, and of the scalars; and of the user's values, by name."""
        entries = [(name, entry.shape, str(entry.dtype)) for name, entry in sorted(self.entries.items())]
        scalars = [(name, key, own[key].value) for name, own in sorted(self.scalars.items()) for key in sorted(own)]
        parts = ((self.step, self.groups), entries, scalars)
        first, second, third = (hashlib.sha256(pickle.dumps(part)).digest() for part in parts)
        return first, second, third, self.state.digests


@without_collection()
def plan_save(request: Request, ranks: Ranks) -> Plan:
    """What this rank is to write. Collective.

    Raises:
        DivergenceError: ranks save different steps, tensors of other shapes, dtypes or values, or other optimizers.
        CheckpointError: together they hold not every element, or some twice; or something that cannot be saved.
    """
    contents, outline, digests = ranks.together("reading the model to save", lambda: _read(request, ranks))
    everyone: list[_Digests] = ranks.all(digests)
    if len({each[0] for each in everyone}) > 1:
        _refuse_different(outline, ranks)
    entries = _entries_of_all(outline.entries, [each[1] for each in everyone], ranks)
    scalars = [outline.scalars] if len({each[2] for each in everyone}) == 1 else ranks.gather(outline.scalars)
    values = entries_of(outline.state, [each[3] for each in everyone], ranks.rank)
    own_tensors = {piece.name: Entry(piece.shape, piece.dtype) for piece in values.own_pieces}
    owned: list[tuple[dict[str, Any], dict[str, Entry]]] = (
        ranks.gather((values.own, own_tensors)) if values.differ else []
    )
    pieces = [piece for piece in (*contents.pieces, *outline.state.sharded) if piece.writes]
    others = _written_by_others(pieces, entries, ranks)
    plan = Plan([piece for piece in pieces if (piece.name, piece.offsets) not in others])
    plan.pieces += [piece for piece in (*values.common_pieces, *values.own_pieces) if piece.writes]
    if ranks.is_first:
        entries |= {piece.name: Entry(piece.shape, piece.dtype) for piece in values.common_pieces}
        for _, of_rank in owned:
            entries |= of_rank
        _add_first(plan, request, contents, entries, scalars, values, [own for own, _ in owned], ranks.size)
    return plan


def _read(request: Request, ranks: Ranks) -> tuple[Contents, _Outline, _Digests]:
    """What this rank holds, and what ranks compare of it."""
    for optimizer in request.optimizers:
        settle_state(optimizer)
    contents = contents_of(request.model, request.optimizers, ranks.is_first)
    state = {key: _giving(value) for key, value in request.state.items()}
    state |= {name: module.get_extra_state for name, module in contents.extra.items()}
    values = values_of(state, ranks.is_first)
    groups = [{**to_json(g, "param_groups", {}), "params": sorted(g["params"])} for g in contents.groups]
    entries = {p.name: Entry(p.shape, p.dtype) for p in (*contents.pieces, *values.sharded)}
    scalars: dict[str, dict[str, Scalar]] = {}
    for one in contents.states:
        for name, own in one.scalars.items():
            sent = {key: Scalar(_sent(scalar.value), scalar.owns) for key, scalar in own.items()}
            scalars.setdefault(name, {}).update(sent)
    outline = _Outline(request.step, json.dumps(groups), entries, scalars, values)
    return contents, outline, outline.digests()


def _giving(value: Any) -> Callable[[], Any]:
    return value.state_dict if isinstance(value, Stateful) else lambda: value


@dataclass(frozen=True)
class _Number:
    """A 0-d tensor as it is sent: pickled tensors take 200 us each."""

    value: Any
    dtype: torch.dtype


def _sent(value: Any) -> Any:
    return _Number(value.item(), value.dtype) if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _received(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype, device="cpu") if isinstance(value, _Number) else value


# What ranks compare.


def _refuse_different(outline: _Outline, ranks: Ranks) -> None:
    """Raise for the first rank whose step or groups are not those of rank 0. Collective."""
    everyone = ranks.all((outline.step, outline.groups))
    for rank, each in enumerate(everyone):
        for what, own, first in zip(("step", "optimizer groups"), each, everyone[0], strict=True):
            if own != first:
                raise DivergenceError(
                    f"Ranks save different things: the {what} differs; nothing was written.",
                    rank=rank,
                    expected=f"as on rank 0: {_short(first)}",
                    got=_short(own),
                    remedy="let all ranks call save() after the same step, with the same optimizers",
                    topic="ranks-differ",
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _entries_of_all(entries: dict[str, Entry], digests: Sequence[bytes], ranks: Ranks) -> dict[str, Entry]:
    """All tensors that any rank knows of. Collective where ranks know of different ones.

    Raises:
        DivergenceError: one tensor in different shapes or dtypes.
    """
    if len(set(digests)) == 1:
        return dict(entries)
    reports = digests.index(digests[ranks.rank]) == ranks.rank  # one rank for all with the same
    union: dict[str, tuple[Entry, int]] = {}
    for rank, of_rank in enumerate(ranks.all(entries if reports else {})):
        for name, entry in of_rank.items():
            expected, first = union.setdefault(name, (entry, rank))
            if expected != entry:
                raise DivergenceError(
                    "Ranks hold one tensor in different shapes or dtypes; nothing was written.",
                    parameter=name,
                    rank=rank,
                    expected=f"{expected}, as on rank {first}",
                    got=entry,
                    topic="models-differ",
                )
    return {name: entry for name, (entry, _) in union.items()}


PRIME = 2**47 - 115
"""What fingerprints are counted by: those of 65,536 ranks add up in an int64."""


@functools.lru_cache(maxsize=2**16)
def fingerprint(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The sum over a rectangle's elements of x1^i1 * x2^i2 * ..., modulo `PRIME`, at fixed x; 1 if it is empty.

    Two sets of elements with one sum are the same set, but for a chance of about the extents' sum in `PRIME` (lemma of
    Schwartz and Zippel). Along each dim it is a geometric series.
    """
    if 0 in sizes:
        return 1
    product = 1
    for dim, (begin, extent) in enumerate(zip(offsets, sizes, strict=True)):
        x, inverse = _base(dim)
        product = product * pow(x, begin, PRIME) * (pow(x, extent, PRIME) - 1) * inverse % PRIME
    return product


@functools.cache
def _base(dim: int) -> tuple[int, int]:
    """The x of a dim, and the inverse of x - 1."""
    x = int.from_bytes(hashlib.sha256(bytes([dim])).digest()[:5], "big")
    return x, pow(x - 1, -1, PRIME)


def _written_by_others(pieces: Sequence[Piece], entries: Mapping[str, Entry], ranks: Ranks) -> set[Key]:
    """The pieces that another rank writes, of those that this one would. Collective.

    Raises:
        CheckpointError: together the ranks hold not every element of a tensor, or some twice.
        DivergenceError: several ranks hold a piece, and other values of it.
    """
    own = dict.fromkeys(sorted(entries), 0)
    for piece in pieces:
        own[piece.name] += fingerprint(piece.offsets, piece.sizes)
    sums = ranks.sum(torch.tensor([each % PRIME for each in own.values()], dtype=torch.int64, device="cpu"))
    wrong = {
        name
        for name, total in zip(own, sums.tolist(), strict=True)
        if total % PRIME != _fingerprint_of(entries[name].shape)
    }
    return _share_out(wrong, pieces, entries, ranks) if wrong else set()


def _fingerprint_of(shape: tuple[int, ...]) -> int:
    return fingerprint((0,) * len(shape), shape)


def _share_out(names: Container[str], pieces: Sequence[Piece], entries: Mapping[str, Entry], ranks: Ranks) -> set[Key]:
    """Let one of the ranks that hold a piece of these tensors write it, in turns; see `_written_by_others`."""
    holders: dict[Key, list[int]] = {}
    sizes: dict[str, dict[Key, tuple[int, ...]]] = {}
    of_rank = {(piece.name, piece.offsets): piece for piece in pieces if piece.name in names}
    for rank, rectangles in enumerate(ranks.all({key: piece.sizes for key, piece in of_rank.items()})):
        for key, extent in rectangles.items():
            holders.setdefault(key, []).append(rank)
            sizes.setdefault(key[0], {})[key] = extent
    for name in (name for name in entries if name in names):
        rectangles = sizes.get(name, {})
        total = sum(fingerprint(key[1], extent) for key, extent in rectangles.items())
        if total % PRIME != _fingerprint_of(entries[name].shape):
            raise CheckpointError(
                "The ranks that save do not hold every element of a tensor once; nothing was written.",
                parameter=name,
                expected=f"{entries[name].numel} elements",
                got=f"{sum(map(math.prod, rectangles.values()))} in all",
                remedy="save over all ranks of the model's mesh (process_group=), the same model on each",
            )
    several = {key: its_ranks for key, its_ranks in holders.items() if len(its_ranks) > 1}
    hashes = ranks.together(
        "comparing what several ranks hold",
        lambda: {key: hashlib.sha256(bytes_of(of_rank[key].tensor)).digest() for key in several if key in of_rank},
    )
    compare_values(several, ranks.all(hashes))
    in_turns = enumerate(several.items())
    return {key for turn, (key, holding) in in_turns if holding[turn % len(holding)] != ranks.rank}


def compare_values(several: Mapping[Key, Sequence[int]], hashes: Sequence[Mapping[Key, bytes]]) -> None:
    """Check that pieces held by several ranks have the same values on all of them.

    Args:
        hashes: each rank's, of the values of its pieces.

    Raises:
        DivergenceError: ranks have different values.
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
                    got="different values",
                    remedy="say how it is split (as a DTensor, or over one mesh of all ranks), or give each rank's a "
                    "name of its own; if ranks should have the same, find out why they do not (fullshard.verify)",
                    topic="weights-differ",
                )


# What the first rank writes for all.


def _add_first(
    plan: Plan,
    request: Request,
    contents: Contents,
    entries: dict[str, Entry],
    scalars_of_ranks: Sequence[Mapping[str, Mapping[str, Scalar]]],
    values: Entries,
    owned: list[dict[str, Any]],
    world: int,
) -> None:
    """Scalars of optimizer state and settings of groups, as tensors or values and as JSON; and the plan's ending.

    Args:
        entries: all tensors but these.
        scalars_of_ranks: scalars of every rank, or the first's if all have the same.
        owned: values that are a rank's own, of every rank; none if no rank has any.
        world: how many ranks save.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, key, value in _scalars(scalars_of_ranks):
        if isinstance(value, torch.Tensor):
            tensors[f"{OPTIMIZER}{parameter}.{key}"] = value
        else:
            plain.setdefault(parameter, {})[key] = value
    groups = to_json(contents.groups, GROUPS, tensors)
    scalars = to_json(plain, SCALARS, tensors)
    plan.pieces += [whole_piece(name, tensor, True) for name, tensor in tensors.items()]
    entries |= {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    manifest = Manifest(
        step=request.step,
        world=world,
        time=time.time(),
        tensors=entries,
        ties=contents.ties,
        values={"optimizer": {"param_groups": groups, "scalars": scalars}, "state": values.common},
        ranks=owned,
        files={},
        layouts={
            unit.name or "(root)": ", ".join(b.layout.name for b in unit.buckets) for unit, _ in contents.table.units
        },
        writer=versions(),
    )
    plan.ending = Ending(manifest, request.keep_last, request.keep_every)


def _scalars(scalars_of_ranks: Sequence[Mapping[str, Mapping[str, Scalar]]]) -> list[tuple[str, str, Any]]:
    """Parameter, key and value of every scalar: what a rank says that holds some of the parameter."""
    first: dict[tuple[str, str], Scalar] = {}
    for of_rank in scalars_of_ranks:
        for parameter, scalars in of_rank.items():
            for key, scalar in scalars.items():
                earlier = first.get((parameter, key))
                if earlier is None or (scalar.owns and not earlier.owns):
                    first[parameter, key] = scalar
    return [(parameter, key, _received(scalar.value)) for (parameter, key), scalar in first.items()]


# Executing it: in the rank's own process, or in one beside it (`background.py`).


def write(
    folder: Folder, name: str, rank: int, pieces: Sequence[Piece], progress: Callable[[int], None] | None = None
) -> Written:
    """Write a rank's file, and wait until it is on the disk. No file if there are no pieces.

    Args:
        folder: where checkpoints are kept.
        name: of the one being written, as `Folder.begin` gave it.
        progress: called with a number of bytes whenever some were written.
    """
    if not pieces:
        return Written([], {})
    file = file_of(rank)
    with folder.create(name, file) as below:
        stream = Hashed(below, progress)
        stored = write_pieces(stream, file, pieces)
    return Written(stored, {file: stream.facts()})


@without_collection()
def end(folder: Folder, name: str, ending: Ending | None, written: Sequence[Written]) -> str:
    """Write the manifest, and let the checkpoint take its place; its name. On the first rank."""
    assert ending is not None
    manifest = ending.manifest
    files: dict[str, FileFacts] = {}
    stored: dict[str, list[Stored]] = {name: [] for name in manifest.tensors}
    for each in written:
        files |= each.facts
        for part in each.stored:
            stored[part.name].append(part)
    time_of_it = folder.time_of_next(manifest.time)
    manifest = dataclasses.replace(manifest, time=time_of_it, files=files, stored=stored)
    final = folder.publish(name, {MANIFEST: manifest.text()})
    folder.prune(ending.keep_last, ending.keep_every)
    return final
