"""Plans the load of a checkpoint into a model: everything is compared before anything is changed.

plan_model, plan_optimizers     what to read into which memory, and what to assign
compare_names                   what only one side has
take_over                       after all ranks have read: assign
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.fit import check_names, check_shape
from ..checkpoint.group_settings import put, settings_to_load
from ..checkpoint.optimizer_state import add_scalar, assign_state, new_states, saved_rows
from ..checkpoint.table import Named
from ..errors import CheckpointError, message
from .contents import Contents, StateOf, add_states
from .names import MODEL, OPTIMIZER
from .piece import Piece
from .read import Files
from .source import Copy


class Reader:
    """Compares a checkpoint with a model and its optimizers, and collects the reads and assignments of a load.

    Args:
        files: the checkpoint.
        contents: what to fill; `plan_optimizers` adds state that the optimizers do not have yet.
        strict: whether names must be the same on both sides.
        cast: whether floating-point values may be rounded; see `check_cast`.

    Attributes:
        copies: reads into tensors that the model or an optimizer uses.
        states: optimizer tensors and their scalars by key, to assign after all ranks have read; None: remove the state.
        settings: the new settings of each optimizer's groups, to assign at the same time.
        objects: functions that take a state, and the state, to call at the same time.
    """

    def __init__(self, files: Files, contents: Contents, strict: bool, cast: bool) -> None:
        self.files, self._contents, self._strict, self._cast = files, contents, strict, cast
        self.copies: list[Copy] = []
        self.states: list[tuple[StateOf, dict[str, Any] | None]] = []
        self.settings: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self.objects: list[tuple[Callable[[Any], object], Any]] = []
        self._missing: dict[str, None] = {}
        entries = files.entries
        named = any(name.startswith((MODEL, OPTIMIZER)) for name in entries)
        self._bare = files.is_foreign and bool(entries) and not named  # a checkpoint of ours may contain `state=` alone
        self._ties = _tied_names(files.manifest.ties)
        self._plain = files.scalars()
        self._saved = self._saved_keys()
        self._groups: list[dict[str, Any]] = []  # of the checkpoint, once they are needed

    def _with_ties(self, name: str) -> tuple[str, ...]:
        """A parameter's name, and those that were tied to it when the checkpoint was saved."""
        return name, *self._ties.get(name, ())

    def _saved_keys(self) -> dict[str, set[str]]:
        """The keys of the optimizer state in the checkpoint, by parameter."""
        keys: dict[str, set[str]] = {name: set(scalars) for name, scalars in self._plain.items()}
        for name in self.files.entries:
            if name.startswith(OPTIMIZER):
                path = self.files.paths.get(name, ())
                parameter, key = path[2:] if len(path) == 4 else name.removeprefix(OPTIMIZER).rpartition(".")[::2]
                keys.setdefault(str(parameter), set()).add(str(key))
        return keys

    # Tensors.

    def want(self, piece: Piece, names: Iterable[str] = ()) -> bool:
        """Plan to read a piece, saved under its own name or one of `names`; returns whether the checkpoint has it.

        Raises:
            CheckpointError: see `Source.copies_into`.
        """
        present = [name for name in map(self._saved_name, (piece.name, *names)) if name in self.files.entries]
        if present:
            self.files.asked.add(present[0])
            self.copies += self.files.copies_into(piece, present, self._cast)
        return bool(present)

    def _saved_name(self, name: str) -> str:
        """The name in the checkpoint; a file that is a bare state dict omits the prefix of the model."""
        return name.removeprefix(MODEL) if self._bare else name

    def asks(self, names: Iterable[str]) -> None:
        """Mark names as expected by the model, whether or not this rank reads any of them."""
        self.files.asked.update(map(self._saved_name, names))

    # A model and its optimizers.

    def plan_model(self) -> None:
        """Plan to read parameters and buffers."""
        contents, ties = self._contents, dict[str, list[str]]()
        for name, first in contents.ties.items():
            ties.setdefault(first, []).append(name)
        for piece in contents.model:
            if not self.want(piece, ties.get(piece.name, ())):
                self._missing[piece.name] = None
        for row in contents.table.parameters:
            self.asks(MODEL + name for name in row.names)
        self.asks(MODEL + name for name in contents.table.buffers)

    def plan_optimizers(
        self, optimizers: Sequence[torch.optim.Optimizer], lacking: Container[tuple[int, int]], first: bool
    ) -> None:
        """Plan to read the optimizers' state and settings.

        Args:
            optimizers: those of the contents.
            lacking: their tensors without state, by optimizer and number in it; see `lacking_state`.
            first: whether this is the first rank; see `contents_of`.

        Raises:
            CheckpointError: `strict`, and the checkpoint has no optimizer state; or it has numbers in place of names;
                or parameters of one tensor have different scalars; see also `settings_to_load`.
            MissingStateError: only some parameters of one tensor have state in the checkpoint.
        """
        if optimizers:
            self._groups = self._named_groups()
        states = self._contents.states
        model_names = {name for row in self._contents.table.parameters for name in self._all_names(row)}
        for number, optimizer in enumerate(optimizers):
            new = [s for s in states if s.optimizer is optimizer and (number, s.target.index) in lacking]
            names = {name for state_of in new for row in state_of.target.rows for name in self._all_names(row)}
            groups = [group for group in self._groups if not names.isdisjoint(group["params"])]
            described = None
            if self._saved.keys() <= model_names:
                described = [[self._described(row) for row in state_of.target.rows] for state_of in new]
            zeroed = new_states(optimizer, [state_of.target for state_of in new], described, groups)
            for state_of, state in zip(new, zeroed, strict=True):
                state_of.state = state
            add_states(self._contents, new, first)
        if states and self._strict and not self._groups and not self._saved:
            raise self._without_optimizer()
        keys = {alias: keys for name, keys in self._saved.items() for alias in self._with_ties(name)} | self._saved
        for state_of in states:
            self._plan_state(state_of, saved_rows(state_of.target, keys))
        for optimizer in optimizers:
            targets = [state_of.target for state_of in states if state_of.optimizer is optimizer]
            self.settings.append((optimizer, settings_to_load(targets, optimizer.param_groups, self._groups)))

    def _named_groups(self) -> list[dict[str, Any]]:
        """The checkpoint's groups; tied parameters are listed under all their names.

        Raises:
            CheckpointError: parameters are numbered. Numbers follow the order in which an optimizer was built, which
                the checkpoint does not record, and which sharding may change: shapes can agree where parameters do not.
        """
        groups = self.files.groups()
        for group in groups:
            if any(type(name) is int for name in group["params"]):
                raise CheckpointError(
                    "A checkpoint numbers the parameters of its optimizer and does not record their names; nothing was "
                    "loaded.",
                    expected="optimizer state by parameter name",
                    got=f"numbers: params={str(group['params'])[:40]}",
                    remedy="load the original file into an unsharded model and optimizer by load_state_dict, "
                    "fullshard.save these, and load that checkpoint; or call load(folder, model) for the model alone",
                    topic="checkpoint-does-not-fit",
                )
            group["params"] = [alias for name in group["params"] for alias in self._with_ties(name)]
        return groups

    def _described(self, row: Named) -> dict[str, Any]:
        """The checkpoint's description of a parameter's state; see `new_states`."""
        name = next((name for name in self._all_names(row) if name in self._saved), None)
        entries = self.files.entries
        described = dict(self._plain.get(name or "", {}))
        for key in sorted(self._saved[name] - described.keys()) if name is not None else ():  # alike on all ranks
            entry, parameter = entries[f"{OPTIMIZER}{name}.{key}"], entries.get(f"{MODEL}{name}")
            same_dtype = parameter is not None and parameter.dtype == entry.dtype
            described[key] = (entry.shape, None if same_dtype else entry.dtype)
        return described

    def _without_optimizer(self) -> CheckpointError:
        remedy = "call load(folder, model), or pass strict=False: the optimizers then start without state"
        others = self._untouched() if self.files.is_foreign else []
        if others:
            remedy = (
                "if this is the optimizer's state, load with torch.distributed.checkpoint under the keys by which "
                f"it was saved; otherwise {remedy}"
            )
        return CheckpointError(
            "A checkpoint has no state under the key optimizer; nothing was loaded."
            if others
            else "A checkpoint was saved without an optimizer; nothing was loaded.",
            expected="state for the optimizers that were passed",
            got=f"{len(others)} tensors under other keys: {', '.join(others[:3])}, ..." if others else "none",
            remedy=remedy,
            topic="checkpoint-does-not-fit",
        )

    def _plan_state(self, state_of: StateOf, saved: Sequence[tuple[Named, set[str]]]) -> None:
        """Plan to read the state of one tensor and to assign it to the optimizer.

        Args:
            saved: the tensor's parameters, and the keys of their state; none if it was not updated before the save.
        """
        scalars: dict[str, Any] = {}
        for row, _ in saved:
            names = self._all_names(row)
            plain = {key: None for name in names for key in self._plain.get(name, ())}
            if row.shape:  # the state of a 0-d parameter may be one value per element or one for all
                plain |= {key: None for name in names for key in self._single_values(name)}
            for piece in state_of.pieces[row.name]:
                key = piece.name.removeprefix(f"{OPTIMIZER}{row.name}.")
                if key not in plain and not self.want(piece, [f"{OPTIMIZER}{name}.{key}" for name in names[1:]]):
                    self._missing[piece.name] = None
            for key in {**state_of.scalars[row.name], **plain}:  # a later step may add keys that the first does not
                self._scalar(state_of, row, key, scalars)
            self.asks(f"{OPTIMIZER}{name}.{key}" for name in row.names for key in state_of.state)
        self.states.append((state_of, scalars if saved else None))

    def _single_values(self, name: str) -> Iterator[str]:
        """Yield the keys of a parameter's state whose values are 0-d tensors."""
        for key in self._saved.get(name, ()):
            entry = self.files.entries.get(f"{OPTIMIZER}{name}.{key}")
            if entry is not None and entry.shape == ():
                yield key

    def _all_names(self, row: Named) -> list[str]:
        """A parameter's names, and the names that were tied to it when the checkpoint was saved."""
        return list(dict.fromkeys(alias for name in row.names for alias in self._with_ties(name)))

    def _scalar(self, state_of: StateOf, row: Named, key: str, scalars: dict[str, Any]) -> None:
        """Read a value for a whole parameter into `scalars`; all parameters of a tensor must have the same."""
        like = state_of.state.get(key)
        for name in self._all_names(row):
            if key in self._plain.get(name, {}):
                value = self._plain[name][key]
            elif f"{OPTIMIZER}{name}.{key}" in self.files.entries:
                value = self._single_value(f"{OPTIMIZER}{name}.{key}", like)
            else:
                continue
            add_scalar(scalars, state_of.target, row, key, value, like, self._cast)
            self.asks(f"{OPTIMIZER}{alias}.{key}" for alias in self._all_names(row))
            return
        if like is not None:
            self._missing[f"{OPTIMIZER}{row.name}.{key}"] = None

    def _single_value(self, name: str, like: Any) -> torch.Tensor:
        """Read a scalar; CheckpointError if its number of elements in the checkpoint differs from that of `like`."""
        entry, numel = self.files.entries[name], like.numel() if isinstance(like, torch.Tensor) else 1
        if entry.numel != numel:
            check_shape(name, getattr(like, "shape", ()), entry.shape)
        return self.files.read(name)

    def take_over(self) -> None:
        """Assign the optimizers their state, whose tensors were read in place, and their settings; fill the objects."""
        for state_of, scalars in self.states:
            put(state_of.state, scalars or {})
        for optimizer, settings in self.settings:
            states = [
                (state_of.target, None if scalars is None else state_of.state)
                for state_of, scalars in self.states
                if state_of.optimizer is optimizer
            ]
            assign_state(optimizer, states, settings)
        for take, state in self.objects:
            take(state)

    def compare_names(self) -> list[str]:
        """The names in the checkpoint that will not be loaded. Called after everything is planned.

        Raises:
            CheckpointError: `strict`, and a parameter, buffer or state exists only in the model or the checkpoint.
        """
        untouched = self._untouched()
        unexpected = [
            name
            for name in untouched
            if self._bare or name.startswith(MODEL) or (self._contents.states and name.startswith(OPTIMIZER))
        ]
        if self._strict:
            remedy = "load it into the model it was saved from"
            different = [*self._missing, *unexpected]
            if different and all(name.startswith(OPTIMIZER) for name in different):
                remedy = (
                    "pass an optimizer of the class it was saved from, which has made a step if it creates state later "
                    "than in its first; or load(folder, model) without an optimizer"
                )
            remedy = self._prefix_remedy(*self._names()) or remedy
            check_names("A checkpoint does", list(self._missing), unexpected, remedy)
        return untouched

    def nothing_matches(self) -> str | None:
        """A warning if both sides have tensors, but the checkpoint has none under the name of one of the model's."""
        names, saved = self._names()
        if not saved and self.files.is_foreign:
            saved = [*self.files.entries]  # the model may be under another key
        ours = {*names}
        if not names or not saved or any(part in ours for name in saved for part in _prefixes(name)):
            return None
        remedy = (
            self._prefix_remedy(names, saved) or "load the checkpoint of this model; strict=True, the default, raises"
        )
        return message(
            "No tensor of the checkpoint has the name of a tensor of the model: none was loaded into it.",
            expected=f"{', '.join(names[:3])}, ... of the model",
            got=f"{', '.join(saved[:3])}, ... in the checkpoint",
            remedy=remedy,
            topic="checkpoint-does-not-fit",
        )

    def _names(self) -> tuple[list[str], list[str]]:
        """The names of the model's tensors, here and in the checkpoint."""
        prefix, table = "" if self._bare else MODEL, self._contents.table
        names = [name for row in table.parameters for name in self._all_names(row)] + [*table.buffers]
        return names, [name.removeprefix(prefix) for name in self.files.entries if name.startswith(prefix)]

    @staticmethod
    def _prefix_remedy(names: Sequence[str], saved: Sequence[str]) -> str | None:
        """A remedy, if one side's names are the other's with a prefix, such as that of a module around the model."""
        for who, longer, shorter in (("checkpoint's", {*saved}, names), ("model's", {*names}, saved)):
            for name in sorted(longer) if shorter else ():
                added = name.removesuffix(shorter[0])
                if name != added and added.endswith(".") and all(added + other in longer for other in shorter):
                    return f"the {who} names have the prefix {added!r}: save and load the same module"
        return None

    def _untouched(self) -> list[str]:
        """The names of tensors that nothing has asked for; in checkpoints of ours, of models and optimizers alone."""
        asked = self.files.asked | self.files.manifest.ties.keys()
        foreign = self.files.is_foreign
        names = [name for name in self.files.entries if foreign or name.startswith((MODEL, OPTIMIZER))]
        return [name for name in names if not any(part in asked for part in _prefixes(name))]


def _tied_names(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """The other names of each tied parameter. `ties` maps a name in the manifest to the first of the same tensor."""
    together: dict[str, list[str]] = {}
    for name, first in ties.items():
        if name.startswith(MODEL) and first.startswith(MODEL):
            together.setdefault(first, [first]).append(name)
    return {
        name.removeprefix(MODEL): [other.removeprefix(MODEL) for other in names if other != name]
        for names in together.values()
        for name in names
    }


def _prefixes(name: str) -> Iterable[str]:
    """A name and its dotted prefixes: tensors inside a subclass extend the name of their parameter."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))
