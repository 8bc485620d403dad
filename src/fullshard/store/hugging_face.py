"""Models and adapters in folders that Hugging Face's libraries load, and out of them straight into shards."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.fit import check_cast, check_names, check_shape, check_tied
from ..checkpoint.names import Named, Table
from ..checkpoint.whole import BATCH_BYTES, Wanted
from ..errors import CheckpointError, ConfigError
from ..names import plain_class, plain_name
from ..torch_private.local_tensor import inside
from .adapters import STEM, Adapter
from .contents import row_pieces, table_of
from .formats.safetensors_folder import MAX_FILE_BYTES, SafetensorsSink, SafetensorsSource
from .full_parameters import check_dtype, stream, wanted_of
from .lora import Given, adapted, is_peft_model
from .piece import Piece, value_pieces
from .ranks import Ranks
from .source import MODEL, Entry


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

    The first rank writes, one tensor after the other, into a folder beside the one that is named, which takes its place
    when all is on the disk: it is whole or not there. The other ranks only take part in the gathers. Memory on every
    rank is that of `full_parameters`, and a tensor more in host memory on the first.

    Names are those of the unwrapped model's `state_dict`; of tied parameters the first is written, which transformers
    ties again by the model's configuration. A model of transformers gets its `config.json` (and
    `generation_config.json`) with it, so that `from_pretrained(folder)` loads it. Its tokenizer is yours to save.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all.
        folder: where to; not there yet, or empty.
        dtype: cast floating-point tensors to this; None: as they are stored.
        max_file_bytes: of elements in one file; a larger tensor gets a file of its own. An adapter is one file.
        bucket_bytes: of whole values that are gathered together; see `full_parameters`.
        adapter: write only the adapter's weights, in PEFT's format, for `peft.PeftModel.from_pretrained(base, folder)`;
            True: of the active adapter, or its name.
        merge_lora: add LoRA's weights to those they adapt, and write the base model; see `full_parameters`. Shards are
            not changed.
        process_group: the ranks that hold the model; None: all.

    Raises:
        ConfigError: invalid or conflicting arguments; peft is not installed.
        CheckpointError: the folder is there and not empty, cannot be written, or there is no room; a dtype that files
            do not have. On every rank, whichever it happened on; nothing is left then.
        PhaseError: called in the middle of a step.
    """
    check_dtype(dtype)
    if adapter and merge_lora:
        raise ConfigError("adapter and merge_lora exclude each other: an adapter, or the model it was merged into.")
    ranks = Ranks(process_group)
    own = _Own.of(model, adapter, ranks) if adapter else None
    sink: SafetensorsSink | None = None
    try:
        with ranks.step("planning the files"):
            given = _plain(wanted_of(model, dtype, merge_lora, buffers=True)) if own is None else own.given(dtype)
            entries = {MODEL + tensor.name: Entry(tensor.shape, tensor.given_dtype) for tensor in given}
            if own is not None:
                max_file_bytes = sum(entry.nbytes for entry in entries.values()) + 1
            if ranks.is_first:
                sink = SafetensorsSink(folder, entries, max_file_bytes, stem="model" if own is None else STEM)
        with ranks.step("save_safetensors"):
            tensors: Any = stream(given, bucket_bytes, ranks)
            for name, tensor in tensors:
                try:
                    if sink is not None:
                        sink.write(MODEL + name, tensor)
                except Exception as error:
                    tensors.throw(error)  # reports it to the other ranks
        with ranks.step("finishing save_safetensors"):  # no rank can fail after it
            if sink is not None:
                if own is None:
                    _save_configs(model, sink.folder, dtype, merge_lora)
                else:
                    own.adapter.save_config(sink.folder)
                sink.finish()
    finally:
        if sink is not None:
            sink.abort()


