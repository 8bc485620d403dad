"""Folders of safetensors files, as Hugging Face's libraries read and write them.

    model.safetensors                        all tensors; or
    model.safetensors.index.json             {"metadata": {"total_size"}, "weight_map": {name: file}}, and
    model-00001-of-00003.safetensors         the files that it names

A folder is not trusted: what it names must lie in it, and every size is checked before memory is taken (`Header`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, ConfigError, DamagedCheckpointError
from ...layout import dense_strides
from ..in_place import sync
from ..source import MODEL, Entry, Source
from ..storage import open_file, read_into, read_strided
from ..write import bytes_of
from .own import FolderSink
from .safetensors_header import MOST_BYTES, Header, make_header, parse_json, read_header

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
MAX_FILE_BYTES = 5 * 2**30


class SafetensorsSource(Source):
    """A folder of safetensors files, or one file.

    Only the requested elements are read, into new memory.

    Args:
        path: the folder, or a file whose name ends in `.safetensors`.
        stem: what the names of a folder's files begin with: "model", or "adapter_model" for PEFT's.

    Raises:
        CheckpointError: no such files; a name that leads out of the folder; a dtype that cannot be read.
        DamagedCheckpointError: a file is truncated or is something else, or index and files say different things.
    """

    def __init__(self, path: str | os.PathLike[str], stem: str = "model") -> None:
        self.values: Mapping[str, Any] = {}
        self.ties: Mapping[str, str] = {}
        self._files: list[_File] = []
        self._where: dict[str, _File] = {}
        self._renamed: dict[str, str] = {}  # by the entry's name: what files call it
        entries: dict[str, Entry] = {}
        try:
            for named_path, real_path, names in _files_of(Path(path), stem):
                file = _File(named_path, real_path)
                self._files.append(file)
                self._check(file, names)
                for name, entry in file.header.entries.items():
                    if name in self._where:
                        raise _disagree(file.path, name, f"in {self._where[name].path.name} alone", "here, too")
                    self._where[name], entries[MODEL + name] = file, entry
        except BaseException:
            self.close()
            raise
        self.entries: Mapping[str, Entry] = entries

    def _check(self, file: _File, names: set[str] | None) -> None:
        """Check that a file contains exactly the tensors that the index lists for it."""
        actual = set(file.header.entries)
        if names is not None and actual != names:
            name = min(actual ^ names)
            said = "in this file" if name in names else "in another file, or in none"
            raise _disagree(
                file.path, name, f"{said}, as the index says", "it is there" if name in actual else "it is not"
            )

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        entry = self.entries[name]
        key = self._renamed.get(name, name).removeprefix(MODEL)
        begin = (0,) * len(entry.shape) if offsets is None else offsets
        return self._where[key].read(key, entry, begin, entry.shape if sizes is None else sizes)

    def file_of(self, name: str) -> str:
        """The name of the file that holds an entry."""
        return self._where[self._renamed.get(name, name).removeprefix(MODEL)].path.name

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Rename entries.

        Args:
            new_name: maps the name in the files, without `model.`, to the new name; must be injective.
        """
        renamed = {MODEL + new_name(name.removeprefix(MODEL)): name for name in self.entries}
        self.entries = {new: self.entries[old] for new, old in renamed.items()}
        self._renamed = {new: self._renamed.get(old, old) for new, old in renamed.items()}

    def close(self) -> None:
        for file in self._files:
            file.close()


