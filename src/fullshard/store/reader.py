"""One checkpoint against one model: everything is planned and compared before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoint.names import Named
from ..checkpoint.optimizer import check_complete
from ..checkpoint.settings import is_like, settings_to_load
from ..checkpoint.values import is_array, same
from ..errors import CheckpointError, DamagedCheckpointError
from .contents import Contents, StateOf
from .fit import check_fit, check_tied
from .piece import Piece
from .read import GROUPS, Copy, Files, checked_groups, copies_for
from .source import MODEL, OPTIMIZER
from .storage import Stored
from .tree import from_json


class Reader:
    """See the module's docstring.

    Args:
        files: the checkpoint.
        cast: whether floating-point values may be rounded; see `check_fit`.

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
            CheckpointError: see `check_fit` and `check_tied`.
            DamagedCheckpointError: the checkpoint lacks elements of it.
        """
        index = self.files.index
        present = [name for name in map(self._kept_as, (piece.name, *names)) if name in index.entries]
        for name in present:
            check_fit(piece.name, piece.shape, piece.dtype, index.entries[name], self._cast)
        if not present:
            return False
        first, *others = present
        self._asked.add(first)
        for other in others:
            if piece.tensor.numel() and _places(index.stored[other]) != _places(index.stored[first]):
                parts = [(name, self._part(name, piece.offsets, piece.sizes)) for name in (first, other)]
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

    def optimizers(self, contents: Contents, strict: bool) -> None:
        """Plan to read state and settings.

        Raises:
            CheckpointError: `strict`, and there are none.
            MissingStateError: a tensor over several parameters, of which only some have state in the checkpoint.
            CheckpointError: parameters of one tensor have different scalars; see `settings_to_load` for others.
        """
        groups = self._groups()
        if contents.states and strict and not groups and not self._saved:
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
            settings = settings_to_load(held, optimizer.param_groups, groups)
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
            if not is_like(like, value) or (is_array(like) and value is not None):
                raise CheckpointError(
                    f"State {key!r} was saved as a value of a different type; nothing was loaded.",
                    parameter=row.name,
                    expected=f"a {type(like).__name__}",
                    got=f"{str(value)[:80]!r}, a {type(value).__name__}",
                )
            known = scalars.setdefault(key, value)
            if not same(known, value):
                raise CheckpointError(
                    f"State {key!r} differs between parameters of one FlatParameter or optimizer view; "
                    "nothing was loaded.",
                    parameter=row.name,
                    expected=f"{known}, as {one.held.rows[0].name}",
                    got=value,
                    remedy="load it where each parameter has state of its own: use_orig_params=True, or "
                    "optimizer_view(model, params=...)",
                )
            return
        if like is not None:
            self._missing[f"{OPTIMIZER}{row.name}.{key}"] = None

    def _one_value(self, name: str, like: Any) -> torch.Tensor:
        """What is one number here must be one in the checkpoint."""
        entry, numel = self.files.index.entries[name], like.numel() if isinstance(like, torch.Tensor) else 1
        if entry.numel != numel:
            raise CheckpointError(
                "A checkpoint does not fit the model: a tensor has another shape; nothing was loaded.",
                parameter=name,
                expected=tuple(getattr(like, "shape", ())),
                got=entry.shape,
                topic="checkpoint-does-not-fit",
            )
        return self.tensor(name)

    def _groups(self) -> list[dict[str, Any]]:
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
            _set_all(one.state, scalars)
            if one.state:
                one.optimizer.state[one.held.tensor] = one.state
        for group, settings in self.settings:
            _set_all(group, settings)

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
        if strict and (self._missing or unknown):
            raise CheckpointError(
                "A checkpoint does not fit the model: names differ; nothing was loaded.",
                parameter=next(iter([*self._missing, *unknown])),
                expected=_listed(list(self._missing), "that the checkpoint lacks") if self._missing else None,
                got=_listed(unknown, "that the model and its optimizers lack") if unknown else None,
                remedy="load it into the model it was saved from, or pass strict=False to leave these as they are",
                topic="checkpoint-does-not-fit",
            )
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


def _listed(names: list[str], what: str) -> str:
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _prefixes(name: str) -> Iterable[str]:
    """A name, and all that it begins with up to a dot: tensors inside a subclass are named from it."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def _set_all(target: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        _set(target, key, value)


def _set(target: Any, key: str, value: Any) -> None:
    """Put a value where one may be already: a tensor stays that tensor, where others may hold it."""
    current = target.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
        with torch.no_grad():
            current.copy_(value) if isinstance(value, torch.Tensor) else current.fill_(value)
    elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
        target[key] = type(current)(value.item())
    else:
        target[key] = value
