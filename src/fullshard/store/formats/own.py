"""Folders of checkpoints: Fullshard's own, read and written; and those of `torch.distributed.checkpoint`, read."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from ..folder import Folder
from ..hashed import Hashed
from ..in_place import make_folders, put_in_place, remove_empty, write_synced
from ..manifest import NAME as MANIFEST
from ..manifest import Manifest, versions
from ..piece import Piece
from ..plan import GROUPS, SCALARS
from ..read import Files, copies_for
from ..source import MODEL, OPTIMIZER, Entry, Sink, Source
from ..storage import LocalStorage, Stored
from ..tree import from_json, to_json
from ..write import bytes_of, file_of, key_of, shown
from .safetensors_header import make_header


class CheckpointSource(Source):
    """See the module's docstring, and `Source`.

    Args:
        path: a checkpoint; or a folder of Fullshard's checkpoints, of which the newest is meant.
        hashes: see `Files`.

    Attributes:
        files: what is read.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], hashes: bool = True) -> None:
        where = Folder(path)
        name = where.newest()
        if name is None:
            raise CheckpointError("There is no checkpoint here.", got=str(path))
        self.files = Files(LocalStorage(where.at(name)), hashes)
        index, manifest = self.files.index, self.files.manifest
        self._prefix = "" if any(n.startswith((MODEL, OPTIMIZER)) for n in index.entries) else MODEL
        known: Mapping[str, str] = {} if manifest is None else manifest.ties
        self.ties = {self._prefix + name: self._prefix + first for name, first in known.items()}
        if manifest is None:
            self.entries = {self._prefix + n: entry for n, entry in index.entries.items()}
            self.values = self._nested()
        else:
            kept = (MODEL, OPTIMIZER)
            self.entries = {n: e for n, e in index.entries.items() if n.startswith(kept) and n not in known}
            told = from_json(manifest.values, self._tensor)
            ranks = [from_json(one, self._tensor_of(rank)) for rank, one in enumerate(manifest.ranks)]
            self.values = {"step": manifest.step, **told, **({"ranks": ranks} if ranks else {})}

    def _tensor(self, name: str) -> torch.Tensor:
        return self._read(name, None, None)

    def _tensor_of(self, rank: int) -> Any:
        def tensor(name: str) -> torch.Tensor:
            own = f"ranks.{rank}.{name}"
            return self._tensor(own if own in self.files.index.entries else name)

        return tensor

    def _nested(self) -> dict[str, Any]:
        """What is no tensor, as `Source.values` has it, by the keys that led to it."""
        state: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        found: dict[str, Any] = {"state": state, "optimizer": optimizer}
        for name in self.files.index.values:
            path = tuple(map(str, self.files.index.paths.get(name, (name,))))
            if path[0] == "optimizer" and len(path) > 1:
                if path[1].partition(".")[0] == "param_groups":
                    continue
                keys = ["scalars", *path[2:]] if path[1] == "state" else path[1:]
                _put(optimizer, keys, self.files.value(name))
            elif path[0] == "model" and len(path) > 1:
                state[".".join(path)] = self.files.value(name)
            else:
                _put(found if path == ("step",) else state, path, self.files.value(name))
        if groups := self.files.groups(self._tensor):
            optimizer["param_groups"] = groups
        return found

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return self._read(name.removeprefix(self._prefix), offsets, sizes)

    def _read(self, name: str, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> torch.Tensor:
        entry = self.files.index.entries.get(name)
        if entry is None:
            raise CheckpointError("A checkpoint has no tensor of this name.", parameter=name)
        extent = entry.shape if sizes is None else tuple(sizes)
        made = torch.empty(extent, dtype=entry.dtype, device="cpu")
        begin = (0,) * len(extent) if offsets is None else tuple(offsets)
        copies = copies_for(Piece(name, entry.shape, begin, extent, made), entry, self.files.index.stored[name])
        self.files.check(copies)
        self.files.fill(copies)
        return made

    def close(self) -> None:
        self.files.close()


def _put(place: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value into nested dicts."""
    *outer, last = path
    for key in outer:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise DamagedCheckpointError("Two values of a checkpoint have one name.", got=".".join(path))
        place = inner
    place[last] = value


class FolderSink(Sink):
    """A folder with one file of tensors, one after the other, and what is written after them. See `Sink`.

    Args:
        path: the folder, which must not be there.
        entries: all tensors.
        file: the name of their file.

    Raises:
        CheckpointError: something is there.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Mapping[str, Entry], file: str) -> None:
        self._path, self._entries = Path(path).absolute(), dict(entries)
        if self._path.exists():
            raise CheckpointError("There is something where a checkpoint is to be written.", got=str(self._path))
        self._here = self._path.with_name(f"{self._path.name}.saving-{secrets.token_hex(4)}")
        self._made = make_folders(self._here)
        self._stored: dict[str, Stored] = {}
        try:
            self._file: IO[bytes] = (self._here / file).open("xb")
        except BaseException:
            remove_empty(self._made)
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            raise CheckpointError(
                "A tensor is not what was announced.",
                parameter=name,
                expected=f"shape {entry.shape}, {entry.dtype}",
                got=f"shape {tuple(tensor.shape)}, {tensor.dtype}",
            )
        begin, end = self._put(tensor)
        offsets = (0,) * len(entry.shape)
        self._stored[name] = Stored(name, offsets, entry.shape, Path(self._file.name).name, begin, end - begin)

    @abstractmethod
    def _put(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Write one tensor; where in the file it begins and ends."""

    @abstractmethod
    def _end(self) -> None:
        """All tensors are there: write what is written after them, to the disk."""

    def finish(self) -> None:
        if missing := self._entries.keys() - self._stored.keys():
            raise CheckpointError("Not all tensors were written.", parameter=min(missing))
        self._end()
        self._file.close()
        put_in_place(self._here, self._path)

    def abort(self) -> None:
        self._file.close()
        shutil.rmtree(self._here, ignore_errors=True)
        remove_empty(self._made)


class CheckpointSink(FolderSink):
    """A checkpoint, as one rank saves it. See `FolderSink`.

    Args:
        path, entries: see `FolderSink`.
        values: what is not a tensor: `step`, `optimizer` (`param_groups`, `scalars`), `state`.
        ties: see `Source`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, Entry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}  # among the values
        optimizer = values.get("optimizer", {})
        told = {
            "optimizer": {
                "param_groups": to_json(optimizer.get("param_groups", []), GROUPS, self._tensors),
                "scalars": to_json(optimizer.get("scalars", {}), SCALARS, self._tensors),
            },
            "state": to_json(values.get("state", {}), "state", self._tensors),
        }
        entries = dict(entries) | {n: Entry(tuple(t.shape), t.dtype) for n, t in self._tensors.items()}
        super().__init__(path, entries, file_of(0))
        self._manifest = Manifest(
            step=int(values.get("step", 0)),
            world=1,
            time=time.time(),
            tensors=entries,
            ties=dict(ties or {}),
            values=told,
            ranks=[],
            files={},
            writer=versions(),
        )
        self._stream = Hashed(self._file)
        try:
            listed = {key_of(n, (0,) * len(one.shape), one.shape): shown(one) for n, one in entries.items()}
            self._stream.write(make_header(listed, {"format": "fullshard"})[0])
        except BaseException:
            self.abort()
            raise

    def _put(self, tensor: torch.Tensor) -> tuple[int, int]:
        begin = self._stream.tell()
        self._stream.write(bytes_of(tensor))
        return begin, self._stream.tell()

    def finish(self) -> None:
        for name, tensor in self._tensors.items():
            self.write(name, tensor)
        super().finish()

    def _end(self) -> None:
        self._stream.sync()
        self._manifest.files[file_of(0)] = self._stream.facts()
        self._manifest.stored.update({name: [part] for name, part in self._stored.items()})
        write_synced(self._here / MANIFEST, self._manifest.text())
