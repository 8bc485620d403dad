"""Folders of safetensors files, as Hugging Face's libraries read and write them.

    model.safetensors                        all tensors; or
    model.safetensors.index.json             {"metadata": {"total_size"}, "weight_map": {name: file}}, and
    model-00001-of-00003.safetensors         the files that the index names

Folders are not trusted: files that an index names must lie inside the folder, and every size is checked before memory
is allocated.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from ...errors import CheckpointError, DamagedCheckpointError, invalid_argument
from ..in_place import check_room, new_folder, sync
from ..manifest import inside
from ..names import MODEL, TensorEntry
from ..source import Source
from ..storage import NamedFiles, Stored
from ..write import bytes_of
from .safetensors_header import MOST_BYTES, make_header, parse_json, read_header

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

    storage: NamedFiles

    def __init__(self, path: str | os.PathLike[str], stem: str = "model") -> None:
        self._path, self._stem = Path(path), stem
        super().__init__(NamedFiles())

    def _open(self) -> None:
        for path, real, indexed_names in _files_of(self._path, self._stem):
            self.storage.open(path, real)
            read = partial(self.storage.read, path.name)
            places = read_header(read, self.storage.sizes[path.name], str(path))
            _check_names(path, set(places), indexed_names)
            for name, (entry, begin) in places.items():
                if MODEL + name in self.entries:
                    raise _index_differs(path, name, f"only in {self.files_of(MODEL + name)[0]}", "also in this file")
                corner = (0,) * len(entry.shape)
                self.entries[MODEL + name] = entry
                self.stored[MODEL + name] = [Stored(name, corner, entry.shape, path.name, begin, entry.nbytes)]


def _check_names(path: Path, names: set[str], indexed: set[str] | None) -> None:
    """Check that a file contains exactly the tensors that the index lists for it."""
    if indexed is not None and names != indexed:
        name = min(names ^ indexed)
        expected = "in this file" if name in indexed else "not in this file"
        actual = "in this file" if name in names else "not in this file"
        raise _index_differs(path, name, f"{expected}, according to the index", actual)


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
    real = (root / inside(name)).resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if real.parent not in allowed:
        raise CheckpointError(
            "A checkpoint names a file outside its folder.",
            expected=f"the name of a file in {folder}",
            got=f"{name!r}, a link to {real}",
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


@contextlib.contextmanager
def new_safetensors(
    path: str | os.PathLike[str],
    entries: Mapping[str, TensorEntry],
    max_file_bytes: int = MAX_FILE_BYTES,
    stem: str = "model",
) -> Iterator[tuple[Path, Callable[[Callable[[str], torch.Tensor]], None]]]:
    """Write a folder of safetensors files, tensor by tensor; it is in place at the end of the `with`.

    Args:
        path: the folder; must not exist, or be empty.
        entries: the tensors to write. All names begin with `model.`, which is dropped in the files.
        max_file_bytes: the most bytes of elements in a file; a larger tensor gets a separate file.
        stem: the beginning of the files' names.

    Yields:
        The unfinished folder, of which all files become part; and a function that writes the tensors, to be called
        once: it is passed a function that returns a tensor by name, which it calls once for each entry, in order.

    Raises:
        CheckpointError: the folder exists and is not empty, a name or dtype that files cannot have, or not enough disk
            space.
    """
    headers: dict[str, bytes] = {}  # by file
    places: dict[str, tuple[str, int]] = {}  # by tensor: its file, and where it begins there, in bytes
    for file, tensors in _split(entries, max_file_bytes, stem):
        headers[file], starts = make_header(tensors, {"format": "pt"})
        places |= {name: (file, start) for name, start in starts.items()}
    with new_folder(Path(path)) as folder:
        nbytes = sum(entry.nbytes for entry in entries.values())
        check_room(folder, nbytes + sum(map(len, headers.values())), Path(path))
        for file, header in headers.items():
            (folder / file).write_bytes(header)
        if len(headers) > 1:
            weight_map = {name: file for name, (file, _) in sorted(places.items())}
            text = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=2)
            (folder / f"{stem}{INDEX}").write_text(f"{text}\n")

        def write(read: Callable[[str], torch.Tensor]) -> None:
            for name, entry in entries.items():
                file, start = places[name.removeprefix(MODEL)]
                with (folder / file).open("r+b") as opened:
                    opened.seek(start)
                    opened.write(bytes_of(entry.checked(name, read(name))))

        yield folder, write
        for written in folder.iterdir():
            sync(written)


def _split(entries: Mapping[str, TensorEntry], max_bytes: int, stem: str) -> list[tuple[str, dict[str, TensorEntry]]]:
    """The names of files and the tensors in each, in order."""
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise invalid_argument("max_file_bytes=", max_bytes, "a positive number of bytes")
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
