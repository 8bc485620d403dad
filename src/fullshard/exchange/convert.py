"""`convert`: from any format of checkpoints to any other, on one machine, a tensor at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from ..store.source import MODEL, OPTIMIZER, Entry, Source
from .detect import kind_of, kind_to_write, open_sink, open_source


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes:
        source, target: paths.
        source_kind, target_kind: formats.
        tensors: how many were written.
        nbytes: their bytes.
        left_out: what the target does not have of the source, a line each: because of `model_only`, or because its
            format has no place for it. Empty: everything is there.
        notes: what else is not as it was, a line each.
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
    """Write a checkpoint in another format. One process, no process group, no accelerator; nothing in it is executed.

    Read: folders of Fullshard and of any program that saves with `torch.distributed.checkpoint`, files of `torch.save`,
    safetensors, DeepSpeed's ZeRO-3 folders, and sharded files that FSDP1's ranks saved. Written: the first four.
    Memory is that of one tensor and of a buffer.

    Args:
        src: a file or a folder; its format is found out. Of a folder with several checkpoints, the latest.
        dst: where the new one will be: nothing may be there. It appears when it is whole.
        to: "fullshard", "dcp", "torch" or "safetensors"; None: by the suffix of `dst` (.pt, .pth, .bin; .safetensors;
            else fullshard).
        dtype: floating-point tensors of the model are cast to it; None: as they are. Optimizer state is not cast.
        model_only: parameters and buffers alone.
        progress: called with a tensor's name, the bytes done before it, and those of all; and at the end with "".

    Raises:
        CheckpointError: `src` is no whole checkpoint, or `dst` cannot be written; nothing is left at `dst`.
        ConfigError: arguments that make no sense together.
    """
    source, target = Path(src), Path(dst)
    kind = kind_to_write(target, to)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError("Weights can only be cast to a floating-point dtype.", got=dtype)
    if os.path.lexists(target):
        raise CheckpointError(f"There is something at {target}: nothing is overwritten.", remedy="name another place")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"There is no folder {target.absolute().parent} to write into.", remedy="make it first")
    with open_source(source, model_only) as opened:
        chosen = _chosen(opened, kind, dtype, model_only)
        total = sum(entry.nbytes for entry in chosen.entries.values())
        free = shutil.disk_usage(target.absolute().parent).free
        if total > free:
            raise CheckpointError(
                f"There is not enough room for {target}.", expected=f"{total:,} bytes", got=f"{free:,}"
            )
        try:
            _write(opened, chosen, target, kind, total, progress)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written ({type(error).__name__}: {error}).") from error
    return Conversion(
        source, target, kind_of(source), kind, len(chosen.entries), total, tuple(chosen.left_out), tuple(chosen.notes)
    )


@dataclass(frozen=True)
class _Chosen:
    """What of a source goes to a target; `of` says which entry each comes from."""

    entries: Mapping[str, Entry]
    of: Mapping[str, str]
    values: Mapping[str, Any]
    ties: Mapping[str, str]
    left_out: list[str]
    notes: list[str]


def _chosen(source: Source, kind: str, dtype: torch.dtype | None, model_only: bool) -> _Chosen:
    left_out: list[str] = []
    notes = [f"warning: {one['warning']}" for one in (source.values.get("optimizer"),) if one and "warning" in one]
    notes += [
        f"{name} and {known} are one tensor, of which one was lost when it was saved" for name, known in _lost(source)
    ]
    bare = model_only or kind == "safetensors"
    kinds = (MODEL,) if bare else (MODEL, OPTIMIZER) if kind == "fullshard" else ("",)
    names = [name for name in source.entries if name.startswith(kinds)]
    taken = set(names)
    if kept_out := [name for name in source.entries if name not in taken]:
        states = sum(name.startswith(OPTIMIZER) for name in kept_out)
        left_out += [f"optimizer state ({states} tensors)"] if states else []
        left_out += [f"{name} (a tensor)" for name in kept_out if not name.startswith(OPTIMIZER)]
    values, lost = _values(source.values, kind, bare, model_only)
    left_out += lost
    if bare and not names:
        raise CheckpointError(
            "The checkpoint has no model, only other things.",
            got=", ".join([*source.entries, *source.values][:3]) or "nothing",
        )
    ties = {name: known for name, known in source.ties.items() if known in taken}
    of = {name: name for name in names}
    if kind == "safetensors" and ties:
        notes += [f"{name} is tied to {known}: written as a tensor of its own" for name, known in ties.items()]
        of |= ties
        ties = {}
    entries = {name: source.entries[known] for name, known in of.items()}
    if dtype is not None:
        entries = {
            name: replace(entry, dtype=dtype) if name.startswith(MODEL) and entry.dtype.is_floating_point else entry
            for name, entry in entries.items()
        }
    return _Chosen(entries, of, values, ties, left_out, notes)


def _lost(source: Source) -> list[tuple[str, str]]:
    """Two states of one parameter that are one tensor: PyTorch 2.13's FSDP.optim_state_dict makes such, on CPU."""
    return [
        (name, known)
        for name, known in source.ties.items()
        if name.startswith(OPTIMIZER) and name.rpartition(".")[0] == known.rpartition(".")[0]
    ]


HELD = {kind: {"step": (), "optimizer": ("param_groups", "scalars"), "state": ()} for kind in ("fullshard", "dcp")}
"""Which values a folder has a place for, and which in them; (): all. A file of torch.save takes all."""


def _values(values: Mapping[str, Any], kind: str, bare: bool, model_only: bool) -> tuple[dict[str, Any], list[str]]:
    """The values that the target gets, and what it does not get, by name."""
    kept: dict[str, Any] = {}
    lost: list[str] = []
    for key, value in _filled(values).items():
        if key == "state" and bare:
            own = {name: one for name, one in value.items() if name.startswith(MODEL)}
            lost += [f"state: {name}" for name in value if name not in own]
            if kind == "safetensors":
                lost += list(own)
            elif own:
                kept[key] = own
            continue
        places = HELD.get(kind, {key: ()}).get(key)
        if bare or places is None:
            lost.append(key)
        elif places and isinstance(value, Mapping):
            kept[key] = {name: one for name, one in value.items() if name in places}
            lost += [f"{key}: {name}" for name in value if name not in (*places, "warning")]
        else:
            kept[key] = value
    return kept, lost


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that say nothing: a step that nobody named, an optimizer without groups."""
    told = {**values, "optimizer": {key: one for key, one in (values.get("optimizer") or {}).items() if _says(one)}}
    return {key: value for key, value in told.items() if _says(value) and not (key == "step" and value == 0)}


def _says(value: Any) -> bool:
    return value is not None and not (isinstance(value, dict | list | tuple | str) and not value)


def _write(
    source: Source,
    chosen: _Chosen,
    target: Path,
    kind: str,
    total: int,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    done = 0
    with open_sink(target, kind, chosen.entries, chosen.values, chosen.ties) as sink:
        for name, entry in chosen.entries.items():
            if progress is not None:
                progress(name, done, total)
            tensor = source.read(chosen.of[name])
            if tensor.dtype != entry.dtype:
                tensor = tensor.to(entry.dtype)
            sink.write(name, tensor)
            del tensor  # before the next one is read
            done += entry.nbytes
        if progress is not None:
            progress("", total, total)
        sink.finish()
