"""One checkpoint against one model: everything is planned and compared before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..checkpoint.fit import check_cast, check_names, check_shape, check_tied
from ..checkpoint.names import Named
from ..checkpoint.optimizer import add_scalar, blank_states, check_complete, described_state, has_settings_of
from ..checkpoint.settings import put, settings_to_load
from ..errors import CheckpointError, DamagedCheckpointError
from .contents import Contents, StateOf, add_states
from .piece import Piece
from .read import GROUPS, Copy, Files, checked_groups, copies_for
from .source import MODEL, OPTIMIZER
from .storage import Stored
from .tree import from_json


class Reader:
    """See the module's docstring.

    Args:
        files: the checkpoint.
        cast: whether floating-point values may be rounded; see `check_cast`.

    Attributes:
        copies: what is to be read into memory that is in use.
        states: of optimizers, which are given theirs when all ranks have read: scalars by key; None: state goes.
        settings: an optimizer's group, and what is set in it then.
    """

    def __init__(self, files: Files, cast: bool = False) -> None:
        self.files, self._cast = files, cast
        self.copies: list[Copy] = []
        self.states: list[tuple[StateOf, dict[str, Any] | None]] = []
        self.settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._asked: set[str] = set()
        self._missing: dict[str, None] = {}
        entries = files.index.entries
        self._bare = bool(entries) and not any(name.startswith((MODEL, OPTIMIZER)) for name in entries)
        self._ties = _tied_names({} if files.manifest is None else files.manifest.ties)
        self._plain = self._plain_scalars()
        self._saved = self._saved_states()
        self._groups = self._read_groups()

    def _plain_scalars(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is neither a tensor nor one value per element, by parameter and key."""
        if self.files.manifest is not None:
            found = from_json(self.files.manifest.values.get("optimizer", {}).get("scalars", {}), self.tensor)
            if not _is_nested(found):
                raise DamagedCheckpointError("A checkpoint's optimizer state cannot be read.", got=str(found)[:80])
            known: dict[str, dict[str, Any]] = found
            return known
        made: dict[str, dict[str, Any]] = {}
        for name in self.files.index.values:
            path = self.files.index.paths.get(name, ())
            if path[:2] == ("optimizer", "state") and len(path) == 4:
                made.setdefault(str(path[2]), {})[str(path[3])] = self.files.value(name)
        return made

    def _saved_states(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set(own) for name, own in self._plain.items()}
        for name in self.files.index.entries:
            if name.startswith(OPTIMIZER):
                path = self.files.index.paths.get(name, ())
                if len(path) != 4:
                    path = (*GROUPS, *name.removeprefix(OPTIMIZER).rpartition(".")[::2])
                found.setdefault(str(path[2]), set()).add(str(path[3]))
        return found

    # Tensors.

    def want(self, piece: Piece, names: Iterable[str] = ()) -> bool:
        """Read a piece, which is kept under its own name or one of `names`; whether the checkpoint has it.

        Raises:
            CheckpointError: an expanded tensor; and see `check_shape`, `check_cast` and `check_tied`.
            DamagedCheckpointError: the checkpoint lacks elements of it.
        """
        if any(step == 0 and size > 1 for step, size in zip(piece.tensor.stride(), piece.tensor.shape, strict=True)):
            raise CheckpointError(
                "Elements of a tensor share memory, so that values cannot be loaded into it; nothing was loaded.",
                parameter=piece.name,
                got="an expanded tensor",
                remedy="make it a tensor of its own: tensor.clone()",
            )
        index = self.files.index
        present = [name for name in map(self._kept_as, (piece.name, *names)) if name in index.entries]
        for name in present:
            entry = index.entries[name]
            check_shape(piece.name, piece.shape, entry.shape)
            check_cast(piece.name, piece.dtype, entry.dtype, self._cast)
        if not present:
            return False
        first, *others = present
        self._asked.add(first)
        for other in others:
            if piece.tensor.numel() and _places(index.stored[other]) != _places(index.stored[first]):
                parts = [
                    (name.removeprefix(MODEL), self._part(name, piece.offsets, piece.sizes)) for name in (first, other)
                ]
                check_tied(piece.name, *parts)
        self.copies += copies_for(piece, index.entries[first], index.stored[first])
        return True

    def _part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A rectangle of a tensor, now, in memory of its own."""
        entry = self.files.index.entries[name]
        part = torch.empty(sizes, dtype=entry.dtype, device="cpu")
        copies = copies_for(Piece(name, entry.shape, offsets, sizes, part), entry, self.files.index.stored[name])
        self.files.check(copies)
        self.files.fill(copies)
        return part

    def _kept_as(self, name: str) -> str:
        return name.removeprefix(MODEL) if self._bare else name

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, now, in memory of its own.

        Raises:
            DamagedCheckpointError: there is none of this name, or it cannot be read.
        """
        entry = self.files.index.entries.get(name)
        if entry is None:
            raise DamagedCheckpointError("A tensor that a checkpoint's manifest names is missing.", parameter=name)
        self._asked.add(name)
        return self._part(name, (0,) * len(entry.shape), entry.shape)

    def asks(self, names: Iterable[str]) -> None:
        """These belong to the model, whether or not this rank reads any of them."""
        self._asked.update(map(self._kept_as, names))

    # A model and its optimizers.

    def model(self, contents: Contents) -> None:
        """Plan to read parameters and buffers."""
        ties: dict[str, list[str]] = {}
        for name, first in contents.ties.items():
            ties.setdefault(first, []).append(name)
        for piece in contents.model:
            if not self.want(piece, ties.get(piece.name, ())):
                self._missing[piece.name] = None
        for row in contents.table.parameters:
            self.asks(MODEL + name for name in row.names)
        self.asks(MODEL + name for name in contents.table.buffers)

    def add_new_states(
        self,
        contents: Contents,
        optimizers: Iterable[torch.optim.Optimizer],
        lacking: Container[tuple[int, int]],
        first: bool,
    ) -> None:
        """Give state to tensors that have none, zeroed, to be loaded into: what the checkpoint describes.

        Where its description is not enough it is what a first step of the optimizer makes.

        Args:
            lacking: the tensors, by optimizer and number in it; see `lacking_state`.
            first: as of `contents_of`.
        """
        known = {name for row in contents.table.parameters for name in self._all_names(row)}
        for number, optimizer in enumerate(optimizers):
            new = [one for one in contents.states if one.optimizer is optimizer and (number, one.held.index) in lacking]
            names = {name for one in new for row in one.held.rows for name in self._all_names(row)}
            groups = [group for group in self._groups if not names.isdisjoint(group["params"])]
            states: list[dict[str, Any] | None] = [None] * len(new)
            if self._saved.keys() <= known and has_settings_of(optimizer, groups):
                states = [described_state(one.held, [self._described(row) for row in one.held.rows]) for one in new]
            if None in states:
                blank = blank_states(optimizer, [one.held.tensor for one in new], frozen=True)  # it may have been since
                states = [blank[id(one.held.tensor)] for one in new]
            for one, state in zip(new, states, strict=True):
                one.state = state or {}
            add_states(contents, new, first)

    def _described(self, row: Named) -> dict[str, Any]:
        """What the checkpoint says of a parameter's state; see `described_state`."""
        name = next((name for name in self._all_names(row) if name in self._saved), None)
        entries = self.files.index.entries
        described = dict(self._plain.get(name or "", {}))
        for key in self._saved[name] - described.keys() if name is not None else ():
            entry, parameter = entries[f"{OPTIMIZER}{name}.{key}"], entries.get(f"{MODEL}{name}")
            own = parameter is not None and parameter.dtype == entry.dtype
            described[key] = (entry.shape, None if own else entry.dtype)
        return described

    def optimizers(self, contents: Contents, strict: bool) -> None:
        """Plan to read state and settings.

        Raises:
            CheckpointError: `strict`, and there are none.
            MissingStateError: a tensor over several parameters, of which only some have state in the checkpoint.
            CheckpointError: parameters of one tensor have different scalars; see `settings_to_load` for others.
        """
        if contents.states and strict and not self._groups and not self._saved:
            raise CheckpointError(
                "A checkpoint was saved without an optimizer; nothing was loaded.",
                expected="state of the optimizers that are to be filled",
                got="none",
                remedy="load(folder, model) alone, or pass strict=False: the optimizers then begin anew",
                topic="checkpoint-does-not-fit",
            )
        for one in contents.states:
            self._state(one)
        for optimizer in dict.fromkeys(one.optimizer for one in contents.states):
            held = [one.held for one in contents.states if one.optimizer is optimizer]
            settings = settings_to_load(held, optimizer.param_groups, self._groups)
            self.settings += zip(optimizer.param_groups, settings, strict=True)

    def _state(self, one: StateOf) -> None:
        """Plan to read the state of one tensor, and to give it to the optimizer."""
        rows = one.held.rows
        names = {row.name: self._all_names(row) for row in rows}
        saved = [(row, next((self._saved[n] for n in names[row.name] if n in self._saved), None)) for row in rows]
        if not any(keys for _, keys in saved):
            self.states.append((one, None))  # it was not updated yet, when this was saved
            return
        check_complete(
            [(row, None if keys is None else dict.fromkeys(keys)) for row, keys in saved],
            [(row, dict.fromkeys(keys)) for row, keys in saved if keys],
        )
        scalars: dict[str, Any] = {}
        for row in rows:
            plain = {key: None for name in names[row.name] for key in self._plain.get(name, ())}
            if row.shape:  # of a parameter without dims a value does not say whether it is for all elements
                plain |= {key: None for name in names[row.name] for key in self._single_values(name)}
            for piece in one.pieces[row.name]:
                key = piece.name.removeprefix(f"{OPTIMIZER}{row.name}.")
                if key not in plain and not self.want(
                    piece, [f"{OPTIMIZER}{name}.{key}" for name in names[row.name][1:]]
                ):
                    self._missing[piece.name] = None
            for key in {**one.scalars[row.name], **plain}:  # what the first step does not make, a later one may
                self._scalar(one, row, key, scalars)
            self.asks(f"{OPTIMIZER}{name}.{key}" for name in row.names for key in one.state)
        self.states.append((one, scalars))

    def _single_values(self, name: str) -> Iterator[str]:
        """Keys of a parameter's state that are tensors without dims."""
        for key in self._saved.get(name, ()):
            entry = self.files.index.entries.get(f"{OPTIMIZER}{name}.{key}")
            if entry is not None and entry.shape == ():
                yield key

    def _all_names(self, row: Named) -> list[str]:
        """A parameter's names, and those of parameters that were tied to it when they were saved."""
        return list(dict.fromkeys(alias for name in row.names for alias in (name, *self._ties.get(name, ()))))

    def _scalar(self, one: StateOf, row: Named, key: str, scalars: dict[str, Any]) -> None:
        """Read one value for a whole parameter; all parameters of a tensor must have the same."""
        like = one.state.get(key)
        for name in self._all_names(row):
            if key in self._plain.get(name, {}):
                value = self._plain[name][key]
            elif f"{OPTIMIZER}{name}.{key}" in self.files.index.entries:
                value = self._one_value(f"{OPTIMIZER}{name}.{key}", like)
            else:
                continue
            add_scalar(scalars, one.held, row, key, value, like, self._cast)
            self.asks(f"{OPTIMIZER}{alias}.{key}" for alias in self._all_names(row))
            return
        if like is not None:
            self._missing[f"{OPTIMIZER}{row.name}.{key}"] = None

    def _one_value(self, name: str, like: Any) -> torch.Tensor:
        """What is one number here must be one in the checkpoint."""
        entry, numel = self.files.index.entries[name], like.numel() if isinstance(like, torch.Tensor) else 1
        if entry.numel != numel:
            check_shape(name, getattr(like, "shape", ()), entry.shape)
        return self.tensor(name)

    def _read_groups(self) -> list[dict[str, Any]]:
        """The settings of all groups, as they were saved; of tied parameters under all their names."""
        manifest = self.files.manifest
        if manifest is None:
            return self.files.groups(self.tensor)
        groups = checked_groups(from_json(manifest.values.get("optimizer", {}).get("param_groups", []), self.tensor))
        for group in groups:
            group["params"] = [alias for name in group["params"] for alias in (name, *self._ties.get(name, ()))]
        return groups

    def take_over(self) -> None:
        """Give the optimizers their state, whose tensors were read in place, and their settings."""
        for one, scalars in self.states:
            if scalars is None:
                one.optimizer.state.pop(one.held.tensor, None)
                continue
            put(one.state, scalars)
            if one.state:
                one.optimizer.state[one.held.tensor] = one.state
        for group, settings in self.settings:
            put(group, settings)
        for optimizer in dict.fromkeys(one.optimizer for one, _ in self.states):  # as its own `load_state_dict` ends
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def _ours(self) -> list[str]:
        return [name for name in self.files.index.entries if name.startswith((MODEL, OPTIMIZER))]

    def close(self, contents: Contents, strict: bool) -> list[str]:
        """Names of parameters, buffers and their state that nothing asked for. After everything was planned.

        Raises:
            CheckpointError: `strict`, and one side has names of parameters, buffers or state that the other lacks.
        """
        manifest = self.files.manifest
        asked = self._asked | {name for name, first in ({} if manifest is None else manifest.ties).items()}
        ours = self.files.index.entries if self._bare else self._ours()
        left = [name for name in ours if not any(part in asked for part in _prefixes(name))]
        unknown = [name for name in left if contents.states or not name.startswith(OPTIMIZER)]
        if strict:
            remedy = "load it into the model it was saved from"
            check_names("A checkpoint does", list(self._missing), unknown, remedy)
        return left


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(own, dict) for own in value.values())


def _tied_names(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """The other names of each tied parameter, from names in a manifest and the first ones of the same tensors."""
    together: dict[str, list[str]] = {}
    for name, first in ties.items():
        if name.startswith(MODEL) and first.startswith(MODEL):
            together.setdefault(first, [first]).append(name)
    return {
        name.removeprefix(MODEL): [other.removeprefix(MODEL) for other in names if other != name]
        for names in together.values()
        for name in names
    }


def _places(stored: Iterable[Stored]) -> set[tuple[str, int]]:
    return {(one.file, one.begin) for one in stored}


def _prefixes(name: str) -> Iterable[str]:
    """A name, and all that it begins with up to a dot: tensors inside a subclass are named from it."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))
