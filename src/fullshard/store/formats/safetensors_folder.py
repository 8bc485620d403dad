"""Folders of safetensors files, as Hugging Face's libraries read and write them.

    model.safetensors                        all tensors; or
    model.safetensors.index.json             {"metadata": {"total_size"}, "weight_map": {name: file}}, and
    model-00001-of-00003.safetensors         the files that the index names

Folders are not trusted: files that an index names must lie inside the folder, and every size is checked before memory
is allocated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, ConfigError, DamagedCheckpointError
from ...layout import dense_strides
from ..in_place import check_room, sync
from ..source import MODEL, Source, TensorEntry
from ..storage import open_file, read_into, read_strided
from ..write import bytes_of
from .own import FolderSink
from .safetensors_header import MOST_BYTES, Header, make_header, parse_json, read_header

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
MAX_FILE_BYTES = 5 * 2**30


class SafetensorsSource(Source):
    """A folder of safetensors files, or a single file.

    Only the requested elements are read, into new memory.

    Args:
        path: the folder, or a file whose name ends in `.safetensors` or `.safetensors.index.json`.
        stem: the beginning of the names of a folder's files: "model", or "adapter_model" for PEFT's.

    Raises:
        CheckpointError: no such files; a name that leads out of the folder; an unsupported dtype.
        DamagedCheckpointError: a file is damaged or not a safetensors file, or does not match the index.
    """

    def __init__(self, path: str | os.PathLike[str], stem: str = "model") -> None:
        self.values: Mapping[str, Any] = {}
        self.ties: Mapping[str, str] = {}
        self._files: list[_File] = []
        self._places: dict[str, tuple[_File, str]] = {}  # by entry: the file, and the tensor's name in it
        entries: dict[str, TensorEntry] = {}
        try:
            for named_path, real_path, indexed_names in _files_of(Path(path), stem):
                file = _File(named_path, real_path)
                self._files.append(file)
                self._check(file, indexed_names)
                for name, entry in file.header.entries.items():
                    if MODEL + name in entries:
                        other = self._places[MODEL + name][0].path.name
                        raise _index_differs(file.path, name, f"only in {other}", "also in this file")
                    self._places[MODEL + name], entries[MODEL + name] = (file, name), entry
        except BaseException:
            self.close()
            raise
        self.entries: Mapping[str, TensorEntry] = entries

    def _check(self, file: _File, indexed_names: set[str] | None) -> None:
        """Check that a file contains exactly the tensors that the index lists for it."""
        names = set(file.header.entries)
        if indexed_names is not None and names != indexed_names:
            name = min(names ^ indexed_names)
            expected = "in this file" if name in indexed_names else "not in this file"
            actual = "in this file" if name in names else "not in this file"
            raise _index_differs(file.path, name, f"{expected}, according to the index", actual)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        entry, (file, key) = self.entries[name], self._places[name]
        offsets = (0,) * len(entry.shape) if offsets is None else offsets
        return file.read(key, entry, offsets, entry.shape if sizes is None else sizes)

    def files_of(self, name: str) -> list[str]:
        return [self._places[name][0].path.name]

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Rename entries.

        Args:
            new_name: maps the name in the files, without `model.`, to the new name; must be injective.
        """
        renamed = {MODEL + new_name(name.removeprefix(MODEL)): name for name in self.entries}
        self.entries = {new: self.entries[old] for new, old in renamed.items()}
        self._places = {new: self._places[old] for new, old in renamed.items()}

    def close(self) -> None:
        for file in self._files:
            file.close()