def _plain(given: list[Given]) -> list[Given]:
    """Return `given` unchanged.

    Raises:
        CheckpointError: a parameter is of a tensor subclass.
    """
    odd = next((tensor for tensor in given if tensor.wanted.is_odd), None)
    if odd is not None:
        raise CheckpointError(
            "A parameter is of a class of its own, which safetensors files do not hold.",
            parameter=odd.name,
            got=_class_of(getattr(odd.wanted.tensor, "parameter", odd.wanted.tensor)),
            remedy="fullshard.save keeps it as it is; or convert it to a plain tensor first. Adapters of a quantised "
            "base: save them (adapter=True), and merge them on one process into a base of 16 bits or more",
        )
    return given


def _class_of(parameter: Any) -> str:
    """The name of a parameter's class, of what a DTensor holds."""
    return type(inside(parameter)).__name__


@dataclass
class _Own:
    """An adapter and what belongs to it.

    Attributes:
        rows: by the name in PEFT's files.
    """

    adapter: Adapter
    table: Table
    rows: dict[str, Named]

    @classmethod
    def of(cls, model: nn.Module, wanted: bool | str, ranks: Ranks) -> _Own:
        """Of `model`'s adapter. Collective: PEFT is asked on the first rank, so that all have the same answer."""
        names: dict[str, str] = {}
        with ranks.step("looking for the model's adapter"):
            table, adapter = table_of(model), Adapter(model, wanted)
            names = adapter.names(table) if ranks.is_first else {}
        rows = {row.name: row for row in table.parameters}
        return cls(adapter, table, {name: rows[row] for name, row in ranks.share(names).items()})

    def given(self, dtype: torch.dtype | None) -> list[Given]:
        """What is written."""
        return _plain([Given(Wanted(name, row, dtype)) for name, row in self.rows.items()])


