"""`convert`: from any readable checkpoint format to any writable one, on one machine, tensor by tensor."""

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
    """The result of `convert`.

    Attributes:
        source, target: paths.
        source_kind, target_kind: formats.
        tensors: the number of tensors written.
        nbytes: their bytes.
        left_out: contents of the source that the target lacks, one per line, because of `model_only` or because the
            target's format cannot hold them. Empty: everything was converted.
        notes: other differences between source and target, one per line.
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
    """Write a checkpoint in a different format. Needs one process, no process group and no accelerator.

    Reads folders of Fullshard and of any program that saves with `torch.distributed.checkpoint`, files of `torch.save`,
    safetensors, DeepSpeed's ZeRO-3 folders, and the sharded files of FSDP1's ranks. Writes the first four. Takes the
    memory of one tensor and a buffer. No code in a checkpoint is executed.

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
    source, target = Path(src), Path(dst)
    kind = kind_to_write(target, to)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError("Weights can only be cast to a floating-point dtype.", got=dtype)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists, and is not overwritten.", remedy="choose a different path")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"The folder {target.absolute().parent} does not exist.", remedy="create it first")
    with open_source(source, model_only) as opened:
        chosen = _chosen(opened, kind, dtype, model_only)
        total = sum(entry.nbytes for entry in chosen.entries.values())
        free = shutil.disk_usage(target.absolute().parent).free
        if total > free:
            raise CheckpointError(
                f"There is not enough disk space for {target}.", expected=f"{total:,} bytes", got=f"{free:,}"
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
    """The contents of a source that go to the target.

    Attributes:
        entries: name in the target -> its entry.
        of: name in the target -> name in the source.
        values: the values that are not tensors.
        ties: name in the target -> the name of the tensor it is tied to.
        left_out, notes: as of `Conversion`.
    """

    entries: Mapping[str, Entry]
    of: Mapping[str, str]
    values: Mapping[str, Any]
    ties: Mapping[str, str]
    left_out: list[str]
    notes: list[str]


def _chosen(source: Source, kind: str, dtype: torch.dtype | None, model_only: bool) -> _Chosen:
    left_out: list[str] = []
    optimizer = source.values.get("optimizer")
    notes = [f"warning: {optimizer['warning']}"] if optimizer and "warning" in optimizer else []
    notes += [
        f"{name} and {twin} are the same tensor: the value of one was lost when they were saved"
        for name, twin in _lost(source)
    ]
    bare = model_only or kind == "safetensors"
    kinds = (MODEL,) if bare else (MODEL, OPTIMIZER) if kind == "fullshard" else ("",)
    names = [name for name in source.entries if name.startswith(kinds)]
    chosen = set(names)
    if skipped := [name for name in source.entries if name not in chosen]:
        states = sum(name.startswith(OPTIMIZER) for name in skipped)
        left_out += [f"optimizer state ({states} tensors)"] if states else []
        left_out += [f"{name} (a tensor)" for name in skipped if not name.startswith(OPTIMIZER)]
    values, lost = _values(source.values, kind, bare, model_only)
    left_out += lost
    if bare and not names:
        raise CheckpointError(
            "The checkpoint contains no model.",
            got=", ".join([*source.entries, *source.values][:3]) or "nothing",
        )
    ties = {name: tied_to for name, tied_to in source.ties.items() if tied_to in chosen}
    of = {name: name for name in names}
    if kind == "safetensors" and ties:
        notes += [f"{name} is tied to {tied_to}: written as a separate tensor" for name, tied_to in ties.items()]
        of |= ties
        ties = {}
    entries = {name: source.entries[origin] for name, origin in of.items()}
    if dtype is not None:
        entries = {
            name: replace(entry, dtype=dtype) if name.startswith(MODEL) and entry.dtype.is_floating_point else entry
            for name, entry in entries.items()
        }
    return _Chosen(entries, of, values, ties, left_out, notes)


def _lost(source: Source) -> list[tuple[str, str]]:
    """Pairs of states of a parameter that are the same tensor: PyTorch 2.13's FSDP.optim_state_dict, on CPU."""
    return [
        (name, twin)
        for name, twin in source.ties.items()
        if name.startswith(OPTIMIZER) and name.rpartition(".")[0] == twin.rpartition(".")[0]
    ]


STORABLE = {kind: {"step": (), "optimizer": ("param_groups", "scalars"), "state": ()} for kind in ("fullshard", "dcp")}
"""Format -> the values that it can hold -> the keys in each, () for all. A file of torch.save holds everything."""


def _values(values: Mapping[str, Any], kind: str, bare: bool, model_only: bool) -> tuple[dict[str, Any], list[str]]:
    """The values for the target, and the names of those that it cannot hold."""
    converted: dict[str, Any] = {}
    lost: list[str] = []
    for key, value in _filled(values).items():
        if key == "state" and bare:
            model_state = {name: item for name, item in value.items() if name.startswith(MODEL)}
            lost += [f"state: {name}" for name in value if name not in model_state]
            if kind == "safetensors":
                lost += list(model_state)
            elif model_state:
                converted[key] = model_state
            continue
        places = STORABLE.get(kind, {key: ()}).get(key)
        if bare or places is None:
            lost.append(key)
        elif places and isinstance(value, Mapping):
            converted[key] = {name: item for name, item in value.items() if name in places}
            lost += [f"{key}: {name}" for name in value if name not in (*places, "warning")]
        else:
            converted[key] = value
    return converted, lost


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without empty ones: a step that was not set, an optimizer without groups."""
    optimizer = {key: item for key, item in (values.get("optimizer") or {}).items() if _is_filled(item)}
    cleaned = {**values, "optimizer": optimizer}
    return {key: value for key, value in cleaned.items() if _is_filled(value) and not (key == "step" and value == 0)}


def _is_filled(value: Any) -> bool:
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
            del tensor  # frees it before the next one is read
            done += entry.nbytes
        if progress is not None:
            progress("", total, total)
        sink.finish()
