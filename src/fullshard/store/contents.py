"""This rank's pieces of a model and its optimizers, by their names in a checkpoint.

    model.NAME                    parameters and persistent buffers, by their names in the unwrapped model
    optimizer.state.NAME.KEY      optimizer state of a parameter

The same list serves both directions: a save writes the pieces, a load fills them. Nothing is gathered, and gathered
buffers are not read: pieces are views of the shards.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..checkpoint.table import Named, Table
from ..checkpoint.targets import Kinds, Target, kinds_of, named_groups, settle_state, targets_of
from ..errors import CheckpointError, ConfigError, PhaseError, invalid_argument
from ..optimizers import as_list, parameters_of
from ..text import plain_name
from .names import COUNTS, MODEL, OPTIMIZER
from .piece import Piece, member_pieces, refuse_unsupported, value_pieces
from .ranks import Ranks

_REMEDIES = {
    "model": "pass the model itself, not its state dict: {call}(folder, model, optimizer)",
    "optimizers": "pass an optimizer or a list of them; a step is named: {call}(folder, model, optimizer, step=3)",
    "state": 'pass a dict by name: state={{"scheduler": scheduler}}',
}


def checked_optimizers(call: str, model: Any, optimizers: Any, state: Any) -> list[torch.optim.Optimizer]:
    """Check arguments of `call` ("save" or "load"); returns the optimizers as a list.

    Raises:
        ConfigError: an argument has an invalid type; the message names it.
    """
    listed = as_list(optimizers)
    checked: list[tuple[str, Any, type]] = [("model", model, nn.Module)]
    checked += [("optimizers", optimizer, torch.optim.Optimizer) for optimizer in listed]
    checked += [("state", {} if state is None else state, Mapping)]
    for argument, value, kind in checked:
        if not isinstance(value, kind):
            remedy = _REMEDIES[argument].format(call=call)
            raise invalid_argument(f"{call}({argument}=)", value, f"an instance of {kind.__name__}", remedy)
    return listed


def checked_count(call: str, argument: str, value: Any, least: int, otherwise: str = "") -> int:
    """An argument of `call` ("save" or "load") as an int; NumPy's integers and tensors of one integer are accepted.

    Args:
        least: the smallest valid value.
        otherwise: what else is valid, for the message.

    Raises:
        ConfigError: it is not an integer of at least `least`, or too large for a manifest.
    """
    is_bool = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    with suppress(TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device
        if not is_bool and (count := operator.index(value)) >= least and count < COUNTS:
            return count
    expected = f"an int of at least {least}, less than 2**62{otherwise}"
    remedy = f"pass an int, as in {argument}={max(least, 1)}{', or omit it' if otherwise else ''}"
    raise invalid_argument(f"{call}({argument}=)", value, expected, remedy)


@dataclass(eq=False)
class StateOf:
    """The state of an optimizer's tensor.

    Attributes:
        optimizer: the optimizer.
        target: the tensor and its parameters.
        state: the optimizer's own dict; for a tensor without state, a new dict to load into.
        pieces: this rank's pieces of the state, by parameter name.
        scalars: those of its kinds that are one value for a whole parameter, such as a step count.
    """

    optimizer: torch.optim.Optimizer
    target: Target
    state: dict[str, Any]
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    scalars: Kinds = field(default_factory=dict)


@dataclass(eq=False)
class Contents:
    """This rank's pieces of a model and its optimizers.

    Attributes:
        table: the model's parameters and buffers.
        model: pieces of parameters and buffers.
        states: state of the optimizers' tensors.
        groups: parameter groups of all optimizers, in order: settings, and the names of their parameters.
        ties: further names of tensors, each with the name under which the tensor is saved.
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
        """All pieces: of the model, then of the optimizers."""
        yield from self.model
        for state in self.states:
            for pieces in state.pieces.values():
                yield from pieces


