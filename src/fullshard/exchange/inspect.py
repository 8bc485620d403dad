"""`inspect`: list the contents of a checkpoint of any format, and verify that its files are intact."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from ..store.formats.own import storage_at
from ..store.names import TensorEntry
from ..store.read import Files
from .detect import kind_of, open_source, path_from


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        name: see `store/names.py`.
        shape, dtype: of the whole tensor.
        nbytes: the bytes of its elements.
        files: the names of the files that contain it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        path: the inspected path.
        kind: its format.
        tensors: all its tensors.
        ties: further names of tensors -> the name of the tensor.
        values: the values that are not tensors.
        checked: bytes of files whose hashes were verified; None: the format has no hashes, or it was not requested.
        damage: a line for each damaged file.
    """

    path: Path
    kind: str
    tensors: tuple[TensorInfo, ...]
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
    """Read a checkpoint's description of itself, and verify its files by their hashes if it has them.

    Args:
        path: a file or a folder, whose format is detected. Of a folder with several checkpoints, the latest is read.
        hashes: read all files; False: read only what is needed to list tensors.
        progress: called with a file's name, the bytes done before it, and the total; and at the end with "".

    Raises:
        CheckpointError: it is not a complete checkpoint.
        ConfigError: the path is empty.
    """
    root = path_from("to inspect", path)
    kind = kind_of(root)
    checked: int | None = None
    if kind == "fullshard" and hashes:
        with Files(storage_at(root)) as files:
            checked, damage = _verified(files, progress)
            if damage:  # values that are not tensors may be damaged too, so they are not read
                tensors = _tensors(files.entries, files.files_of)
                return Inspection(root, kind, tensors, {}, {}, checked, tuple(damage))
    with open_source(root, hashes=hashes) as source:
        tensors = _tensors(source.entries, source.files_of)
        return Inspection(root, kind, tensors, source.ties, source.values, checked, ())


def _tensors(entries: Mapping[str, TensorEntry], files_of: Callable[[str], list[str]]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, entry.shape, entry.dtype, entry.nbytes, tuple(dict.fromkeys(files_of(name))))
        for name, entry in entries.items()
    )


def _verified(files: Files, progress: Callable[[str, int, int], None] | None) -> tuple[int, list[str]]:
    """The bytes whose hashes were verified, and a line for each damaged file."""
    total, done = sum(facts.nbytes for facts in files.manifest.files.values()), 0
    damage: list[str] = []
    for name, facts in files.manifest.files.items():
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