def _save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None, merged: bool) -> None:
    """Write what a model of transformers is built by, if the names in the folder are this model's."""
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
    """What `load_safetensors(strict=False)` left alone, as `nn.Module.load_state_dict` reports it.

    Attributes:
        missing_keys: of the model, without a tensor in the files.
        unexpected_keys: of tensors in the files that the model does not have.
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
    """Read safetensors files into a sharded model, each rank only what it owns, straight into its shard. Collective.

    Everything is compared on all ranks before anything is changed: names, shapes, dtypes, and that all files are whole.
    Besides the shards this takes the memory of this rank's part of one tensor.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all; between steps. One that was made on the
            meta device needs `to_empty` first, and whatever is not in the files to be initialised.
        folder: a local folder (with `model.safetensors`, or `model.safetensors.index.json` and its files), one file, or
            an index. Hugging Face's own cache (`snapshots/...`) is one. Every rank reads it.
        strict: whether names must be the same on both sides; False: what one side lacks is left as it is. Tied
            parameters are given once, under any of their names.
        adapter: read an adapter in PEFT's format into the model's; True: the active one, or its name.
        base: of a model that PEFT made, read the base model's files into it; its adapters stay as they are.
        rename: given each name in the files, returns that in the model; None: they are the same.
        cast: round floating-point values to a dtype of fewer digits that the model has, as `from_pretrained(dtype=)`
            does; False: refuse. 8-bit floats are never cast.
        process_group: the ranks that hold the model; None: all.

    Returns:
        What was left alone.

    Raises:
        CheckpointError: names, shapes or dtypes that do not fit (floating-point numbers of 16 bits and more are cast to
            each other), a name that leads out of the folder, or an adapter of other settings. On every rank; nothing
            was changed.
        DamagedCheckpointError: a file is missing, truncated, or not what its header or the index says; as before.
        ConfigError: no such adapter; peft is not installed; conflicting arguments.
        PhaseError: called in the middle of a step.
    """
    if adapter and base:
        raise ConfigError("adapter and base exclude each other: files hold one or the other.")
    ranks = Ranks(process_group)
    own = _Own.of(model, adapter, ranks) if adapter else None

    def compare() -> tuple[_Plan, LoadedNames]:
        table = table_of(model) if own is None else own.table
        for _, runner in table.units:
            if runner is not None:
                runner.reshard()  # what is gathered is about to be out of date
        if own is not None:
            own.adapter.check_config(Path(folder))
        source = SafetensorsSource(folder, "model" if own is None else STEM)
        opened.callback(source.close)
        if rename is not None:
            source.rename(rename)
        plan = _Plan(source, table, ranks.is_first, cast)
        for row, file_names in _names_of(model, table, own, base):
            plan.add(row, file_names)
        return plan, plan.close(strict)

    with ExitStack() as opened:
        plan, left = ranks.together("comparing safetensors files with the model", compare)
        with torch.no_grad():
            ranks.together("reading safetensors files (the model may be partially loaded)", plan.fill)
    return left


def _names_of(model: nn.Module, table: Table, own: _Own | None, base: bool) -> list[tuple[Named | str, list[str]]]:
    """Parameters, and names of buffers; and what files may call them."""
    if own is not None:
        return [(row, [name]) for name, row in own.rows.items()]
    named: list[tuple[Named | str, list[str]]] = [(row, row.names) for row in table.parameters]
    named += [(name, [name]) for name in table.buffers]
    if not base:
        return named
    base_name = partial(adapted(model).base_name, unused=True)
    of_base = [(row, [name for name in map(base_name, names) if name is not None]) for row, names in named]
    return [(row, names) for row, names in of_base if names]


@dataclass
class _Plan:
    """What is read where; everything is checked while it is made.

    Attributes:
        reads: pieces of shards and buffers, and the names in the files of what fills them.
    """

    source: SafetensorsSource
    table: Table
    is_first: bool
    cast: bool
    reads: list[tuple[Piece, str]] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)
    _missing: list[str] = field(default_factory=list)

    def add(self, row: Named | str, file_names: list[str]) -> None:
        """Plan to read a parameter or buffer from the first of its names that files have."""
        present = [MODEL + name for name in file_names if MODEL + name in self.source.entries]
        name = row if isinstance(row, str) else row.name
        if not present:
            self._missing.append(name)
            return
        self._asked.update(present)
        if not isinstance(row, str) and Wanted(name, row).is_odd:
            raise CheckpointError(
                "A parameter is of a class of its own, which safetensors files do not hold; nothing was loaded.",
                parameter=name,
                got=f"{_class_of(row.parameter)}, to be read from plain numbers",
                remedy="load each block, make its parameters of that class, and only then shard it (docs/inside.md); "
                "fullshard.load reads what fullshard.save wrote of them",
            )
        for piece in self._pieces(row):
            for file_name in present:
                check_shape(name, piece.shape, self.source.entries[file_name].shape)
                check_cast(name, piece.dtype, self.source.entries[file_name].dtype, self.cast)
            if piece.tensor.numel():
                for alias in present[1:]:
                    self._compare(piece, present[0], alias)
                self.reads.append((piece, present[0]))

    def _pieces(self, row: Named | str) -> list[Piece]:
        if isinstance(row, str):
            return list(value_pieces(row, self.table.buffers[row], 0, self.is_first))
        return row_pieces(row, row.name, row.parameter, 0, self.is_first)

    def _compare(self, piece: Piece, first: str, alias: str) -> None:
        """Check that a tied parameter has the same values under two of its names."""
        values = [self.source.read(name, piece.offsets, piece.sizes) for name in (first, alias)]
        check_tied(piece.name, (first.removeprefix(MODEL), values[0]), (alias.removeprefix(MODEL), values[1]))

    def close(self, strict: bool) -> LoadedNames:
        """Compare the names.

        Raises:
            CheckpointError: they differ, and `strict`.
        """
        unexpected = [name.removeprefix(MODEL) for name in self.source.entries if name not in self._asked]
        if strict:
            remedy = "base=True reads a base model's files into an adapted one, adapter=True an adapter's"
            check_names("Safetensors files do", self._missing, unexpected, remedy)
        return LoadedNames(self._missing, unexpected)

    def fill(self) -> None:
        """Read this rank's rectangles into its shards."""
        for piece, name in self.reads:
            piece.tensor.copy_(self.source.read(name, piece.offsets, piece.sizes))
