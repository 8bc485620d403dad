"""`convert`: from any readable checkpoint format to any writable one, in a single process, tensor by tensor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..store.formats.dcp import write_dcp
from ..store.formats.own import write_checkpoint
from ..store.formats.safetensors_folder import new_safetensors
from ..store.formats.torch_file import write_torch_file
from ..store.full_parameters import check_dtype
from ..store.in_place import check_room
from ..store.names import MODEL, OPTIMIZER, TensorEntry
from ..store.source import Source
from .detect import kind_of, kind_to_write, open_source, path_from


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes:
        source, target: paths.
        source_kind, target_kind: formats.
        tensors: the number of tensors written.
        nbytes: their bytes.
        left_out: contents of the source that the target lacks, because of `model_only` or because the target's format
            cannot represent them, a line each. Empty: everything was converted.
        notes: other differences between source and target, a line each.
    """

    source: Path
    target: Path
    source_kind: str
    target_kind: str
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: torch.dtype | None = None,
    model_only: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Conversion:
    """Write a checkpoint in a different format. Runs in a single process, without process group or accelerator.

    Reads folders of Fullshard and of any program that saves with `torch.distributed.checkpoint`, files of `torch.save`,
    safetensors, DeepSpeed's ZeRO-3 folders, and the sharded files of FSDP1's ranks. Writes the first four. Needs memory
    for the largest tensor and a buffer. No code in a checkpoint is executed.

    Args:
        src: a file or a folder, whose format is detected. Of a folder with several checkpoints, the latest is read.
        dst: the path of the new checkpoint, which must not exist. It appears only once it is complete.
        to: "fullshard", "dcp", "torch" or "safetensors"; None: by the suffix of `dst` (.pt, .pth, .bin; .safetensors;
            else fullshard).
        dtype: the dtype to cast floating-point tensors of the model to; None: do not cast. Optimizer state is not cast.
        model_only: convert only parameters and buffers.
        progress: called with a tensor's name, the bytes done before it, and the total; and at the end with "".

    Raises:
        CheckpointError: `src` is not a complete checkpoint, or `dst` cannot be written; nothing is left at `dst`.
        ConfigError: invalid or conflicting arguments.
    """
    source, target = path_from("to read", src), path_from("to write", dst)
    kind = kind_to_write(target, to)
    check_dtype(dtype)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists, and is not overwritten.", remedy="choose a different path")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"The folder {target.absolute().parent} does not exist.", remedy="create it first")
    with open_source(source, model_only) as opened:
        selection = _selected(opened, kind, dtype, model_only)
        total = sum(entry.nbytes for entry in selection.entries.values())
        check_room(target.absolute().parent, total, target)
        try:
            _write(opened, selection, target, kind, total, progress)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written ({type(error).__name__}: {error}).") from error
    left_out, notes = tuple(selection.left_out), tuple(selection.notes)
    return Conversion(source, target, kind_of(source), kind, len(selection.entries), total, left_out, notes)


@dataclass(frozen=True)
class _Selection:
    """The contents of a source that are written to the target.

    Attributes:
        entries: name in the target -> its entry.
        source_names: name in the target -> name in the source.
        values: the values that are not tensors.
        ties: name in the target -> the name of the tensor it is tied to.
        left_out, notes: see `Conversion`.
    """

    entries: Mapping[str, TensorEntry]
    source_names: Mapping[str, str]
    values: Mapping[str, Any]
    ties: Mapping[str, str]
    left_out: list[str]
    notes: list[str]


def _selected(source: Source, kind: str, dtype: torch.dtype | None, model_only: bool) -> _Selection:
    left_out: list[str] = []
    optimizer = source.values.get("optimizer")
    notes = [f"warning: {optimizer['warning']}"] if optimizer and "warning" in optimizer else []
    notes += [
        f"{name} and {twin} are the same tensor: the value of one was lost when they were saved"
        for name, twin in _merged_states(source)
    ]
    notes += [] if source.entries else ["the source contains no tensor"]
    only_model = model_only or kind == "safetensors"
    prefixes = (MODEL,) if only_model else (MODEL, OPTIMIZER) if kind == "fullshard" else ("",)
    names = [name for name in source.entries if name.startswith(prefixes)]
    selected = set(names)
    if skipped := [name for name in source.entries if name not in selected]:
        states = sum(name.startswith(OPTIMIZER) for name in skipped)
        left_out += [f"optimizer state ({states} tensors)"] if states else []
        left_out += [f"{name} (a tensor)" for name in skipped if not name.startswith(OPTIMIZER)]
    values, skipped_values = _values(source.values, kind, only_model)
    left_out += skipped_values
    if kind in ("dcp", "torch"):
        values = {key: _pickled(value, key, notes) for key, value in values.items()}
    if only_model and not names:
        raise CheckpointError(
            "The checkpoint contains no model.",
            got=", ".join([*source.entries, *source.values][:3]) or "nothing",
        )
    ties = {name: tied_to for name, tied_to in source.ties.items() if tied_to in selected}
    source_names = {name: name for name in names}
    if kind == "safetensors" and ties:
        notes += [f"{name} is tied to {tied_to}: written as a separate tensor" for name, tied_to in ties.items()]
        source_names |= ties
        ties = {}
    entries = {name: source.entries[source_name] for name, source_name in source_names.items()}
    if dtype is not None:
        entries = {
            name: replace(entry, dtype=dtype) if name.startswith(MODEL) and entry.dtype.is_floating_point else entry
            for name, entry in entries.items()
        }
    return _Selection(entries, source_names, values, ties, left_out, notes)


