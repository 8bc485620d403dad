"""The targets of an optimizer, which are the tensors it updates on this rank, and which state exists on any rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import objects_of_all
from ..containers import tensors_in
from ..errors import CheckpointError, DivergenceError, FullshardError
from ..forms import FlatShard
from ..optimizers import group_settings
from ..torch_private.local_tensor import inside
from .table import Named, Table


@dataclass(eq=False)
class Target:
    """A tensor that an optimizer updates.

    Attributes:
        tensor: the tensor itself.
        rows: the parameters that it stands for, in order; its state is theirs.
        group, index: its group in the optimizer, and its number over all groups.
        view: for a view over several parameters, the elements [begin, begin + length) of the shard that it covers.
    """

    tensor: torch.Tensor
    rows: list[Named]
    group: int
    index: int
    view: tuple[int, int] | None = None

    @property
    def takes_any_shape(self) -> bool:
        """Whether the optimizer sees the parameter's whole shape, so that state of any shape keeps its meaning."""
        row = self.rows[0]
        return row.bucket is None or (self.view is None and (row.has_full_tensor or row.bucket.layout.world == 1))

    def is_part(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor seems to be this rank's part of one: it has the shape of this rank's part."""
        bucket = self.rows[0].bucket
        if bucket is None or bucket.layout.world == 1 or not is_whole(tensor):
            return False
        return tuple(tensor.shape) == (tuple(inside(self.tensor).shape) if self.view is None else (self.view[1],))

    def local(self, row: Named, value: torch.Tensor) -> torch.Tensor:
        """The local part of `row` in state of the shape of `tensor`; shares memory."""
        assert row.bucket is not None and row.member is not None
        if self.view is None:
            if row.has_full_tensor and row.bucket.layout.world > 1 and is_whole(value):
                return row.bucket.cut(value, row.member)  # state of one process, of which this rank steps its part
            return row.bucket.local(value, row.member)
        part = row.member.part
        if not self.view[0] or type(value) is not torch.Tensor:
            return row.bucket.part(value, row.member)
        offset = value.storage_offset() + (part.offset - self.view[0] if part.numel else 0)
        return value.as_strided(part.shape, part.stride, offset)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its elements itself: it is of no class of sharded or other special tensors."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def settle_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that keeps its state elsewhere between steps share it by parameter. Collective if it does."""
    if (share_state := getattr(optimizer, "share_state", None)) is not None:
        share_state()


def targets_of(table: Table, groups: Iterable[Mapping[str, Any]]) -> list[Target]:
    """The targets in an optimizer's `param_groups`, in its order, matched with the model's parameters.

    Raises:
        CheckpointError: a tensor is neither a parameter of the model nor a view over some.
    """
    covered: dict[int, tuple[list[Named], tuple[int, int] | None]] = {}  # by the id of a tensor
    covered |= {key: ([row], None) for key, row in table.by_tensor.items()}
    for unit, _ in table.units:
        for tensor, view_of_run, members in unit.optimizer_views():
            rows = [row for member in members if (row := table.of(member)) is not None]
            if rows:
                covered[id(tensor)] = (rows, (view_of_run.offset, view_of_run.length))
    targets: list[Target] = []
    for number, group in enumerate(groups):
        for tensor in group["params"]:
            if id(tensor) not in covered:
                raise CheckpointError(
                    "The optimizer updates a tensor that does not belong to the model.",
                    got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}",
                    remedy="build it from model.parameters() or optimizer_view(model) after sharding the model",
                    topic="optimizer-state",
                )
            rows, view = covered[id(tensor)]
            targets.append(Target(tensor, rows, number, len(targets), view))
    return targets


