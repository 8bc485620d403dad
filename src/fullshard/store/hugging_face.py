"""Models and adapters in Hugging Face's formats: saved for its libraries, and loaded straight into shards."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.fit import check_names
from ..checkpoint.table import Named, Table
from ..checkpoint.whole import BATCH_BYTES, Wanted
from ..errors import CheckpointError, ConfigError, check_module
from ..text import plain_class, plain_name
from ..torch_private.local_tensor import inside
from .adapters import STEM, Adapter
from .contents import row_pieces, table_of
from .formats.safetensors_folder import MAX_FILE_BYTES, SafetensorsSource, new_safetensors
from .full_parameters import check_bucket_bytes, check_dtype, exports_of, stream
from .lora import Export, adapted, is_peft_model
from .names import MODEL, TensorEntry
from .ranks import Ranks
from .source import Copy


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    bucket_bytes: int = BATCH_BYTES,
    adapter: bool | str = False,
    merge_lora: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a sharded model's parameters and persistent buffers in the files that `transformers` loads. Collective.

    The first rank writes one tensor at a time into a temporary folder, and renames it to `folder` when all of it is on
    the disk: `folder` is complete or does not exist. The other ranks only take part in the gathers. Every rank needs
    the memory of `full_parameters`, and the first rank another tensor in host memory.

    Names are those of the unwrapped model's `state_dict`. Tied parameters are written under their first name;
    transformers ties them again according to the model's configuration. A transformers model is saved with its
    `config.json` (and `generation_config.json`), so that `from_pretrained(folder)` loads it. Save the tokenizer
    yourself.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all.
        folder: the folder to create; it must not exist, or be empty.
        dtype: cast floating-point tensors to this; None: as they are stored.
        max_file_bytes: the most bytes of elements per file; a larger tensor gets its own file. An adapter is one file.
        bucket_bytes: bytes of whole values to gather together; see `full_parameters`.
        adapter: write only the adapter's weights, in PEFT's format, for `peft.PeftModel.from_pretrained(base, folder)`;
            True: the active adapter; or the name of an adapter.
        merge_lora: add LoRA's weights to those they adapt, and write the base model; see `full_parameters`. Shards are
            not changed.
        process_group: the ranks that have the model; None: all.

    Raises:
        ConfigError: invalid or conflicting arguments; peft is not installed.
        CheckpointError: the folder is not empty or cannot be written, the disk is full, or safetensors lacks a dtype.
            On every rank, whichever failed; nothing is left of the save.
        PhaseError: called in the middle of a step.
    """
    check_module("save_safetensors", model)
    check_dtype(dtype)
    check_bucket_bytes(bucket_bytes)
    if adapter and merge_lora:
        raise ConfigError("adapter and merge_lora exclude each other: an adapter, or the model it was merged into.")
    ranks = Ranks(process_group)
    selected = Adapter.of(model, adapter, ranks) if adapter else None

    def plan() -> tuple[list[Export], Any]:
        exports = (
            exports_of(model, dtype, merge_lora, buffers=True)
            if selected is None
            else [Export(Wanted(name, row, dtype)) for name, row in selected.rows.items()]
        )
        for export in exports:
            _refuse_subclass(export.wanted, "saved")
        if not ranks.is_first:
            return exports, None
        entries = {MODEL + e.wanted.name: TensorEntry(e.wanted.shape, e.final_dtype) for e in exports}
        one_file = sum(entry.nbytes for entry in entries.values()) + 1
        layout = (max_file_bytes, "model") if selected is None else (one_file, STEM)
        return exports, opened.enter_context(new_safetensors(folder, entries, *layout))

    def write() -> None:
        tensors: Any = stream(exports, bucket_bytes, ranks)
        try:
            if new is None:
                for _ in tensors:
                    pass
            else:
                new[1](lambda _: next(tensors)[1])
        except Exception as error:
            tensors.throw(error)  # reports it to the other ranks

    def finish() -> None:
        if new is not None:
            if selected is None:
                save_configs(model, new[0], dtype, merge_lora)
            else:
                selected.save_config(new[0])
        opened.close()

    with ExitStack() as opened:
        exports, new = ranks.together("planning the files", plan)
        ranks.together("save_safetensors", write, files=ranks.is_first)  # the others only take part in gathers
        ranks.together("finishing save_safetensors", finish)  # no rank can fail after it


_REMEDIES = {
    "saved": "fullshard.save saves it unchanged; or convert it to a plain tensor first. Adapters of a quantised base: "
    "save them (adapter=True), and merge them on one process into a base of 16 bits or more",
    "loaded": "load each block, convert its parameters to that class, and only then shard it (docs/inside.md); "
    "fullshard.load reads such parameters as fullshard.save wrote them",
}


def _refuse_subclass(wanted: Wanted, action: str) -> None:
    """Raise CheckpointError if a parameter to be "saved" or "loaded" is of a tensor subclass."""
    if wanted.is_odd:
        raise CheckpointError(
            f"A parameter is of a tensor subclass, which safetensors files cannot store; nothing was {action}.",
            parameter=wanted.name,
            got=type(inside(wanted.row.parameter)).__name__,  # of a DTensor, that of its local tensor
            remedy=_REMEDIES[action],
        )


