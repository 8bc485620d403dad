"""The files of a folder that is being written: which tensors each gets, and how they come into it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError, ConfigError
from ..source import MODEL, Entry
from ..write import bytes_of

SUFFIX = ".safetensors"


class PlannedFile:
    """A file that is being written, each tensor at its place."""

    def __init__(self, name: str, entries: dict[str, Entry], header: bytes, begins: dict[str, int]) -> None:
        self.name, self.entries, self.header, self.begins = name, entries, header, begins
        self._left = len(entries)
        self._file: IO[bytes] | None = None

    def write(self, folder: Path, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; the file is closed after its last."""
        file = self._opened(folder)
        file.seek(self.begins[name])
        file.write(bytes_of(tensor))
        self._left -= 1
        if not self._left:
            self.close(folder)

    def _opened(self, folder: Path) -> IO[bytes]:
        if self._file is None:
            self._file = (folder / self.name).open("xb")
            self._file.write(self.header)
        return self._file

    def close(self, folder: Path) -> None:
        """Write it to the disk."""
        if self._left or not self.entries:
            self._opened(folder)
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.let_go()

    def let_go(self) -> None:
        """Close it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def split_files(entries: Mapping[str, Entry], max_bytes: int, stem: str) -> list[tuple[str, dict[str, Entry]]]:
    """Names of files, and what each holds, in order."""
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ConfigError("max_file_bytes must be a positive number of bytes.", got=repr(max_bytes))
    files: list[dict[str, Entry]] = [{}]
    held = 0
    for name, entry in entries.items():
        if not name.startswith(MODEL) or name == MODEL or name.removeprefix(MODEL) == "__metadata__":
            raise CheckpointError(
                "safetensors files hold a model's parameters and buffers, and nothing else.",
                parameter=name,
                expected=f"a name that begins with {MODEL!r}",
                remedy="leave optimizer state out",
            )
        if files[-1] and held + entry.nbytes > max_bytes:
            files.append({})
            held = 0
        files[-1][name.removeprefix(MODEL)] = entry
        held += entry.nbytes
    files = [dict(sorted(file.items(), key=lambda item: -item[1].dtype.itemsize)) for file in files]  # all aligned
    if len(files) == 1:
        return [(f"{stem}{SUFFIX}", files[0])]
    return [(f"{stem}-{i:05d}-of-{len(files):05d}{SUFFIX}", file) for i, file in enumerate(files, 1)]


def index_of(files: Sequence[PlannedFile]) -> dict[str, Any]:
    """What the index of these files says."""
    total = sum(entry.nbytes for file in files for entry in file.entries.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted((name, file.name) for file in files for name in file.entries)),
    }
