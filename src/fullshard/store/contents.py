"""What this rank holds of a model and its optimizers, by the names that a checkpoint knows it by.

    model.NAME                    parameters and persistent buffers, by their names in the unwrapped model
    optimizer.state.NAME.KEY      optimizer state of a parameter

The same list serves both ways: a save writes the pieces, a load fills them. Nothing is gathered, and nothing that is
gathered is looked at: pieces are views of the shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..checkpoint.held import Held, held_by, kinds_of
from ..checkpoint.names import Named, Table
from ..checkpoint.settings import named_groups
from ..errors import ConfigError
from ..names import plain_name
from .piece import Piece, Scalar, member_pieces, value_pieces
from .ranks import Ranks
from .source import MODEL, OPTIMIZER
from .table import table_of

_REMEDIES = {
    "model": "pass the model itself, not its state dict: {call}(folder, model, optimizer)",
    "optimizers": "pass an optimizer or a list of them; a step is named: {call}(folder, model, optimizer, step=3)",
    "state": 'pass a dict by name: state={{"scheduler": scheduler}}',
}


def check_given(call: str, model: Any, optimizers: Any, state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that `call` ("save" or "load") was given, as a list.

    Raises:
        ConfigError: an argument is of another type; it is named.
    """
    several = isinstance(optimizers, Iterable) and not isinstance(optimizers, (str, Mapping, nn.Module))
    given = list(optimizers) if several else [optimizers]
    checked: list[tuple[str, Any, type]] = [("model", model, nn.Module)]
    checked += [("optimizers", one, torch.optim.Optimizer) for one in given]
    checked += [("state", {} if state is None else state, Mapping)]
    for what, value, kind in checked:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{call}({what}=) has an invalid type.",
                expected=kind.__name__,
                got=type(value).__name__,
                remedy=_REMEDIES[what].format(call=call),
            )
    return given


@dataclass(eq=False)
class StateOf:
    """State of one tensor of an optimizer.

    Attributes:
        optimizer, held: whose.
        state: the optimizer's own; for one that has none, what is to be loaded into.
        pieces: what this rank holds of it, by parameter name.
        scalars: by parameter name and key.
    """

    optimizer: torch.optim.Optimizer
    held: Held
    state: dict[str, Any]
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)


@dataclass(eq=False)
class Contents:
    """See the module's docstring.

    Attributes:
        table: the model's parameters and buffers.
        model: pieces of parameters and buffers.
        states: of the optimizers' tensors.
        groups: of all optimizers, in order: settings, and the names of their parameters.
        ties: other names of tensors, and the one they are kept under; in the checkpoint's names.
        extra: modules' extra state (`get_extra_state`), by name in the checkpoint.
    """

    table: Table
    model: list[Piece] = field(default_factory=list)
    states: list[StateOf] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def pieces(self) -> Iterator[Piece]:
        """All of them."""
        yield from self.model
        for one in self.states:
            for pieces in one.pieces.values():
                yield from pieces


def contents_of(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    first: bool,
) -> Contents:
    """The contents of this rank. No communication.

    Args:
        first: whether this is the first rank, which writes what all ranks have.

    Raises:
        CheckpointError: something that has no values yet, or state that cannot be named.
        PhaseError: the model is in the middle of a step.
        ConfigError: two optimizers of one parameter.
    """
    table = table_of(model)
    found = Contents(table)
    for turn, row in enumerate(table.parameters):
        found.model += _row_pieces(row, MODEL + row.name, row.parameter, turn, first)
        found.ties |= {MODEL + name: MODEL + row.name for name in row.names[1:]}
    seen: dict[int, str] = {}
    for turn, (name, buffer) in enumerate(table.buffers.items()):
        if id(buffer) in seen:
            found.ties[MODEL + name] = seen[id(buffer)]
            continue
        seen[id(buffer)] = MODEL + name
        found.model += value_pieces(MODEL + name, buffer, turn, first)
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.extra[MODEL + plain_name(f"{path}." if path else "") + "_extra_state"] = module
    taken: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        _add_optimizer(found, optimizer, number, taken, first)
    return found


def lacking_state(optimizers: Iterable[torch.optim.Optimizer], ranks: Ranks) -> set[tuple[int, int]]:
    """The tensors that have no state on some rank, by optimizer and number in it. Collective.

    All ranks make state for the same ones, as an optimizer may communicate in its step.
    """
    mine: set[tuple[int, int]] = set()
    for o, optimizer in enumerate(optimizers):
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        mine |= {(o, number) for number, tensor in enumerate(tensors) if not optimizer.state.get(tensor)}
    digest = hashlib.sha256(repr(sorted(mine)).encode()).digest()
    if len(set(ranks.all(digest))) == 1:
        return mine
    return set().union(*ranks.all(mine))


def _row_pieces(row: Named, name: str, value: Any, turn: int, first: bool) -> list[Piece]:
    if row.bucket is None or row.member is None:
        return list(value_pieces(name, value, turn, first))
    return list(member_pieces(name, row.bucket, row.member, row.bucket.part(row.bucket.shard, row.member), turn))


def _add_optimizer(
    found: Contents,
    optimizer: torch.optim.Optimizer,
    number: int,
    taken: dict[str, int],
    first: bool,
) -> None:
    held = held_by(found.table, optimizer.param_groups)
    for name in [row.name for one in held for row in one.rows]:
        if taken.setdefault(name, number) != number:
            raise ConfigError(
                "Two optimizers update one parameter: their state would have one name.",
                parameter=name,
                remedy="give each optimizer parameters of its own",
            )
    found.states += [StateOf(optimizer, one, optimizer.state.get(one.tensor) or {}) for one in held]
    add_states(found, found.states[-len(held) :] if held else [], first)
    found.groups += named_groups(held, optimizer.param_groups)


def add_states(contents: Contents, states: Iterable[StateOf], first: bool) -> None:
    """What this rank holds of the state of these tensors."""
    numbers = {row.name: turn for turn, row in enumerate(contents.table.parameters)}
    for state in states:
        for row in state.held.rows:
            _add_state(state, row, numbers[row.name], first)


def _add_state(one: StateOf, row: Named, turn: int, first: bool) -> None:
    """What this rank holds of the state of one parameter."""
    kinds = kinds_of(one.held, one.state)[row.name]
    pieces, scalars = one.pieces.setdefault(row.name, []), one.scalars.setdefault(row.name, {})
    for key, kind in kinds.items():
        value, name = one.state[key], f"{OPTIMIZER}{row.name}.{key}"
        if kind.what == "value":
            scalars[key] = Scalar(value, kind.owns)
        elif kind.what == "element" and row.bucket is not None and row.member is not None and row.bucket.form.plain:
            pieces += member_pieces(name, row.bucket, row.member, one.held.local(row, value), turn)
        else:
            pieces += value_pieces(name, value, turn, first)
