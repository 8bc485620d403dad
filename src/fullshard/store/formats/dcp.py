"""Folders of `torch.distributed.checkpoint`: Fullshard's own, and those of any program that saves with it."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..folder import Folder
from ..hashed import Hashed
from ..in_place import make_folders, put_in_place, remove_empty, write_synced
from ..manifest import NAME as MANIFEST
from ..manifest import Manifest, versions
from ..piece import Piece, whole_piece
from ..plan import GROUPS, path_of
from ..read import Files, copies_for
from ..source import MODEL, OPTIMIZER, Entry, Sink, Source
from ..storage import LocalStorage, Stored
from ..tree import from_json, to_json
from ..write import LocalWriter, RecordWriter, metadata_of


class DcpSource(Source):
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
        """What is no tensor, nested as it was saved."""
        found: dict[str, Any] = {}
        for name in self.files.index.values:
            *outer, last = self.files.index.paths.get(name, (name,))
            place = found
            for key in outer:
                place = place.setdefault(str(key), {})
            place[str(last)] = self.files.value(name)
        if groups := self.files.groups(self._tensor):
            own = found.get("optimizer", {})
            found["optimizer"] = {key: own[key] for key in own if not str(key).startswith("param_groups.")}
            found["optimizer"]["param_groups"] = groups
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


class DcpSink(Sink):
    """A checkpoint folder, as Fullshard writes them. See `Sink`.

    Args:
        path: the folder, which must not be there.
        entries: all tensors.
        values: what is not a tensor: `step`, `optimizer` (`param_groups`, `scalars`), `state`.
        ties: see `Source`.

    Raises:
        CheckpointError: something is there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, Entry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._path = Path(path).absolute()
        if self._path.exists():
            raise CheckpointError("There is something where a checkpoint is to be written.", got=str(self._path))
        self._entries, self._values, self._ties = dict(entries), dict(values), dict(ties or {})
        self._here = self._path.with_name(f"{self._path.name}.saving-{secrets.token_hex(4)}")
        self._made = make_folders(self._here)
        try:
            self._writer = LocalWriter(self._here)
            self._file = (self._here / "__0_0.distcp").open("wb")
        except BaseException:
            remove_empty(self._made)
            raise
        self._stream = Hashed(self._file)
        self._records = RecordWriter(self._stream, "__0_0.distcp")
        self._stored: list[Stored] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            raise CheckpointError(
                "A tensor is not what was announced.",
                parameter=name,
                expected=f"shape {entry.shape}, {entry.dtype}",
                got=f"shape {tuple(tensor.shape)}, {tensor.dtype}",
            )
        self._stored.append(self._records.piece(whole_piece(name, tensor, True)))

    def finish(self) -> None:
        optimizer = self._values.get("optimizer", {})
        groups = optimizer.get("param_groups", [])
        tensors: dict[str, torch.Tensor] = {}
        told = {
            "optimizer": {
                "param_groups": to_json(groups, GROUPS, tensors),
                "scalars": to_json(optimizer.get("scalars", {}), OPTIMIZER, {}),
            },
            "state": to_json(self._values.get("state", {}), "state", tensors),
        }
        for name, tensor in tensors.items():
            self._entries[name] = Entry(tuple(tensor.shape), tensor.dtype)
            self.write(name, tensor)
        for g, group in enumerate(groups):
            for key, value in group.items():
                if not isinstance(value, torch.Tensor):
                    self._stored.append(self._records.value(f"{GROUPS}.{g}.{key}", value))
        missing = self._entries.keys() - {one.name for one in self._stored}
        if missing:
            raise CheckpointError("Not all tensors were written.", parameter=min(missing))
        self._stream.sync()
        self._file.close()
        self._end(told)

    def _end(self, told: dict[str, Any]) -> None:
        parameters = {name.removeprefix(MODEL) for name in self._entries if name.startswith(MODEL)}
        paths = {name: path_of(name, parameters) for name in (*(one.name for one in self._stored), *self._ties)}
        self._writer.facts = {"__0_0.distcp": self._stream.facts()}
        self._writer.write_metadata(metadata_of(self._entries, self._stored, paths, self._ties))
        manifest = Manifest(
            step=int(self._values.get("step", 0)),
            world=1,
            time=time.time(),
            tensors=self._entries,
            ties=self._ties,
            values=told,
            ranks=[],
            files=self._writer.facts,
            writer=versions(),
        )
        write_synced(self._here / MANIFEST, manifest.text())
        put_in_place(self._here, self._path)

    def abort(self) -> None:
        self._file.close()
        shutil.rmtree(self._here, ignore_errors=True)
        remove_empty(self._made)
