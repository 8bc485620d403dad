"""Detect the format of the checkpoint at a path, and open it.

a file        torch          written by torch.save
              safetensors    *.safetensors, *.safetensors.index.json
a folder      fullshard      manifest.json, rank-*.safetensors; or a folder of several checkpoints
              dcp            .metadata, *.distcp, written by torch.distributed.checkpoint
              safetensors    *.safetensors
              deepspeed      `latest`, zero_pp_rank_*, written by ZeRO-3
              fsdp1          a file of torch.save for each rank
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from ..store.folder import Folder
from ..store.formats.deepspeed import DeepSpeedSource, is_deepspeed
from ..store.formats.own import CheckpointSource
from ..store.formats.safetensors_folder import SafetensorsSource
from ..store.formats.torch_file import SAVING, SUFFIXES, TorchFileSource, files_in
from ..store.source import Source
from ..store.storage import MANIFEST, METADATA
from ..store.write import RANK_FILE

WRITTEN = ("fullshard", "dcp", "torch", "safetensors")
"""The formats that can be written."""
_UNFINISHED = re.compile(rf".+{re.escape(SAVING)}(-[0-9a-f]+)?")
"""The names of files and folders that are still being written."""


def path_from(argument: str, path: str | os.PathLike[str]) -> Path:
    """The path in an argument.

    Raises:
        ConfigError: it is empty, which `pathlib` takes for the current folder.
    """
    if not os.fspath(path):
        raise ConfigError(
            f"The path {argument} is empty.",
            expected="the path of a file or folder",
            got=repr(path),
            remedy="check the variable that it comes from; the current folder is '.'",
        )
    return Path(path)


def kind_of(path: Path) -> str:
    """The format at a path: `fullshard`, `dcp`, `torch`, `safetensors`, `deepspeed` or `fsdp1`.

    Raises:
        CheckpointError: there is nothing, an incomplete checkpoint, or something else.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder.")
    if _UNFINISHED.fullmatch(path.name):
        raise CheckpointError(f"{path} is an incomplete checkpoint: still being written, or writing was interrupted.")
    return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)


def _kind_of_file(path: Path) -> str:
    is_rank_file = RANK_FILE.fullmatch(path.name) and path.with_name(MANIFEST).exists()
    if is_rank_file or path.name in (METADATA, MANIFEST) or path.suffix == ".distcp":
        raise CheckpointError(f"{path} is a single file of a checkpoint.", remedy=f"pass its folder, {path.parent}")
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"PK"):
        return "torch"
    if start.startswith(b"\x80\x02\x8a\n"):
        raise CheckpointError(
            f"{path} is in the format of torch.save before PyTorch 1.6, which is not supported.",
            remedy="torch.load it with weights_only=True, and torch.save it again",
        )
    if not start:
        raise CheckpointError(f"{path} is empty.")
    raise CheckpointError(
        f"{path} is not a checkpoint of a known format.", expected="a file of torch.save or safetensors"
    )


def _kind_of_folder(path: Path) -> str:
    names = [file.name for file in path.iterdir()]
    if not names:
        raise CheckpointError(f"{path} is empty.")
    if MANIFEST in names:
        return "fullshard"
    if METADATA in names:
        return "dcp"
    for file, last in ((r".+\.distcp", METADATA), (RANK_FILE, MANIFEST)):
        if any(re.fullmatch(file, name) for name in names):
            raise CheckpointError(f"{path} is an incomplete checkpoint: it has no {last}, which is written last.")
    if is_deepspeed(path):
        return "deepspeed"
    if Folder(path).names():
        return "fullshard"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    if files_in(path):
        return "fsdp1"
    incomplete = [name for name in names if _UNFINISHED.fullmatch(name)]
    if incomplete:
        raise CheckpointError(f"{path} has no complete checkpoint, only {incomplete[0]}, which was not finished.")
    raise CheckpointError(f"{path} is not a checkpoint of a known format.", got=", ".join(sorted(names)[:5]))


def open_source(path: Path, model_only: bool = False, hashes: bool = True) -> Source:
    """Open the checkpoint at a path, whatever its format.

    Args:
        path: a file or a folder.
        model_only: read only the model.
        hashes: verify the hashes of all data read, if the format has them.

    Raises:
        CheckpointError: there is nothing, an incomplete or damaged checkpoint, or something else.
    """
    try:
        kind = kind_of(path)
        if kind in ("fullshard", "dcp"):
            return CheckpointSource(path, hashes)
        if kind in ("torch", "fsdp1"):
            return TorchFileSource(path, model_only and kind == "fsdp1")
        if kind == "deepspeed":
            return DeepSpeedSource(path)
        return SafetensorsSource(path, _stem(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error


def _stem(path: Path) -> str:
    """The common stem of a folder's safetensors files, "model" if there is a choice."""
    if path.is_file():
        return "model"
    names = sorted(file.name for file in path.iterdir())
    plain = [name.removesuffix(".index.json").removesuffix(".safetensors") for name in names if ".safetensors" in name]
    indexed = [name.removesuffix(".safetensors.index.json") for name in names if name.endswith(".index.json")]
    stems = indexed or plain
    return "model" if "model" in stems else stems[0]


def kind_to_write(path: Path, to: str | None) -> str:
    """The format to write: `to` if it is set, else by the suffix of the path.

    Raises:
        ConfigError: a format that cannot be written, or the suffix of a different one.
    """
    if to is not None and to not in WRITTEN:
        raise ConfigError(f"Cannot write the format {to!r}.", expected=", ".join(WRITTEN))
    by_suffix = "torch" if path.suffix in SUFFIXES else "safetensors" if path.suffix == ".safetensors" else None
    if to is not None and by_suffix not in (to, None):
        raise ConfigError(
            f"The name {path.name} has the suffix of the format {by_suffix}, but the format to write is {to}.",
            expected=f"a name without the suffix {path.suffix}, or the format {by_suffix}",
            got=f"{path.name} and {to}",
            remedy=f"name it {path.stem}, or omit the format (--to, to=)",
        )
    return to or by_suffix or "fullshard"