class _File:
    """One file, open for reading.

    Args:
        path: as it is named.
        real: where it is, links followed: it must not be a link itself when it is opened.
    """

    def __init__(self, path: Path, real: Path) -> None:
        self.path = path
        self._file = open_file(real)
        try:
            self.header: Header = read_header(self._read, os.fstat(self._file.fileno()).st_size, str(path))
        except BaseException:
            self.close()
            raise

    def read(self, name: str, entry: Entry, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A rectangle of a tensor, in memory of its own."""
        if self._file.closed:
            raise ConfigError("A safetensors file was closed and then read.", parameter=name, got=str(self.path))
        strides = dense_strides(entry.shape, tuple(range(len(entry.shape))))
        start = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
        return read_strided(self._fill, self.header.begins[name], entry.dtype, start, tuple(sizes), strides)

    def _read(self, begin: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(begin, memoryview(data))
        return bytes(data)

    def _fill(self, begin: int, target: memoryview) -> None:
        read_into(self._file, begin, target, str(self.path))

    def close(self) -> None:
        self._file.close()


def _files_of(path: Path, stem: str) -> list[tuple[Path, Path, set[str] | None]]:
    """The files to read, as they are named and where they are, and which names the index says are in each."""
    if path.is_file():
        if path.name.endswith(INDEX):
            return _indexed(path.parent, path.name)
        return [(path, path.resolve(), None)]
    single, index = path / f"{stem}{SUFFIX}", path / f"{stem}{INDEX}"
    if single.exists() and index.exists():
        raise CheckpointError(
            "A folder holds two models: one in a single file, and one in the files that an index names.",
            got=f"{single.name} and {index.name} in {path}",
            remedy="remove the one that is not wanted, or name the file or the index itself",
        )
    if index.exists():
        return _indexed(path, index.name)
    if not single.exists():
        there = sorted(p.name for p in path.glob("*.safetensors*"))[:5] if path.is_dir() else "no such folder"
        raise CheckpointError(
            "There are no safetensors files of that name.",
            expected=f"{stem}{SUFFIX} or {stem}{INDEX} in {path}",
            got=", ".join(there) or "none" if isinstance(there, list) else there,
            remedy="name the folder that has them; adapter=True reads adapter_model.safetensors",
        )
    return [(single, _inside(path, single.name), None)]


def _indexed(folder: Path, index: str) -> list[tuple[Path, Path, set[str] | None]]:
    where = _inside(folder, index)
    if where.stat().st_size > MOST_BYTES:
        raise DamagedCheckpointError(
            "An index of safetensors files is longer than any can be.", expected=f"{MOST_BYTES} bytes", got=str(where)
        )
    index_json = parse_json(where.read_bytes(), str(where))
    placed = index_json.get("weight_map") if isinstance(index_json, dict) else None
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise DamagedCheckpointError(
            f"An index of safetensors files is damaged: {where}",
            expected='{"weight_map": {name: file}}',
            got=str(index_json)[:100],
        )
    names: dict[str, set[str]] = {}
    for name, file in placed.items():
        names.setdefault(file, set()).add(name)
    return [(folder / file, _inside(folder, file), names_of_file) for file, names_of_file in names.items()]


def _inside(folder: Path, name: str) -> Path:
    """Where the file of that name in a folder is, links followed, if it lies in the folder.

    Hugging Face's own cache keeps files in `blobs` beside `snapshots`, and links to them in each snapshot.

    Raises:
        CheckpointError: the name, or the link that it is, leads elsewhere.
        DamagedCheckpointError: there is no such file.
    """
    here = folder.resolve()
    is_plain = Path(name).name == name and name not in (".", "..") and "\\" not in name and "\0" not in name
    real = (here / name).resolve() if is_plain else here
    homes = [here, here.parent.parent / "blobs"] if here.parent.name == "snapshots" else [here]
    if not is_plain or real.parent not in homes:
        raise CheckpointError(
            "A checkpoint names a file outside of its folder.",
            expected=f"the name of a file in {folder}",
            got=repr(name)[:200] + (f", a link to {real}" if is_plain else ""),
            remedy="do not load it unless you know why; copy the files into one folder if you do",
        )
    if not real.is_file():
        raise DamagedCheckpointError(
            "A checkpoint names a file that is not there.", expected=str(folder / name), got="no such file"
        )
    return real


def _disagree(path: Path, name: str, expected: str, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The files of a checkpoint and their index say different things: {path}",
        parameter=name,
        expected=expected,
        got=got,
        remedy="copy all files again, from one version of the checkpoint",
    )


@dataclass(frozen=True)
class _PlannedFile:
    """A file that is being written.

    Attributes:
        entries: its tensors, in the order of their elements.
        header: its first bytes.
        begins: by name, where elements begin in the file, in bytes.
    """

    name: str
    entries: dict[str, Entry]
    header: bytes
    begins: dict[str, int]


class SafetensorsSink(FolderSink):
    """A folder of safetensors files that is being written, one tensor in memory at a time. See `FolderSink`.

    Args:
        path: the folder; not there yet, or empty.
        entries: what will be written. All names begin with `model.`, which files leave out.
        max_file_bytes: of a file's elements; a larger tensor gets a file of its own.
        stem: what the names of files begin with.

    Raises:
        CheckpointError: the folder is there and not empty, a name or a dtype that files cannot have, or not enough room
            on the disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, Entry],
        max_file_bytes: int = MAX_FILE_BYTES,
        stem: str = "model",
    ) -> None:
        files = [
            _PlannedFile(name, tensors, *make_header(tensors, {"format": "pt"}))
            for name, tensors in _split(entries, max_file_bytes, stem)
        ]
        self._files = {name: file for file in files for name in file.entries}
        super().__init__(path, entries)
        try:
            self._begin(files, f"{stem}{INDEX}")
        except BaseException:
            self.abort()
            raise

    def _begin(self, files: Sequence[_PlannedFile], index: str) -> None:
        """Write headers and index."""
        elements = sum(entry.nbytes for file in files for entry in file.entries.values())
        expected, free = elements + sum(len(file.header) for file in files), shutil.disk_usage(self.folder).free
        if free < expected:
            raise CheckpointError(
                "There is not enough room for what is to be written.",
                expected=f"{expected} bytes free at {self._path.parent}",
                got=f"{free}",
            )
        for file in files:
            (self.folder / file.name).write_bytes(file.header)
        if len(files) > 1:
            weight_map = dict(sorted((name, file.name) for name, file in self._files.items()))
            text = json.dumps({"metadata": {"total_size": elements}, "weight_map": weight_map}, indent=2)
            (self.folder / index).write_text(f"{text}\n")

    def _refuse_existing(self) -> None:
        empty = self._path.is_dir() and not any(self._path.iterdir())
        if self._path.is_symlink() or (self._path.exists() and not empty):
            raise CheckpointError(
                "The folder to write to is there already, and is not empty.",
                got=str(self._path),
                remedy="name another one, or remove it first: nothing is overwritten",
            )

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        key = name.removeprefix(MODEL)
        file = self._files[key]
        with (self.folder / file.name).open("r+b") as opened:
            opened.seek(file.begins[key])
            opened.write(bytes_of(tensor))

    def _end(self) -> None:
        for path in self.folder.iterdir():
            sync(path)


def _split(entries: Mapping[str, Entry], max_bytes: int, stem: str) -> list[tuple[str, dict[str, Entry]]]:
    """Names of files, and what each holds, in order."""
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ConfigError("max_file_bytes must be a positive number of bytes.", got=repr(max_bytes))
    files: list[dict[str, Entry]] = [{}]
    nbytes = 0
    for name, entry in entries.items():
        if not name.startswith(MODEL) or name == MODEL or name.removeprefix(MODEL) == "__metadata__":
            raise CheckpointError(
                "safetensors files hold a model's parameters and buffers, and nothing else.",
                parameter=name,
                expected=f"a name that begins with {MODEL!r}",
                remedy="leave optimizer state out",
            )
        if files[-1] and nbytes + entry.nbytes > max_bytes:
            files.append({})
            nbytes = 0
        files[-1][name.removeprefix(MODEL)] = entry
        nbytes += entry.nbytes
    files = [dict(sorted(file.items(), key=lambda item: -item[1].dtype.itemsize)) for file in files]  # all aligned
    if len(files) == 1:
        return [(f"{stem}{SUFFIX}", files[0])]
    return [(f"{stem}-{i:05d}-of-{len(files):05d}{SUFFIX}", file) for i, file in enumerate(files, 1)]