class _File:
    """A file, open for reading.

    Args:
        path: its path in the checkpoint.
        real: its path with links resolved; opening it fails if it is a link.
    """

    def __init__(self, path: Path, real: Path) -> None:
        self.path = path
        self._file = open_file(real)
        try:
            self.header: Header = read_header(self._read, os.fstat(self._file.fileno()).st_size, str(path))
        except BaseException:
            self.close()
            raise

    def read(self, name: str, entry: TensorEntry, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read a rectangle of a tensor, into new memory."""
        if self._file.closed:
            raise ConfigError("A safetensors file was closed and then read.", parameter=name, got=str(self.path))
        strides = dense_strides(entry.shape, tuple(range(len(entry.shape))))
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        return read_strided(self._fill, self.header.starts[name], entry.dtype, start, tuple(sizes), strides)

    def _read(self, position: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(position, memoryview(data))
        return bytes(data)

    def _fill(self, position: int, target: memoryview) -> None:
        read_into(self._file, position, target, str(self.path))

    def close(self) -> None:
        self._file.close()


def _files_of(path: Path, stem: str) -> list[tuple[Path, Path, set[str] | None]]:
    """The files to read: path, path with links resolved, and the names that the index lists for it (None: no index)."""
    if path.is_file():
        if path.name.endswith(INDEX):
            return _indexed(path.parent, path.name)
        return [(path, path.resolve(), None)]
    single, index = path / f"{stem}{SUFFIX}", path / f"{stem}{INDEX}"
    if single.exists() and index.exists():
        raise CheckpointError(
            "A folder contains two models: one in a single file, and one in the files that an index names.",
            got=f"{single.name} and {index.name} in {path}",
            remedy="remove one of them, or pass the path of the file or the index",
        )
    if index.exists():
        return _indexed(path, index.name)
    if not single.exists():
        others = sorted(p.name for p in path.glob("*.safetensors*"))[:5]
        raise CheckpointError(
            "There are no safetensors files of that name.",
            expected=f"{stem}{SUFFIX} or {stem}{INDEX} in {path}",
            got=(", ".join(others) or "none") if path.is_dir() else "no such folder",
            remedy="pass the folder that contains them; adapter=True reads adapter_model.safetensors",
        )
    return [(single, _inside(path, single.name), None)]


def _indexed(folder: Path, index: str) -> list[tuple[Path, Path, set[str] | None]]:
    path = _inside(folder, index)
    if path.stat().st_size > MOST_BYTES:
        raise DamagedCheckpointError(
            "An index of safetensors files is too long.", expected=f"at most {MOST_BYTES} bytes", got=str(path)
        )
    content = parse_json(path.read_bytes(), str(path))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not is_map or not weight_map:
        raise DamagedCheckpointError(
            f"An index of safetensors files is damaged: {path}",
            expected='{"weight_map": {name: file}}',
            got=str(content)[:100],
        )
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    return [(folder / file, _inside(folder, file), names_of_file) for file, names_of_file in names.items()]


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder, with links resolved; refuses names and links that lead out of the folder.

    Hugging Face's own cache keeps files in `blobs` beside `snapshots`, and links to them in each snapshot.

    Raises:
        CheckpointError: the name, or the link of that name, leads out of the folder.
        DamagedCheckpointError: the file does not exist.
    """
    root = folder.resolve()
    is_plain = Path(name).name == name and name not in (".", "..") and "\\" not in name and "\0" not in name
    real = (root / name).resolve() if is_plain else root
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not is_plain or real.parent not in allowed:
        raise CheckpointError(
            "A checkpoint names a file outside of its folder.",
            expected=f"the name of a file in {folder}",
            got=repr(name)[:200] + (f", a link to {real}" if is_plain else ""),
            remedy="load it only if you know the reason: copy the files into one folder first",
        )
    if not real.is_file():
        raise DamagedCheckpointError(
            "A checkpoint names a file that does not exist.", expected=str(folder / name), got="no such file"
        )
    return real


def _index_differs(path: Path, name: str, expected: str, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The files of a checkpoint do not match their index: {path}",
        parameter=name,
        expected=expected,
        got=got,
        remedy="copy all files again, from the same version of the checkpoint",
    )


class SafetensorsSink(FolderSink):
    """Writes a folder of safetensors files, with one tensor in memory at a time. See `FolderSink`.

    Args:
        path: the folder; must not exist, or be empty.
        entries: the tensors to write. All names begin with `model.`, which is dropped in the files.
        max_file_bytes: the most bytes of elements in a file; a larger tensor gets a separate file.
        stem: the beginning of the files' names.

    Raises:
        CheckpointError: the folder exists and is not empty, a name or dtype that files cannot have, or not enough disk
            space.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, TensorEntry],
        max_file_bytes: int = MAX_FILE_BYTES,
        stem: str = "model",
    ) -> None:
        headers: dict[str, bytes] = {}  # by file
        self._places: dict[str, tuple[str, int]] = {}  # by tensor: its file, and where it begins there, in bytes
        for file, tensors in _split(entries, max_file_bytes, stem):
            headers[file], starts = make_header(tensors, {"format": "pt"})
            self._places |= {name: (file, start) for name, start in starts.items()}
        super().__init__(path, entries)
        try:
            self._begin(headers, f"{stem}{INDEX}")
        except BaseException:
            self.abort()
            raise

    def _begin(self, headers: Mapping[str, bytes], index: str) -> None:
        """Write headers and index."""
        elements = sum(entry.nbytes for entry in self._unwritten.values())
        check_room(self.folder, elements + sum(map(len, headers.values())), self._path)
        for file, header in headers.items():
            (self.folder / file).write_bytes(header)
        if len(headers) > 1:
            weight_map = {name: file for name, (file, _) in sorted(self._places.items())}
            text = json.dumps({"metadata": {"total_size": elements}, "weight_map": weight_map}, indent=2)
            (self.folder / index).write_text(f"{text}\n")

    def _refuse_existing(self) -> None:
        empty = self._path.is_dir() and not any(self._path.iterdir())
        if self._path.is_symlink() or (self._path.exists() and not empty):
            raise CheckpointError(
                "The folder to write to already exists and is not empty.",
                got=str(self._path),
                remedy="choose a different folder, or remove it first: nothing is overwritten",
            )

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        file, start = self._places[name.removeprefix(MODEL)]
        with (self.folder / file).open("r+b") as opened:
            opened.seek(start)
            opened.write(bytes_of(tensor))

    def _end(self) -> None:
        for path in self.folder.iterdir():
            sync(path)


def _split(entries: Mapping[str, TensorEntry], max_bytes: int, stem: str) -> list[tuple[str, dict[str, TensorEntry]]]:
    """The names of files and the tensors in each, in order."""
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ConfigError("max_file_bytes must be a positive number of bytes.", got=repr(max_bytes))
    files: list[dict[str, TensorEntry]] = [{}]
    nbytes = 0
    for name, entry in entries.items():
        if not name.startswith(MODEL) or name == MODEL or name.removeprefix(MODEL) == "__metadata__":
            raise CheckpointError(
                "safetensors files can only contain a model's parameters and buffers.",
                parameter=name,
                expected=f"a name that begins with {MODEL!r}",
                remedy="omit optimizer state",
            )
        if files[-1] and nbytes + entry.nbytes > max_bytes:
            files.append({})
            nbytes = 0
        files[-1][name.removeprefix(MODEL)] = entry
        nbytes += entry.nbytes
    files = [dict(sorted(file.items(), key=lambda item: -item[1].dtype.itemsize)) for file in files]  # aligned
    if len(files) == 1:
        return [(f"{stem}{SUFFIX}", files[0])]
    return [(f"{stem}-{i:05d}-of-{len(files):05d}{SUFFIX}", file) for i, file in enumerate(files, 1)]
