"""Folders of checkpoints: reads and writes Fullshard's own, and reads those of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..folder import Folder
from ..in_place import new_folder, write_synced
from ..manifest import Manifest, versions
from ..names import MODEL, OPTIMIZER, TensorEntry, refuse_long
from ..plan import optimizer_json
from ..read import Files
from ..storage import MANIFEST, LocalStorage
from ..tree import from_json, to_json
from ..write import file_of, write_file
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


class CheckpointSource(Files):
    """A checkpoint of Fullshard or DCP. See `Source`: names begin with `model.`, and ties are apart.

    Args:
        path: a checkpoint; or a folder of Fullshard's checkpoints, of which the newest is read.
        hashes: see `Files`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], hashes: bool = True) -> None:
        super().__init__(storage_at(path), hashes)

    def _open(self) -> None:
        super()._open()
        manifest, prefixes = self.manifest, (MODEL, OPTIMIZER)
        if self.is_foreign:
            self.values = self._nested()
        else:
            ranks = [from_json(v, partial(self.read_of_rank, r)) for r, v in enumerate(manifest.ranks)]
            self.values = {"step": manifest.step, **from_json(manifest.values, self.read)}
            self.values |= {"ranks": ranks} if ranks else {}
        prefix = "" if any(name.startswith(prefixes) for name in self.entries) else MODEL
        self.ties = {prefix + name: prefix + first for name, first in manifest.ties.items()}
        listed = [n for n in self.entries if self.is_foreign or (n.startswith(prefixes) and n not in self.ties)]
        self.entries = {prefix + name: self.entries[name] for name in listed}
        self.stored = {prefix + name: self.stored[name] for name in listed}

    def _nested(self) -> dict[str, Any]:
        """The values of a DCP checkpoint, as in `Source.values`."""
        state: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        values: dict[str, Any] = {"state": state, "optimizer": optimizer}
        for name in self.records:
            path = tuple(map(str, self.paths.get(name, (name,))))
            if path[0] == "optimizer" and len(path) > 1:
                if path[1].partition(".")[0] == "param_groups":
                    continue
                keys = ["scalars", *path[2:]] if path[1] == "state" else path[1:]
                put_nested(optimizer, keys, self.value(name))
            elif path[0] == "model" and len(path) > 1:
                state[".".join(path)] = self.value(name)
            else:
                put_nested(values if path == ("step",) else state, path, self.value(name))
        if groups := self.groups():
            optimizer["param_groups"] = groups
        return values


def write_checkpoint(
    path: Path,
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, Any],
    ties: Mapping[str, str],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a Fullshard checkpoint, as saved with one rank.

    Args:
        path: the folder; nothing exists there before all of it is complete.
        entries: all tensors, in the order in which they are written.
        values: everything else: `step`, `optimizer` (`param_groups`, `scalars`), `state`.
        ties: see `Source`.
        read: returns a tensor by name; called once for each, in their order.
    """
    tensors: dict[str, torch.Tensor] = {}  # the values'
    optimizer, file = values.get("optimizer", {}), file_of(0)
    as_json = {
        "optimizer": optimizer_json(optimizer.get("param_groups", []), optimizer.get("scalars", {}), tensors),
        "state": to_json(values.get("state", {}), "state", tensors),
    }
    all_entries = dict(entries) | {n: TensorEntry(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    refuse_long(all_entries)
    parts = [(name, (0,) * len(entry.shape), entry) for name, entry in all_entries.items()]
    in_order = (tensors[n] if n in tensors else entries[n].checked(n, read(n)) for n in all_entries)
    with new_folder(path) as folder:
        with (folder / file).open("xb") as below:
            written = write_file(below, file, parts, in_order)
        manifest = Manifest(
            step=int(values.get("step", 0)),
            world=1,
            time=time.time(),
            tensors=all_entries,
            ties=dict(ties),
            values=as_json,
            files=written.facts,
            stored={part.name: [part] for part in written.stored},
            writer=versions(),
        )
        write_synced(folder / MANIFEST, manifest.text())
