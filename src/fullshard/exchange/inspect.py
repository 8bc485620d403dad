"""`inspect`: what is in a checkpoint of any format, and whether its files are what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from ..store.formats.own import CheckpointSource
from ..store.formats.pieced import PiecedSource
from ..store.formats.safetensors_folder import SafetensorsSource
from ..store.read import Files
from ..store.source import MODEL, Entry, Source
from .detect import kind_of, open_source, storage_at


@dataclass(frozen=True)
class Found:
    """One tensor.

    Attributes:
        name: see `source.py`.
        shape, dtype: of the whole tensor.
        nbytes: of its elements.
        files: names of the files that hold it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint.

    Attributes:
        path: as it was given.
        kind: its format.
        tensors: all of them.
        ties: other names of tensors.
        values: what is no tensor.
        checked: bytes of files whose hashes were compared; None: the format has none, or it was not asked for.
        damage: a line for every file that is not what was written.
    """

    path: Path
    kind: str
    tensors: tuple[Found, ...]
    ties: Mapping[str, str]
    values: Mapping[str, Any]
    checked: int | None
    damage: tuple[str, ...]


def inspect(
    path: str | os.PathLike[str],
    *,
    hashes: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Read what a checkpoint says of itself, and compare its files with their hashes where it has them.

    Args:
        path: a file or a folder; its format is found out. Of a folder with several checkpoints, the latest.
        hashes: read all files; else only what is needed to list tensors.
        progress: called with a file's name, the bytes done before it, and those of all; and at the end with "".

    Raises:
        CheckpointError: it is no whole checkpoint.
    """
    given = Path(path)
    kind = kind_of(given)
    checked: int | None = None
    if kind == "fullshard" and hashes:
        with Files(storage_at(given)) as files:
            checked, damage = _compared(files, progress)
            if damage:  # then what it holds that is no tensor may be damaged, too
                tensors = [_found(name, entry, _where(files, name)) for name, entry in files.index.entries.items()]
                return Inspection(given, kind, tuple(tensors), {}, {}, checked, tuple(damage))
    with open_source(given, hashes=hashes) as source:
        tensors = [_found(name, entry, _files_of(source, given, name)) for name, entry in source.entries.items()]
        return Inspection(given, kind, tuple(tensors), source.ties, source.values, checked, ())


def _found(name: str, entry: Entry, files: Iterable[str]) -> Found:
    return Found(name, entry.shape, entry.dtype, entry.nbytes, tuple(dict.fromkeys(files)))


def _files_of(source: Source, path: Path, name: str) -> list[str]:
    if isinstance(source, CheckpointSource):
        return _where(source.files, name)
    if isinstance(source, PiecedSource):
        return source.files_of(name)
    return [source.file_of(name)] if isinstance(source, SafetensorsSource) else [path.name]


def _where(files: Files, name: str) -> list[str]:
    """The files of a tensor, which other programs' folders may have without `model.`."""
    known = files.index.stored
    return [one.file for one in known.get(name) or known.get(name.removeprefix(MODEL), [])]


def _compared(files: Files, progress: Callable[[str, int, int], None] | None) -> tuple[int | None, list[str]]:
    """Bytes whose hashes were compared, and what is wrong with them."""
    manifest = files.manifest
    if manifest is None:
        return None, []
    total, done = sum(facts.nbytes for facts in manifest.files.values()), 0
    damage: list[str] = []
    for name, facts in manifest.files.items():
        if progress is not None:
            progress(name, done, total)
        try:
            files.verify(name, 0, facts.nbytes)
        except DamagedCheckpointError as error:
            damage.append(f"{name}: {' '.join(str(error).split())}")
        done += facts.nbytes
    if progress is not None:
        progress("", total, total)
    return total, damage
