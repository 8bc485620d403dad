"""Optimizer state: which tensors an optimizer updates on this rank, and which entries exist on any rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..comm import objects_of_all
from ..errors import CheckpointError, DivergenceError, FullshardError
from ..forms import FlatShard
from . import values
from .names import Named, Table


@dataclass(eq=False)
class Held:
    """One tensor that an optimizer updates.

    Attributes:
        tensor: as the optimizer has it.
        rows: the parameters whose state its state is, in order.
        group, index: which of the optimizer's groups it is in, and its number in the optimizer.
        view: of a tensor over several parameters: the elements [begin, begin + length) of the shard that it covers.
    """

    tensor: torch.Tensor
    rows: list[Named]
    group: int
    index: int
    view: tuple[int, int] | None = None

    @property
    def takes_any_shape(self) -> bool:
        """Whether the optimizer sees the whole shape, so that state of any shape keeps its meaning."""
        row = self.rows[0]
        if row.bucket is None or row.member is None:
            return True
        return self.view is None and (row.says_whole or row.bucket.layout.world == 1)

    def local(self, row: Named, value: torch.Tensor) -> torch.Tensor:
        """The local part of `row` in state like `tensor`."""
        assert row.bucket is not None and row.member is not None
        if self.view is not None:
            return values.part(row.bucket, value, row.member, self.view[0])
        return row.bucket.local(value, row.member)


def settle_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that keeps its state elsewhere between steps show it by parameter. Collective if it does."""
    if (share_state := getattr(optimizer, "share_state", None)) is not None:
        share_state()


def held_by(table: Table, groups: Iterable[Mapping[str, Any]]) -> list[Held]:
    """The tensors of an optimizer's `param_groups`, in its order, matched with the model's parameters.

    Raises:
        CheckpointError: a tensor that is neither a parameter of the model nor covers some.
    """
    covered: dict[int, tuple[list[Named], tuple[int, int] | None]] = {}  # by the id of a tensor
    covered |= {key: ([row], None) for key, row in table.by_tensor.items()}
    for unit, _ in table.units:
        for tensor, begin, length, members in values.views_of(unit):
            rows = [row for member in members if (row := table.of(member)) is not None]
            if rows:
                covered[id(tensor)] = (rows, (begin, length))
    held: list[Held] = []
    for g, group in enumerate(groups):
        for tensor in group["params"]:
            if id(tensor) not in covered:
                raise CheckpointError(
                    "The optimizer holds a tensor that is not the model's.",
                    got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}",
                    remedy="build it from model.parameters() or optimizer_view(model) after sharding the model",
                    topic="optimizer-state",
                )
            rows, view = covered[id(tensor)]
            held.append(Held(tensor, rows, g, len(held), view))
    return held


@dataclass(frozen=True)
class Kind:
    """What one key of a parameter's state is, on one rank: the same facts serve those that have none of it.

    Attributes:
        what: one value per element, one for all, or of a shape that only the optimizer understands.
        detail: dtype of elements, or the one value.
        owns: whether the rank holds any of the parameter.
    """

    what: Literal["element", "value", "other"]
    detail: Any
    owns: bool


Kinds = dict[str, dict[str, Kind]]  # by parameter name and key


def kinds_of(held: Held, state: Mapping[str, Any]) -> Kinds:
    """Of each key of a tensor's state, what it is; the same for all of the tensor's parameters.

    Raises:
        CheckpointError: state of a shape that has no meaning for parts of parameters.
    """
    kinds: Kinds = {row.name: {} for row in held.rows}
    expected = tuple(held.tensor.shape) if held.view is None else (held.view[1],)
    for key, value in state.items():
        what: Literal["element", "value", "other"]
        detail: Any
        # A FlatShard without dims holds one element of a parameter; other tensors without dims are one value for all.
        if not isinstance(value, torch.Tensor):
            what, detail = "value", value
        elif tuple(value.shape) == expected and (value.dim() or isinstance(value, FlatShard)):
            what, detail = "element", value.dtype
        elif value.dim() == 0:
            what, detail = "value", value.detach().cpu()
        elif held.takes_any_shape:
            what, detail = "other", None
        else:
            raise CheckpointError(
                f"State {key!r} of the optimizer is not one value per element: on parts of parameters, nothing says "
                "what it stands for.",
                parameter=", ".join(row.name for row in held.rows),
                expected=f"shape {expected} or ()",
                got=f"shape {tuple(value.shape)}",
                remedy="use this optimizer on sharded parameters that keep their shape (fully_shard's, or NO_SHARD), "
                "or an element-wise optimizer (SGD, Adam, AdamW, ...)",
            )
        for row in held.rows:
            owns = row.bucket is None or row.member is None or row.member.part.numel > 0
            kinds[row.name][key] = Kind(what, detail, owns)
    return kinds


def structure_of(held: Iterable[Held], groups: int) -> list[list[str]]:
    """The names in each of an optimizer's groups, in an order that is the same on every rank."""
    structure: list[list[str]] = [[] for _ in range(groups)]
    for tensor in held:
        structure[tensor.group].extend(row.name for row in tensor.rows)
    return [sorted(names) for names in structure]


def agreed(table: Table, structure: list[list[str]], kinds: Kinds, error: FullshardError | None) -> Kinds:
    """The kinds of all ranks: one that holds nothing of a parameter learns its state's from the others. Collective.

    Args:
        structure: see `structure_of`.
        kinds: this rank's.
        error: of this rank; raised on all.

    Raises:
        DivergenceError: ranks' optimizers hold different parameters, or group them differently; on every rank.
        CheckpointError: the first rank's `error`, on every rank.
    """
    axes = {id(b.axes.shard.group): b.axes.shard for b in table.buckets() if b.axes.shard.size > 1}
    for axis in axes.values():  # all of them, whatever is wrong, for ranks of the next one to learn of it
        everyone = objects_of_all((structure, kinds, error), axis.group, "optimizers' state")
        kinds, error = {}, None
        for rank, (theirs, kinds_there, failed) in enumerate(everyone):
            if theirs != everyone[0][0]:
                failed = failed or _structure_error(axis.ranks[0], everyone[0][0], axis.ranks[rank], theirs)
            error = error or failed
            for name, entries in kinds_there.items():
                merged = kinds.setdefault(name, {})
                for key, kind in entries.items():
                    if key not in merged or (kind.owns and not merged[key].owns):
                        merged[key] = kind
    if error is not None:
        raise error
    return kinds


def _structure_error(first: int, expected: list[list[str]], rank: int, theirs: list[list[str]]) -> DivergenceError:
    there, here = ({name: g for g, names in enumerate(groups) for name in names} for groups in (expected, theirs))
    name = min((n for n in {*there, *here} if there.get(n) != here.get(n)), default=None)

    def described(groups: dict[str, int]) -> str:
        return f"{len(groups)} parameters, this one in group {groups[name]}" if name in groups else "without it"

    return DivergenceError(
        "Ranks' optimizers hold different parameters, or group them differently: their state cannot be put together.",
        parameter=name,
        rank=rank,
        expected=f"as on rank {first}: {described(there)}",
        got=described(here),
        remedy="build the optimizer from the same parameters in the same groups on every rank, in any order",
        topic="models-differ",
    )