def _merged_states(source: Source) -> list[tuple[str, str]]:
    """Pairs of states of a parameter that are the same tensor, as PyTorch 2.13's FSDP.optim_state_dict saves on CPU."""
    return [
        (name, twin)
        for name, twin in source.ties.items()
        if name.startswith(OPTIMIZER) and name.rpartition(".")[0] == twin.rpartition(".")[0]
    ]


STORABLE = {kind: {"step": (), "optimizer": ("param_groups", "scalars"), "state": ()} for kind in ("fullshard", "dcp")}
"""Format -> the values that it supports -> the keys in each, () for all. A file of torch.save supports everything."""


def _values(values: Mapping[str, Any], kind: str, only_model: bool) -> tuple[dict[str, Any], list[str]]:
    """The values for the target, and the names of those that it does not support."""
    converted: dict[str, Any] = {}
    skipped: list[str] = []
    for key, value in _without_empty(values).items():
        if key == "state" and only_model:
            model_state = {name: item for name, item in value.items() if name.startswith(MODEL)}
            skipped += [f"state: {name}" for name in value if name not in model_state]
            if kind == "safetensors":
                skipped += list(model_state)
            elif model_state:
                converted[key] = model_state
            continue
        supported = STORABLE.get(kind, {key: ()}).get(key)
        if only_model or supported is None:
            skipped.append(key)
        elif supported and isinstance(value, Mapping):
            converted[key] = {name: item for name, item in value.items() if name in supported}
            skipped += [f"{key}: {name}" for name in value if name not in (*supported, "warning")]
        else:
            converted[key] = value
    return converted, skipped


_READ_AS: dict[type, type] = {Counter: dict, torch.Size: tuple, torch.device: str}
"""Classes, and those of which values are read from files of `torch.save`: without calling what a file names."""


def _pickled(value: Any, path: str, notes: list[str]) -> Any:
    """A value as files of `torch.save` are read; adds a note of each change."""
    if isinstance(value, np.ndarray):
        notes.append(f"{path} is a NumPy array: written as a tensor")
        return torch.from_numpy(value)
    for kind, read_as in _READ_AS.items():
        if isinstance(value, kind):
            notes.append(f"{path} is a {kind.__name__}: written as a {read_as.__name__}")
            value = read_as(value)
    if isinstance(value, Mapping):
        return {key: _pickled(item, f"{path}.{key}", notes) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pickled(item, f"{path}.{i}", notes) for i, item in enumerate(value))
    return value


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without empty ones: a step that was not set, an optimizer without groups."""
    optimizer = {key: item for key, item in (values.get("optimizer") or {}).items() if not _is_empty(item)}
    return {
        key: value
        for key, value in {**values, "optimizer": optimizer}.items()
        if not _is_empty(value) and not (key == "step" and value == 0)
    }


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | str) and not value)


def _write(
    source: Source,
    selection: _Selection,
    target: Path,
    kind: str,
    total: int,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    done, entries = 0, selection.entries

    def read(name: str) -> torch.Tensor:
        nonlocal done
        if progress is not None:
            progress(name, done, total)
        done += entries[name].nbytes
        return source.read(selection.source_names[name]).to(entries[name].dtype)

    if kind == "safetensors":
        with new_safetensors(target, entries) as (_, write):
            write(read)
    else:
        _WRITERS[kind](target, entries, selection.values, selection.ties, read)
    if progress is not None:
        progress("", total, total)


_WRITERS = {"fullshard": write_checkpoint, "dcp": write_dcp, "torch": write_torch_file}
"""Functions that write a whole checkpoint, by format."""