def named_groups(targets: Sequence[Target], groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups in saved form: copies of their settings, and the names of their parameters."""
    return [
        {key: copy.copy(value) for key, value in group_settings(group).items()}
        | {"params": [row.name for target in targets if target.group == number for row in target.rows]}
        for number, group in enumerate(groups)
    ]


@dataclass(frozen=True)
class Kind:
    """Describes one key of a parameter's state, as one rank has it, for ranks that have no state of the parameter.

    Attributes:
        per: one value per element, one per parameter, or of a shape that only the optimizer understands.
        owns: whether the rank owns any elements of the parameter.
        dtype: of one value per element; None otherwise.
        value: the one value per parameter; None otherwise.
    """

    per: Literal["element", "parameter", "other"]
    owns: bool
    dtype: torch.dtype | None = None
    value: Any = None


Kinds = dict[str, dict[str, Kind]]  # by parameter name and key


def kinds_of(target: Target, state: Mapping[str, Any], shown: bool = False) -> Kinds:
    """The kind of each key of a target's state, for each of its parameters.

    Args:
        shown: whether sharded tensors are handed on as they are, so that they may lie in containers, too.

    Raises:
        CheckpointError: state whose shape has no meaning for parts of parameters, or parts of tensors in containers.
    """
    kinds: Kinds = {}
    expected = tuple(target.tensor.shape) if target.view is None else (target.view[1],)
    for row in target.rows:
        owns = row.member is None or row.member.part.numel > 0
        kinds[row.name] = {key: _kind(target, key, value, expected, owns, shown) for key, value in state.items()}
    return kinds


def _kind(target: Target, key: str, value: Any, expected: tuple[int, ...], owns: bool, shown: bool) -> Kind:
    if not isinstance(value, torch.Tensor):
        tensors = [tensor for tensor in tensors_in(value) if tensor.dim()]
        shards = [tensor for tensor in tensors if not is_whole(tensor)]
        if shown and shards and all([isinstance(shard, (DTensor, FlatShard)) for shard in shards]):
            return Kind("other", owns)
        if shards or (tensors and all(map(target.is_part, tensors))):
            raise _split_state(target, key, (shards or tensors)[0], f"in a {type(value).__name__}")
        return Kind("parameter", owns, value=value)
    # A 0-d FlatShard is one element of a parameter; any other 0-d tensor is one value for the whole parameter.
    if tuple(value.shape) == expected and (value.dim() or isinstance(value, FlatShard)):
        return Kind("element", owns, dtype=value.dtype)
    if value.dim() == 0:
        return Kind("parameter", owns, value=value.detach().cpu())
    if target.takes_any_shape:
        if target.is_part(value):
            raise _split_state(target, key, value, "where each rank has a part of its own")
        return Kind("other", owns)
    raise CheckpointError(
        f"Optimizer state {key!r} does not have one value per element, so it has no meaning for parts of parameters.",
        parameter=", ".join(row.name for row in target.rows),
        expected=f"shape {expected} or ()",
        got=f"shape {tuple(value.shape)}",
        remedy="use this optimizer on sharded parameters that keep their shape (fully_shard's, or NO_SHARD), "
        "or an element-wise optimizer (SGD, Adam, AdamW, ...)",
    )


def _split_state(target: Target, key: str, tensor: torch.Tensor, where: str) -> CheckpointError:
    return CheckpointError(
        f"Optimizer state {key!r} has tensors that are split over ranks, in a form in which they cannot be saved.",
        parameter=", ".join(row.name for row in target.rows),
        expected="sharded tensors, such as torch.zeros_like(parameter), as values of optimizer.state[parameter]",
        got=f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}, {where}",
        remedy="keep each under a key of its own; or save without this optimizer: save(folder, model), with the "
        "tensors in state=",
        topic="optimizer-state",
    )


def merged_kinds(
    table: Table, targets: Sequence[Target], group_count: int, kinds: Kinds, error: FullshardError | None
) -> Kinds:
    """The kinds of all ranks, from which a rank learns the state of parameters that it owns no part of. Collective.

    Args:
        group_count: the number of groups in the optimizer.
        kinds: this rank's kinds.
        error: this rank's error, to be raised on all ranks.

    Raises:
        DivergenceError: ranks' optimizers have different parameters, or group them differently; on every rank.
        CheckpointError: the first rank's `error`, on every rank.
    """
    structure = [
        sorted(row.name for t in targets if t.group == group for row in t.rows) for group in range(group_count)
    ]
    axes = {id(b.axes.shard.group): b.axes.shard for b in table.buckets() if b.axes.shard.size > 1}
    for axis in axes.values():  # all of them, even after an error, so that ranks of the next axis learn of it
        everyone = objects_of_all((structure, kinds, error), axis.group, "optimizers' state")
        kinds, error = {}, None
        for rank, (rank_structure, rank_kinds, rank_error) in enumerate(everyone):
            if rank_structure != everyone[0][0] and rank_error is None:
                rank_error = _structure_error(axis.ranks[0], everyone[0][0], axis.ranks[rank], rank_structure)
            error = error or rank_error
            merge_kinds(kinds, rank_kinds)
    if error is not None:
        raise error
    return kinds


def merge_kinds(kinds: Kinds, of_rank: Kinds) -> None:
    """Add the kinds of another rank to `kinds`; a rank that owns elements of a parameter counts before one that does
    not, whose step count may be old."""
    for name, entries in of_rank.items():
        merged = kinds.setdefault(name, {})
        for key, kind in entries.items():
            if key not in merged or (kind.owns and not merged[key].owns):
                merged[key] = kind


def _structure_error(first: int, expected: list[list[str]], rank: int, got: list[list[str]]) -> DivergenceError:
    there, here = ({name: g for g, names in enumerate(groups) for name in names} for groups in (expected, got))
    name = min((n for n in {*there, *here} if there.get(n) != here.get(n)), default=None)

    def described(groups: dict[str, int]) -> str:
        return f"{len(groups)} parameters, this one in group {groups[name]}" if name in groups else "without it"

    return DivergenceError(
        "Ranks' optimizers have different parameters, or group them differently, so their state cannot be combined.",
        parameter=name,
        rank=rank,
        expected=f"as on rank {first}: {described(there)}",
        got=described(here),
        remedy="build the optimizer from the same parameters in the same groups on every rank, in any order",
        topic="models-differ",
    )
