"""Plans a save: each rank lists its own pieces, and all ranks compare before anything is written.

A rank's pieces follow from layouts, meshes and placements, and their offsets in files are reported after the write, so
pieces are not exchanged beforehand. Ranks exchange one small message, and one number per tensor:

    digests         of the step and the optimizers' groups; of names, shapes and dtypes of all tensors; of scalars of
                    optimizer state; of each value of the user's state
    fingerprints    of the rectangles that a rank writes of a tensor; they add up to that of the whole tensor if and
                    only if the ranks write every element once

Only where digests or fingerprints differ, ranks send more:

    to the first rank   values of the user's state that differ between ranks, and scalars of optimizer state
    to all              tensors that only some ranks have, such as those of a pipeline's stages, with their ties; and
                        the parameters that only some ranks' optimizers have, in groups of which all ranks have the same
                        settings
    to all              rectangles that several ranks have without a common mesh, such as a norm beside tensor-parallel
                        layers, and hashes of their values: one of these ranks writes
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pickle
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.targets import Kinds, merge_kinds, settle_state
from ..errors import CheckpointError, DivergenceError
from .contents import Contents, contents_of
from .entries import Digest, Stateful, Values, common_names, name_of_rank, values_of
from .manifest import Manifest, versions, without_collection
from .names import OPTIMIZER, TensorEntry, refuse_long
from .piece import Key, Piece, refuse_unsupported, whole_piece
from .ranks import Ranks
from .tree import to_json
from .write import bytes_of


class _Digests(NamedTuple):
    settings: bytes
    described: bytes
    scalars: bytes
    values: dict[str, Digest]


class _Described(NamedTuple):
    """Tensors by name; and their further names, each with the first."""

    entries: dict[str, TensorEntry]
    ties: dict[str, str]


@dataclass
class Outline:
    """The contents of this rank, and what ranks compare of them.

    Attributes:
        contents: of the model and the optimizers.
        settings: the step; and the optimizers' groups, as JSON, parameters sorted.
        described: all tensors that the rank knows of, whether or not it has any of their elements.
        scalars: of optimizer state, by parameter and key.
        values: the user's.
        digests: of everything above.
    """

    contents: Contents
    settings: tuple[int, str]
    described: _Described
    scalars: Kinds
    values: Values
    digests: _Digests


@without_collection()
def plan_save(outline: Outline, step: int, ranks: Ranks) -> tuple[list[Piece], Manifest | None]:
    """The pieces that this rank writes; on the first rank also the manifest, without files. Collective.

    Raises:
        DivergenceError: ranks save different steps, optimizers, or tensors with different shapes, dtypes or values.
        CheckpointError: the ranks do not have every element exactly once, or something cannot be saved.
    """
    digests: list[_Digests] = ranks.all(outline.digests)
    groups = outline.contents.groups
    if len({of_rank.settings for of_rank in digests}) > 1:
        are_stages = len({of_rank.described for of_rank in digests}) > 1
        groups = _groups_of_all(outline, are_stages, ranks)
    entries, ties = _described_by_all(outline.described, [of_rank.described for of_rank in digests], ranks)
    same_scalars = len({of_rank.scalars for of_rank in digests}) == 1
    scalars = [outline.scalars] if same_scalars else ranks.gather(outline.scalars)
    common = common_names([of_rank.values for of_rank in digests])
    common_pieces, own_pieces = outline.values.pieces(common, ranks.rank)
    common_values = {key: value for key, value in outline.values.json.items() if key in common}
    own_values = {key: value for key, value in outline.values.json.items() if key not in common}
    differ = any(of_rank.values != digests[0].values for of_rank in digests)
    owned: list[tuple[dict[str, Any], dict[str, TensorEntry]]] = (
        ranks.gather((own_values, _entries_of(own_pieces))) if differ else []
    )
    pieces = [piece for piece in (*outline.contents.pieces, *outline.values.sharded) if piece.writes]
    others = _written_by_others(pieces, entries, ranks)
    pieces = [piece for piece in pieces if (piece.name, piece.offsets) not in others]
    pieces += [piece for piece in (*common_pieces, *own_pieces) if piece.writes]
    if not ranks.is_first:
        return pieces, None
    optimizer, tensors = _optimizer_values(groups, scalars)
    optimizer_pieces = [whole_piece(name, tensor, True) for name, tensor in tensors.items()]
    pieces += optimizer_pieces
    for more in (_entries_of(common_pieces), *(of_rank for _, of_rank in owned), _entries_of(optimizer_pieces)):
        entries |= more
    manifest = Manifest(
        step=step,
        world=ranks.size,
        time=time.time(),
        tensors=entries,
        ties=ties,
        values={"optimizer": optimizer, "state": common_values},
        ranks=[own for own, _ in owned],
        writer=versions(),
    )
    return pieces, manifest


@without_collection()
def outline_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int, state: Mapping[str, Any], first: bool
) -> Outline:
    """The outline of this rank. No communication.

    Args:
        first: whether this is the first rank.

    Raises:
        CheckpointError: something cannot be saved.
    """
    for optimizer in optimizers:
        settle_state(optimizer)
    contents = contents_of(model, optimizers, first)
    getters = {key: _getter(value) for key, value in state.items()}
    getters |= {name: module.get_extra_state for name, module in contents.extra.items()}
    values = values_of(getters, first)
    groups = [{**to_json(g, "param_groups", {}), "params": sorted(g["params"])} for g in contents.groups]
    entries = _entries_of((*contents.pieces, *values.sharded))
    scalars: Kinds = {}
    for state_of in contents.states:
        for name, of_parameter in state_of.scalars.items():
            for key, scalar in of_parameter.items():
                if not isinstance(scalar.value, torch.Tensor):
                    _check_plain(f"{OPTIMIZER}{name}.{key}", scalar.value)
            packed = {key: replace(scalar, value=_packed(scalar.value)) for key, scalar in of_parameter.items()}
            scalars.setdefault(name, {}).update(packed)
    of_scalars = [f"{OPTIMIZER}{name}.{key}" for name, own in scalars.items() for key in own]
    refuse_long([*entries, *contents.ties, *of_scalars])
    refuse_long((name for tensors in values.tensors.values() for name in tensors), prefix=name_of_rank(2**20, ""))
    settings = (step, json.dumps(groups))
    tensors = [(name, entry.shape, str(entry.dtype)) for name, entry in sorted(entries.items())]
    listed = [(name, key, own[key].value) for name, own in sorted(scalars.items()) for key in sorted(own)]
    described = _sha256((tensors, sorted(contents.ties.items())))
    digests = _Digests(_sha256(settings), described, _sha256(listed), values.digests)
    return Outline(contents, settings, _Described(entries, contents.ties), scalars, values, digests)


def _check_plain(name: str, value: Any) -> None:
    """Check that optimizer state that is not a tensor can be saved as one value for a whole parameter.

    Raises:
        CheckpointError: it is not plain, or contains a tensor that is quantized or sparse.
    """
    tensors: dict[str, torch.Tensor] = {}
    to_json(value, name, tensors)
    refuse_long(f"optimizer.scalars.{path.removeprefix(OPTIMIZER)}" for path in tensors)
    for path, tensor in tensors.items():
        refuse_unsupported(path, tensor)


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()


def _entries_of(pieces: Iterable[Piece]) -> dict[str, TensorEntry]:
    return {piece.name: TensorEntry(piece.shape, piece.dtype) for piece in pieces}


def _getter(value: Any) -> Callable[[], Any]:
    return value.state_dict if isinstance(value, Stateful) else lambda: value


@dataclass(frozen=True)
class _Number:
    """A 0-d tensor, packed for sending: to pickle a tensor takes 200 us."""

    value: Any
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


def _packed(value: Any) -> Any:
    return _Number(value.item(), value.dtype) if isinstance(value, torch.Tensor) and value.dim() == 0 else value


# Comparing ranks.


def _groups_of_all(outline: Outline, are_stages: bool, ranks: Ranks) -> list[dict[str, Any]]:
    """The optimizers' groups, with the parameters of all ranks, whose settings differ. Collective.

    Args:
        are_stages: whether ranks have different tensors, and so may have different parameters in a group.

    Raises:
        DivergenceError: ranks have different steps or groups.
    """
    of_ranks = ranks.all(outline.settings)
    groups = [{**group, "params": list(group["params"])} for group in outline.contents.groups]
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]} if are_stages else {}
    first_step, first_groups = of_ranks[0]
    for rank, (step, text) in enumerate(of_ranks):
        of_rank: list[dict[str, Any]] = json.loads(text)
        if step != first_step:
            raise _different("steps", rank, first_step, step)
        if text != first_groups and not (
            are_stages and _settings_in(of_rank) == _settings_in(json.loads(first_groups))
        ):
            raise _different("optimizer groups", rank, first_groups, text)
        for number, group in enumerate(of_rank):
            for name in group["params"]:
                if are_stages and name not in group_of:
                    groups[number]["params"].append(name)
                if are_stages and group_of.setdefault(name, number) != number:
                    raise _different(f"optimizer groups ({name} is in two)", rank, first_groups, text)
    return groups


def _settings_in(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _different(what: str, rank: int, first: Any, own: Any) -> DivergenceError:
    return DivergenceError(
        f"Ranks save different {what}; nothing was written.",
        rank=rank,
        expected=f"as on rank 0: {_short(first)}",
        got=_short(own),
        remedy="call save() on all ranks after the same step, with the same optimizers; stages of a pipeline need as "
        "many groups as each other, with the same settings",
        topic="ranks-differ",
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _described_by_all(own: _Described, digests: Sequence[bytes], ranks: Ranks) -> _Described:
    """All tensors that any rank knows of. Collective if digests differ.

    Raises:
        DivergenceError: ranks have different shapes or dtypes for a tensor.
    """
    if len(set(digests)) == 1:
        return _Described(dict(own.entries), own.ties)
    reports = digests.index(digests[ranks.rank]) == ranks.rank  # the first of the ranks with the same entries
    union: dict[str, tuple[TensorEntry, int]] = {}
    ties: dict[str, str] = {}
    for rank, of_rank in enumerate(ranks.all(own if reports else _Described({}, {}))):
        ties = {**of_rank.ties, **ties}
        for name, entry in of_rank.entries.items():
            expected, first = union.setdefault(name, (entry, rank))
            if expected != entry:
                raise DivergenceError(
                    "Ranks have different shapes or dtypes for the same tensor; nothing was written.",
                    parameter=name,
                    rank=rank,
                    expected=f"{expected}, as on rank {first}",
                    got=entry,
                    topic="models-differ",
                )
    entries = {name: entry for name, (entry, _) in union.items()}
    return _Described(entries, {name: first for name, first in ties.items() if name not in entries})


PRIME = 2**47 - 115
"""The modulus of fingerprints: the sum over 65,536 ranks fits in an int64."""


@functools.lru_cache(maxsize=2**16)
def fingerprint(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The sum over a rectangle's elements of x1^i1 * x2^i2 * ..., modulo `PRIME`, at fixed x; 1 if it is empty.

    Different sets of elements have the same sum with a probability of about the sum of the extents over `PRIME` (lemma
    of Schwartz and Zippel). Along each dim it is a geometric series.
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


def _written_by_others(pieces: Sequence[Piece], entries: Mapping[str, TensorEntry], ranks: Ranks) -> set[Key]:
    """The pieces in `pieces` that another rank writes. Collective.

    Raises:
        CheckpointError: the ranks do not have every element of a tensor exactly once.
        DivergenceError: several ranks have a piece, with different values.
    """
    fingerprints = dict.fromkeys(sorted(entries), 0)
    for piece in pieces:
        fingerprints[piece.name] += fingerprint(piece.offsets, piece.sizes)
    own = torch.tensor([number % PRIME for number in fingerprints.values()], dtype=torch.int64, device="cpu")
    totals = zip(fingerprints, ranks.sum(own).tolist(), strict=True)
    wrong = {name for name, total in totals if total % PRIME != _fingerprint_of(entries[name].shape)}
    return _written_in_turns(wrong, pieces, entries, ranks) if wrong else set()


def _fingerprint_of(shape: tuple[int, ...]) -> int:
    return fingerprint((0,) * len(shape), shape)


def _written_in_turns(
    names: Container[str], pieces: Sequence[Piece], entries: Mapping[str, TensorEntry], ranks: Ranks
) -> set[Key]:
    """Distribute the pieces of these tensors over the ranks that have them; see `_written_by_others`."""
    holders: dict[Key, list[int]] = {}
    sizes: dict[str, dict[Key, tuple[int, ...]]] = {}
    own = {(piece.name, piece.offsets): piece for piece in pieces if piece.name in names}
    for rank, rectangles in enumerate(ranks.all({key: piece.sizes for key, piece in own.items()})):
        for key, extent in rectangles.items():
            holders.setdefault(key, []).append(rank)
            sizes.setdefault(key[0], {})[key] = extent
    for name in (name for name in entries if name in names):
        rectangles = sizes.get(name, {})
        total = sum(fingerprint(key[1], extent) for key, extent in rectangles.items())
        if total % PRIME != _fingerprint_of(entries[name].shape):
            raise CheckpointError(
                "The saving ranks do not have every element of a tensor exactly once; nothing was written.",
                parameter=name,
                expected=f"{entries[name].numel} elements",
                got=f"{sum(map(math.prod, rectangles.values()))} in all",
                remedy="save over all ranks of the model's mesh (process_group=), the same model on each",
            )
    shared = {key: key_holders for key, key_holders in holders.items() if len(key_holders) > 1}
    hashes = ranks.together(
        "comparing values that several ranks have",
        lambda: {key: hashlib.sha256(bytes_of(own[key].tensor)).digest() for key in shared if key in own},
    )
    _compare_values(shared, ranks.all(hashes))
    turns = enumerate(shared.items())
    return {key for turn, (key, key_holders) in turns if key_holders[turn % len(key_holders)] != ranks.rank}


def _compare_values(shared: Mapping[Key, Sequence[int]], hashes: Sequence[Mapping[Key, bytes]]) -> None:
    """Check that pieces have the same values on all ranks that have them.

    Args:
        shared: those ranks, by piece.
        hashes: each rank's, of the values of its pieces.

    Raises:
        DivergenceError: ranks have different values.
    """
    for key, ranks in shared.items():
        first = ranks[0]
        for rank in ranks[1:]:
            if hashes[rank][key] != hashes[first][key]:
                raise DivergenceError(
                    "Ranks have different tensors under the same name; nothing was written.",
                    parameter=key[0],
                    rank=rank,
                    expected=f"the values of rank {first}",
                    got="different values",
                    remedy="declare how it is split (as a DTensor, or over one mesh of all ranks), or use a different "
                    "name on each rank; if the values should be equal, find out why they are not (fullshard.verify)",
                    topic="weights-differ",
                )


def _optimizer_values(
    groups: list[dict[str, Any]], scalars_of_ranks: Sequence[Kinds]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings and scalars of the optimizers: as JSON for the manifest, and the tensors among them, by name.

    Args:
        scalars_of_ranks: scalars of every rank, or of the first rank if all are the same.
    """
    merged: Kinds = {}
    for of_rank in scalars_of_ranks:
        merge_kinds(merged, of_rank)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, scalars in merged.items():
        for key, scalar in scalars.items():
            if isinstance(scalar.value, _Number):
                tensors[f"{OPTIMIZER}{parameter}.{key}"] = scalar.value.tensor()
            else:
                plain.setdefault(parameter, {})[key] = scalar.value
    return optimizer_json(groups, plain, tensors), tensors


def optimizer_json(groups: Any, scalars: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Settings and scalars of optimizers as in a manifest; adds the tensors in them to `tensors`, by name."""
    return {
        "param_groups": to_json(groups, "optimizer.param_groups", tensors),
        "scalars": to_json(scalars, "optimizer.scalars", tensors),  # L-BFGS, for one, has lists of tensors
    }