def save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None, merged: bool) -> None:
    """Write the configuration of a transformers model, if the names in the folder are this model's."""
    prefix = adapted(model).prefix if merged else ""
    for path, module in model.named_modules():
        config = module.__dict__.get("config")
        if config is None or is_peft_model(module) or not hasattr(config, "save_pretrained"):
            continue
        path = plain_name(f"{path}.") if path else ""
        if path != prefix:
            return
        config = copy.deepcopy(config)
        config.architectures = [plain_class(module).__name__]
        if dtype is not None:
            config.dtype = dtype
        config.save_pretrained(str(folder))
        generation = getattr(module, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))
        return


# Loading.


class LoadedNames(NamedTuple):
    """Names that `load_safetensors(strict=False)` did not load, as `nn.Module.load_state_dict` reports them.

    Attributes:
        missing_keys: names in the model, but not in the files.
        unexpected_keys: names in the files, but not in the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    adapter: bool | str = False,
    base: bool = False,
    rename: Callable[[str], str] | None = None,
    cast: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedNames:
    """Read safetensors files into a sharded model, each rank only its own pieces, straight into its shard. Collective.

    Everything is checked on all ranks before anything is changed: names, shapes, dtypes, and that no file is truncated.
    Beyond the shards, this needs memory for this rank's part of one tensor.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all; between steps. A model on the meta
            device needs `to_empty` first, and initial values for everything that is not in the files.
        folder: a local folder (with `model.safetensors`, or `model.safetensors.index.json` and its files), a file, or
            an index. A folder in Hugging Face's cache (`snapshots/...`) works, too. Every rank reads it.
        strict: whether names must be the same on both sides; False: leave unchanged what the other side lacks. Files
            contain a tied parameter once, under any of its names.
        adapter: read an adapter in PEFT's format into the model's; True: the active adapter; or the adapter's name.
        base: read a base model's files into a PEFT model; its adapters stay unchanged.
        rename: called with each name in the files, returns the name in the model; None: they are the same.
        cast: round floating-point values to a model's narrower dtype, as `from_pretrained(dtype=)` does; False: refuse.
            8-bit floats are never cast.
        process_group: the ranks that have the model; None: all.

    Returns:
        The names that were not loaded.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit (floating-point numbers of 16 bits and more are cast to
            each other), a name leads out of the folder, or the adapter's settings differ. On every rank; nothing was
            changed.
        DamagedCheckpointError: a file is missing, truncated, or inconsistent with its header or the index. On every
            rank; nothing was changed.
        ConfigError: no such adapter; peft is not installed; conflicting arguments.
        PhaseError: called in the middle of a step.
    """
    check_module("load_safetensors", model)
    if adapter and base:
        raise ConfigError("adapter and base exclude each other: the files contain an adapter or a base model.")
    ranks = Ranks(process_group)
    selected = Adapter.of(model, adapter, ranks) if adapter else None

    def compare() -> tuple[SafetensorsSource, list[Copy], LoadedNames]:
        table = table_of(model) if selected is None else selected.table
        for _, runner in table.units:
            if runner is not None:
                runner.reshard()  # gathered values are about to be out of date
        if selected is not None:
            selected.check_config(Path(folder))
        source = SafetensorsSource(folder, "model" if selected is None else STEM)
        opened.callback(source.close)
        if rename is not None:
            source.rename(rename)
        copies: list[Copy] = []
        read_names: set[str] = set()
        missing: list[str] = []
        for row, file_names in _names_of(model, table, selected, base):
            present = [MODEL + name for name in file_names if MODEL + name in source.entries]
            read_names.update(present)
            if present:
                _refuse_subclass(Wanted(row.name, row), "loaded")
                for piece in row_pieces(row, row.name, 0, ranks.is_first):
                    copies += source.copies_into(piece, present, cast)
            else:
                missing.append(row.name)
        unexpected = [name.removeprefix(MODEL) for name in source.entries if name not in read_names]
        if strict:
            remedy = "base=True reads a base model's files into an adapted one, adapter=True an adapter's"
            check_names("Safetensors files do", missing, unexpected, remedy)
        return source, copies, LoadedNames(missing, unexpected)

    with ExitStack() as opened, torch.no_grad():
        source, copies, not_loaded = ranks.together("comparing safetensors files with the model", compare)
        reading = "reading safetensors files (the model may be partially loaded)"
        ranks.together(reading, lambda: source.fill(copies))
    return not_loaded


def _names_of(model: nn.Module, table: Table, selected: Adapter | None, base: bool) -> list[tuple[Named, list[str]]]:
    """Parameters and buffers, each with its possible names in files."""
    if selected is not None:
        return [(row, [name]) for name, row in selected.rows.items()]
    rows = [*table.parameters, *table.buffer_rows]
    if not base:
        return [(row, row.names) for row in rows]
    base_name = partial(adapted(model).base_name, unused=True)
    of_base = [(row, [name for name in map(base_name, row.names) if name is not None]) for row in rows]
    return [(row, names) for row, names in of_base if names]
