"""Which format is at a path, and what opens it.

a file        torch          of torch.save                    .safetensors, .safetensors.index.json
a folder      fullshard      manifest.json, rank-*.safetensors; or a folder of several of these (`latest`)
              dcp            .metadata, *.distcp: of torch.distributed.checkpoint
              safetensors    *.safetensors
              deepspeed      of ZeRO-3: `latest`, zero_pp_rank_*
              fsdp1          files of torch.save, one a rank
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..store.folder import Folder
from ..store.formats.dcp import DcpSink
from ..store.formats.deepspeed import DeepSpeedSource, is_deepspeed
from ..store.formats.fsdp1 import PerRankSource, is_per_rank
from ..store.formats.own import CheckpointSink, CheckpointSource
from ..store.formats.safetensors_folder import SafetensorsSink, SafetensorsSource
from ..store.formats.torch_file import SAVING, TorchFileSink, TorchFileSource
from ..store.metadata import NAME as METADATA
from ..store.source import Entry, Sink, Source
from ..store.storage import MANIFEST, LocalStorage

WRITTEN = ("fullshard", "dcp", "torch", "safetensors")
"""The formats that can be written."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def kind_of(path: Path) -> str:
    """The format at a path: `fullshard`, `dcp`, `torch`, `safetensors`, `deepspeed` or `fsdp1`.

    Raises:
        CheckpointError: nothing, half a checkpoint, or something else.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder.")
    if SAVING in path.name:
        raise CheckpointError(f"{path} is half a checkpoint: it is being written, or its writing was broken off.")
    return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)


def _kind_of_file(path: Path) -> str:
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"PK"):
        return "torch"
    if start.startswith(b"\x80\x02\x8a\n"):
        raise CheckpointError(
            f"{path} is of torch.save's old format, of before PyTorch 1.6, which is not read.",
            remedy="torch.load it with weights_only=True, and torch.save it again",
        )
    if not start:
        raise CheckpointError(f"{path} is empty.")
    if path.name in (METADATA, MANIFEST) or path.suffix == ".distcp":
        raise CheckpointError(f"{path} is one file of a checkpoint.", remedy=f"name its folder, {path.parent}")
    raise CheckpointError(f"{path} is no checkpoint of a known format.", expected="a file of torch.save or safetensors")


def _kind_of_folder(path: Path) -> str:
    inside = [one.name for one in path.iterdir()]
    if not inside:
        raise CheckpointError(f"{path} is empty.")
    if MANIFEST in inside:
        return "fullshard"
    if METADATA in inside:
        return "dcp"
    for ending, last in ((".distcp", METADATA), ("rank-0.safetensors", MANIFEST)):
        if any(name.endswith(ending) for name in inside):
            raise CheckpointError(f"{path} is half a checkpoint: it has no {last}, which is written last.")
    if is_deepspeed(path):
        return "deepspeed"
    if Folder(path).names():
        return "fullshard"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in inside):
        return "safetensors"
    if is_per_rank(path):
        return "fsdp1"
    half = [name for name in inside if SAVING in name]
    if half:
        raise CheckpointError(f"{path} has no whole checkpoint, only {half[0]}, whose writing did not end.")
    raise CheckpointError(f"{path} is no checkpoint of a known format.", got=", ".join(sorted(inside)[:5]))


def storage_at(path: Path) -> LocalStorage:
    """The files of a checkpoint of Fullshard or DCP; in a folder of several, of the latest.

    Raises:
        CheckpointError: there is none.
    """
    where = Folder(path)
    name = where.newest()
    if name is None:
        raise CheckpointError(f"{path} has no whole checkpoint.", expected="a folder with files of one")
    return LocalStorage(path / name)


def open_source(path: Path, model_only: bool = False, hashes: bool = True) -> Source:
    """Open the checkpoint at a path, whatever its format.

    Args:
        path: a file or a folder.
        model_only: do not read anything else.
        hashes: compare those of what is read, where the format has them.

    Raises:
        CheckpointError: nothing, half a checkpoint, a damaged one, or something else.
    """
    try:
        kind = kind_of(path)
        if kind in ("fullshard", "dcp"):
            return CheckpointSource(path, hashes)
        if kind == "torch":
            return TorchFileSource(path)
        if kind == "deepspeed":
            return DeepSpeedSource(path)
        if kind == "fsdp1":
            return PerRankSource(path, model_only)
        return SafetensorsSource(path, _stem(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error


def _stem(path: Path) -> str:
    """What the names of a folder's safetensors files begin with."""
    if path.is_file():
        return "model"
    names = sorted(one.name for one in path.iterdir())
    found = [name.removesuffix(".index.json").removesuffix(".safetensors") for name in names if ".safetensors" in name]
    indexed = [name.removesuffix(".safetensors.index.json") for name in names if name.endswith(".index.json")]
    stems = indexed or found
    return "model" if "model" in stems else stems[0]


def kind_to_write(path: Path, to: str | None) -> str:
    """The format that `to` names, or else the suffix of a path.

    Raises:
        ConfigError: a format that cannot be written.
    """
    if to is not None:
        kind = {"pt": "torch"}.get(to, to)
        if kind not in WRITTEN:
            raise ConfigError(f"Cannot write the format {to!r}.", expected=", ".join(WRITTEN))
        return kind
    if path.suffix in TORCH_SUFFIXES:
        return "torch"
    return "safetensors" if path.suffix == ".safetensors" else "fullshard"


def open_sink(
    path: Path, kind: str, entries: Mapping[str, Entry], values: Mapping[str, Any], ties: Mapping[str, str]
) -> Sink:
    """Begin to write a checkpoint.

    Args:
        path: where it will be; nothing may be there.
        kind: of `WRITTEN`.
        entries, values, ties: all that will be in it. A safetensors folder takes entries alone.
    """
    if kind == "torch":
        return TorchFileSink(path, entries, values, ties)
    if kind == "safetensors":
        return SafetensorsSink(path, entries)
    return {"dcp": DcpSink, "fullshard": CheckpointSink}[kind](path, entries, values, ties)