def contents_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], first: bool) -> Contents:
    """Collect the contents of this rank. No communication.

    Args:
        first: whether this is the first rank, which writes unsharded tensors.

    Raises:
        CheckpointError: a tensor has no values yet, or state cannot be named.
        PhaseError: the model is in the middle of a step.
        ConfigError: two optimizers update the same parameter.
    """
    table = table_of(model)
    contents = Contents(table)
    for turn, row in enumerate(table.parameters):
        contents.model += row_pieces(row, MODEL + row.name, turn, first)
        contents.ties |= {MODEL + name: MODEL + row.name for name in row.names[1:]}
    seen: dict[int, str] = {}
    for turn, (name, buffer) in enumerate(table.buffers.items()):
        if id(buffer) in seen:
            contents.ties[MODEL + name] = seen[id(buffer)]
            continue
        seen[id(buffer)] = MODEL + name
        contents.model += value_pieces(MODEL + name, buffer, turn, first)
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            contents.extra[MODEL + plain_name(f"{path}." if path else "") + "_extra_state"] = module
    updated_by: dict[str, int] = {}
    for number, optimizer in enumerate(optimizers):
        targets = targets_of(table, optimizer.param_groups)
        for name in [row.name for target in targets for row in target.rows]:
            if updated_by.setdefault(name, number) != number:
                raise ConfigError(
                    "Two optimizers update one parameter: their states would share one name.",
                    parameter=name,
                    remedy="assign each parameter to one optimizer only",
                )
        states = [StateOf(optimizer, target, optimizer.state.get(target.tensor) or {}) for target in targets]
        add_states(contents, states, first)
        contents.states += states
        contents.groups += named_groups(targets, optimizer.param_groups)
    return contents


def table_of(model: nn.Module) -> Table:
    """The table of `model`, under the names of the unwrapped, uncompiled model, without `DistributedDataParallel`.

    Takes over storage that the user replaced. Gathered units stay gathered.

    Raises:
        PhaseError: `model` is in the middle of a step, or inside `summon_full_params`.
        CheckpointError: a tensor is on the meta device, or not initialized.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    table = Table(model, plain_name)
    busy = [u for u, runner in table.units if u.showing.summoned or (runner is not None and runner.is_running)]
    if busy:  # units may have no names yet
        buckets = [bucket for unit in busy for bucket in unit.buckets]
        raise PhaseError(
            "A model cannot be saved, loaded or exported in the middle of a step, or inside summon_full_params.",
            parameter=next((row.name for row in table.parameters if row.bucket in buckets), None),
            remedy="call between steps: after optimizer.step(), or before the next forward",
            topic="called-in-a-step",
        )
    for unit, _ in table.units:
        unit.refresh()
    tensors = {row.name: row.parameter if row.bucket is None else row.bucket.shard for row in table.parameters}
    for name, tensor in {**tensors, **table.buffers}.items():
        if tensor.is_meta or isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise CheckpointError(
                "A tensor of the model has no values: it is on the meta device, or not initialized.",
                parameter=name,
                remedy="call model.to_empty(device=...) and load values first; lazy modules need a forward",
                topic="weights-on-meta",
            )
    return table


def lacking_state(optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> set[tuple[int, int]]:
    """The tensors without state on any rank, by optimizer and number in it. Collective.

    All ranks create state for the same tensors, because an optimizer may communicate in its step.
    """
    lacking: set[tuple[int, int]] = set()
    for o, optimizer in enumerate(optimizers):
        settle_state(optimizer)
        tensors = parameters_of([optimizer])
        lacking |= {(o, number) for number, tensor in enumerate(tensors) if not optimizer.state.get(tensor)}
    digest = hashlib.sha256(repr(sorted(lacking)).encode()).digest()
    if len(set(ranks.all(digest))) == 1:
        return lacking
    return set().union(*ranks.all(lacking))


def row_pieces(row: Named, name: str, turn: int, first: bool) -> list[Piece]:
    """This rank's pieces of a parameter."""
    if row.bucket is None or row.member is None:
        return list(value_pieces(name, row.parameter, turn, first))
    return list(member_pieces(name, row.bucket, row.member, row.bucket.part(row.bucket.shard, row.member), turn))


def add_states(contents: Contents, states: Iterable[StateOf], first: bool) -> None:
    """Add this rank's pieces and scalars to the states of optimizer tensors.

    Raises:
        CheckpointError: see `refuse_unsupported` and `kinds_of`.
    """
    turns = {row.name: turn for turn, row in enumerate(contents.table.parameters)}
    for state in states:
        kinds = kinds_of(state.target, state.state)
        for row in state.target.rows:
            pieces, scalars = state.pieces.setdefault(row.name, []), state.scalars.setdefault(row.name, {})
            for key, kind in kinds[row.name].items():
                value, name, turn = state.state[key], f"{OPTIMIZER}{row.name}.{key}", turns[row.name]
                if kind.per == "parameter":
                    scalars[key] = kind
                    continue
                refuse_unsupported(name, value)
                if kind.per == "other" or row.bucket is None or row.member is None or not row.bucket.form.plain:
                    pieces += value_pieces(name, value, turn, first)
                else:
                    pieces += member_pieces(name, row.bucket, row.member, state.target.local(row, value), turn)
