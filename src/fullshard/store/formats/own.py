"""Folders of checkpoints: reads and writes Fullshard's own, and reads those of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError
from ..folder import Folder
from ..hashed import Hashed
from ..in_place import make_folders, put_in_place, remove_empty, write_synced
from ..manifest import Manifest, versions
from ..plan import GROUPS, SCALARS
from ..read import Files
from ..source import MODEL, OPTIMIZER, Sink, Source, TensorEntry
from ..storage import MANIFEST, LocalStorage, Stored
from ..tree import from_json, to_json
from ..write import bytes_of, file_of, header_of
from .state import put_nested


def storage_at(path: str | os.PathLike[str]) -> LocalStorage:
    """The files of a checkpoint of Fullshard or DCP; in a folder of several checkpoints, those of the newest.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    folder = Folder(path)
    name = folder.newest()
    if name is None:
        raise CheckpointError(f"{path} has no complete checkpoint.", expected="a folder with the files of a checkpoint")
    return LocalStorage(folder.at(name))


class CheckpointSource(Source):
    """A checkpoint of Fullshard or DCP. See `Source`.

    Args:
        path: a checkpoint; or a folder of Fullshard's checkpoints, of which the newest is read.
        hashes: see `Files`.

    Attributes:
        files: the checkpoint's files.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], hashes: bool = True) -> None:
        self.files = Files(storage_at(path), hashes)
        index, manifest = self.files.index, self.files.manifest
        prefixes = (MODEL, OPTIMIZER)
        self._prefix = "" if any(n.startswith(prefixes) for n in index.entries) else MODEL
        self.ties = {self._prefix + name: self._prefix + first for name, first in manifest.ties.items()}
        if self.files.is_foreign:
            self.entries = {self._prefix + n: entry for n, entry in index.entries.items()}
            self.values = self._nested()
        else:
            self.entries = {n: e for n, e in index.entries.items() if n.startswith(prefixes) and n not in manifest.ties}
            ranks = [from_json(v, partial(self.files.read_of_rank, r)) for r, v in enumerate(manifest.ranks)]
            self.values = {"step": manifest.step, **from_json(manifest.values, self.files.read)}
            self.values |= {"ranks": ranks} if ranks else {}

    def _nested(self) -> dict[str, Any]:
        """The values of a DCP checkpoint, as in `Source.values`."""
        state: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        values: dict[str, Any] = {"state": state, "optimizer": optimizer}
        for name in self.files.index.values:
            path = tuple(map(str, self.files.index.paths.get(name, (name,))))
            if path[0] == "optimizer" and len(path) > 1:
                if path[1].partition(".")[0] == "param_groups":
                    continue
                keys = ["scalars", *path[2:]] if path[1] == "state" else path[1:]
                put_nested(optimizer, keys, self.files.value(name))
            elif path[0] == "model" and len(path) > 1:
                state[".".join(path)] = self.files.value(name)
            else:
                put_nested(values if path == ("step",) else state, path, self.files.value(name))
        if groups := self.files.groups(self.files.read):
            optimizer["param_groups"] = groups
        return values

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return self.files.read(name.removeprefix(self._prefix), offsets, sizes)

    def files_of(self, name: str) -> list[str]:
        return self.files.files_of(name.removeprefix(self._prefix))

    def close(self) -> None:
        self.files.close()


class FolderSink(Sink):
    """A folder, written under a temporary name and renamed to its path. See `Sink`.

    Args:
        path: the folder, which must not exist.
        entries: all tensors.

    Attributes:
        folder: the temporary folder; all files in it become part of the checkpoint.

    Raises:
        CheckpointError: the path exists.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(entries)
        self._path = Path(path).absolute()
        self._refuse_existing()
        self.folder = self._path.with_name(f".{self._path.name}.saving-{secrets.token_hex(4)}")
        self._created_folders = make_folders(self.folder)

    def _refuse_existing(self) -> None:
        if self._path.exists():
            raise CheckpointError("The path of a new checkpoint already exists.", got=str(self._path))

    def finish(self) -> None:
        super().finish()
        self._refuse_existing()
        put_in_place(self.folder, self._path)

    def abort(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_empty(self._created_folders)


class OneFileSink(FolderSink):
    """A folder in which one file contains all tensors, in order. See `FolderSink`.

    Args:
        path, entries: see `FolderSink`.
        file: the name of the file.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Mapping[str, TensorEntry], file: str) -> None:
        super().__init__(path, entries)
        self._stored: dict[str, Stored] = {}
        try:
            self._file: IO[bytes] = (self.folder / file).open("xb")
        except BaseException:
            super().abort()
            raise

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        begin, shape = self._file.tell(), tuple(tensor.shape)
        self._append(tensor)
        nbytes = self._file.tell() - begin
        self._stored[name] = Stored(name, (0,) * len(shape), shape, Path(self._file.name).name, begin, nbytes)

    @abstractmethod
    def _append(self, tensor: torch.Tensor) -> None:
        """Write one tensor at the end of the file."""

    def finish(self) -> None:
        super().finish()
        self._file.close()

    def abort(self) -> None:
        self._file.close()
        super().abort()


class CheckpointSink(OneFileSink):
    """A Fullshard checkpoint, as saved with one rank. See `OneFileSink`.

    Args:
        path, entries: see `FolderSink`.
        values: everything else: `step`, `optimizer` (`param_groups`, `scalars`), `state`.
        ties: see `Source`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, TensorEntry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}  # the values' tensors
        optimizer = values.get("optimizer", {})
        values_as_json = {
            "optimizer": {
                "param_groups": to_json(optimizer.get("param_groups", []), GROUPS, self._tensors),
                "scalars": to_json(optimizer.get("scalars", {}), SCALARS, self._tensors),
            },
            "state": to_json(values.get("state", {}), "state", self._tensors),
        }
        entries = dict(entries) | {n: TensorEntry(tuple(t.shape), t.dtype) for n, t in self._tensors.items()}
        super().__init__(path, entries, file_of(0))
        self._manifest = Manifest(
            step=int(values.get("step", 0)),
            world=1,
            time=time.time(),
            tensors=entries,
            ties=dict(ties or {}),
            values=values_as_json,
            ranks=[],
            files={},
            writer=versions(),
        )
        self._stream = Hashed(self._file)
        try:
            self._stream.write(header_of((n, (0,) * len(e.shape), e) for n, e in entries.items()))
        except BaseException:
            self.abort()
            raise

    def _append(self, tensor: torch.Tensor) -> None:
        self._stream.write(bytes_of(tensor))

    def finish(self) -> None:
        for name, tensor in self._tensors.items():
            self.write(name, tensor)
        super().finish()

    def _end(self) -> None:
        self._stream.sync()
        self._manifest.files[file_of(0)] = self._stream.facts()
        self._manifest.stored.update({name: [part] for name, part in self._stored.items()})
        write_synced(self.folder / MANIFEST, self._manifest.text())
