"""One checkpoint against one model: everything is planned and compared before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..checkpoint.names import Named
from ..checkpoint.optimizer import check_complete
from ..errors import CheckpointError, DamagedCheckpointError
from .contents import Contents, StateOf
from .piece import Piece, whole_piece
from .read import Copy, Files, copies_for
from .source import MODEL, OPTIMIZER
from .tree import from_json

GROUPS = ("optimizer", "param_groups")


class Reader:
    """See the module's docstring.

    Args:
        files: the checkpoint.

    Attributes:
        copies: what is to be read into memory that is in use.
        after: what is to be done when all ranks have read.
        states: for each parameter, the keys of its optimizer state in the checkpoint.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.copies: list[Copy] = []
        self.after: list[Callable[[], object]] = []
        self._asked: set[str] = set()
        self._missing: dict[str, None] = {}
        entries = files.index.entries
        self._bare = bool(entries) and not any(name.startswith((MODEL, OPTIMIZER)) for name in entries)
        self._plain = self._plain_scalars()
        self.states = self._saved_states()

    def _plain_scalars(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is neither a tensor nor one value per element, by parameter and key."""
        if self.files.manifest is not None:
            found = from_json(self.files.manifest.values.get("optimizer", {}).get("scalars", {}), self.tensor)
            if not _is_nested(found):
                raise DamagedCheckpointError(
                    "A checkpoint's optimizer state cannot be read.", got=str(found)[:80], code="K145"
                )
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
            CheckpointError: another shape, or a dtype that cannot become this one.
            DamagedCheckpointError: the checkpoint lacks elements of it.
        """
        index = self.files.index
        name = next((n for n in map(self._kept_as, (piece.name, *names)) if n in index.entries), None)
        if name is None:
            return False
        self._asked.add(name)
        entry = index.entries[name]
        for what, expected, got in (("shape", piece.shape, entry.shape), ("dtype", piece.dtype, entry.dtype)):
            casts = what == "dtype" and entry.dtype.is_floating_point and piece.dtype.is_floating_point
            if expected != got and not casts:
                raise CheckpointError(
                    f"A checkpoint does not fit the model: a tensor has another {what}; nothing was loaded.",
                    parameter=piece.name,
                    expected=expected,
                    got=got,
                    remedy="load it into the model it was saved from, or fix the model's configuration",
                    code="K146",
                )
        self.copies += copies_for(piece, entry, index.stored[name])
        return True

    def _kept_as(self, name: str) -> str:
        return name.removeprefix(MODEL) if self._bare else name

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, now, in memory of its own.

        Raises:
            DamagedCheckpointError: there is none of this name, or it cannot be read.
        """
        entry = self.files.index.entries.get(name)
        if entry is None:
            raise DamagedCheckpointError(
                "A tensor that a checkpoint's manifest names is missing.", parameter=name, code="K147"
            )
        made = torch.empty(entry.shape, dtype=entry.dtype)
        copies = copies_for(whole_piece(name, made, False), entry, self.files.index.stored[name])
        self.files.check(copies)
        self.files.fill(copies)
        self._asked.add(name)
        return made

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
            CheckpointError: parameters of one tensor have different scalars.
        """
        groups = self._groups()
        if contents.states and strict and not groups and not self.states:
            raise CheckpointError(
                "A checkpoint was saved without an optimizer; nothing was loaded.",
                expected="state of the optimizers that are to be filled",
                got="none",
                remedy="load(folder, model) alone, or pass strict=False: the optimizers then begin anew",
                code="K148",
            )
        for one in contents.states:
            self._state(one)
        self.after.append(lambda: _set_groups(contents, groups))

    def _state(self, one: StateOf) -> None:
        """Plan to read the state of one tensor, and to give it to the optimizer."""
        rows, state, tensor = one.held.rows, one.optimizer.state, one.held.tensor
        saved = [(row, next((self.states[name] for name in row.names if name in self.states), None)) for row in rows]
        if not any(keys for _, keys in saved):
            self.after.append(lambda: state.pop(tensor, None))  # it was not updated yet, when this was saved
            return
        check_complete(
            [(row, None if keys is None else dict.fromkeys(keys)) for row, keys in saved],
            [(row, dict.fromkeys(keys)) for row, keys in saved if keys],
        )
        scalars: dict[str, Any] = {}
        for row in rows:
            for piece in one.pieces[row.name]:
                key = piece.name.removeprefix(f"{OPTIMIZER}{row.name}.")
                if not self.want(piece, [f"{OPTIMIZER}{name}.{key}" for name in row.names[1:]]):
                    self._missing[piece.name] = None
            for key in one.scalars[row.name]:
                self._scalar(one, row, key, scalars)
            self.asks(f"{OPTIMIZER}{name}.{key}" for name in row.names for key in one.state)
        self.after.append(lambda: _install(one, scalars))

    def _scalar(self, one: StateOf, row: Named, key: str, scalars: dict[str, Any]) -> None:
        """Read one value for a whole parameter; all parameters of a tensor must have the same."""
        for name in row.names:
            if key in self._plain.get(name, {}):
                value = self._plain[name][key]
            elif f"{OPTIMIZER}{name}.{key}" in self.files.index.entries:
                value = self._one_value(f"{OPTIMIZER}{name}.{key}", one.scalars[row.name][key].value)
            else:
                continue
            known = scalars.setdefault(key, value)
            if not bool(known == value):
                raise CheckpointError(
                    f"State {key!r} differs between parameters of one FlatParameter or optimizer view; "
                    "nothing was loaded.",
                    parameter=row.name,
                    expected=f"{known}, as {one.held.rows[0].name}",
                    got=value,
                    remedy="load it where each parameter has state of its own: use_orig_params=True, or "
                    "optimizer_view(model, params=...)",
                    code="K149",
                )
            return
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
                code="K150",
            )
        return self.tensor(name)

    def _groups(self) -> list[dict[str, Any]]:
        """The settings of all groups, as they were saved."""
        if self.files.manifest is not None:
            found = from_json(self.files.manifest.values.get("optimizer", {}).get("param_groups", []), self.tensor)
            if not isinstance(found, list) or not all(map(_is_group, found)):
                raise DamagedCheckpointError(
                    "A checkpoint's optimizer groups cannot be read.", got=str(found)[:80], code="K151"
                )
            return found
        made: dict[int, dict[str, Any]] = {}
        index = self.files.index
        for name, path in index.paths.items():
            if path[:2] == GROUPS and len(path) == 4:
                value = self.tensor(name) if name in index.entries else self.files.value(name)
                made.setdefault(int(path[2]), {})[str(path[3])] = value
        return [made[number] for number in sorted(made)]

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
                code="K152",
            )
        return left


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(own, dict) for own in value.values())


def _is_group(value: Any) -> bool:
    names = value.get("params") if isinstance(value, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _listed(names: list[str], what: str) -> str:
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _prefixes(name: str) -> Iterable[str]:
    """A name, and all that it begins with up to a dot: tensors inside a subclass are named from it."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def _install(one: StateOf, scalars: dict[str, Any]) -> None:
    """Give the optimizer the state of one tensor, which was read in place."""
    for key, value in scalars.items():
        _set(one.state, key, value)
    if one.state:
        one.optimizer.state[one.held.tensor] = one.state


def _set_groups(contents: Contents, saved: list[dict[str, Any]]) -> None:
    known = {name: group for group in saved for name in group.get("params", ())}
    names = iter(contents.groups)
    for optimizer in dict.fromkeys(one.optimizer for one in contents.states):
        for group in optimizer.param_groups:
            found = next((known[name] for name in next(names)["params"] if name in known), {})
            for key, value in found.items():
                if key not in ("params", "param_names"):
                    _set(group, key, value)


def _set(target: Any, key: str, value: Any) -> None:
    """Put a value where one may be already: a tensor stays that tensor, where others may hold it."""
    current = target.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
        with torch.no_grad():
            current.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
        target[key] = type(current)(value.item())
    else:
        target[key] = value
