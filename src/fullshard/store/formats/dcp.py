"""Writes folders of `torch.distributed.checkpoint` (DCP): records of `torch.save`, and `.metadata`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...torch_private.dcp_files import CURRENT_DCP_VERSION, StorageInfo
from ..in_place import sync, write_synced
from ..source import MODEL, OPTIMIZER, TensorEntry, state_path
from ..storage import METADATA
from .own import OneFileSink

_FILE = "__0_0.distcp"


class DcpSink(OneFileSink):
    """A DCP folder with one nested state dict: `model`, `optimizer` as PyTorch programs save it, and values.

    Args:
        path, entries: see `FolderSink`.
        values: everything else: `optimizer` (`param_groups`, `scalars`), `state`, and others by name.
        ties: see `Source`. DCP has no ties: both names refer to the same bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, TensorEntry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, entries, _FILE)
        self._entries = dict(entries)
        self._values, self._ties = _by_path(values), dict(ties or {})
        groups = values.get("optimizer", {}).get("param_groups", [])
        self._parameters = {name for group in groups for name in group["params"]}

    def _append(self, tensor: torch.Tensor) -> None:
        contiguous = tensor.detach().contiguous()
        if contiguous.untyped_storage().nbytes() != contiguous.nbytes:
            contiguous = contiguous.clone()  # `torch.save` writes whole storages
        torch.save(contiguous, self._file)

    def _path_of(self, name: str) -> tuple[Any, ...]:
        """The path of a tensor in the nested state dict."""
        if name.startswith(MODEL):
            return "model", name.removeprefix(MODEL)
        path = state_path(name, self._parameters) if name.startswith(OPTIMIZER) else None
        return (name,) if path is None else ("optimizer", "state", *path)

    def _end(self) -> None:
        descriptions: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        paths = {name: self._path_of(name) for name in (*self._entries, *self._ties)}
        for name in paths:
            part = self._stored[self._ties.get(name, name)]
            entry, corner = self._entries[part.name], torch.Size(part.offsets)
            chunk = ChunkStorageMetadata(corner, torch.Size(part.sizes))
            properties = TensorProperties(dtype=entry.dtype)
            descriptions[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [chunk])
            places[MetadataIndex(name, corner)] = StorageInfo(_FILE, part.begin, part.nbytes)
        for path, value in self._values.items():
            name = ".".join(map(str, path))
            begin = self._file.tell()
            torch.save(value, self._file)
            paths[name], descriptions[name] = path, BytesStorageMetadata()
            places[MetadataIndex(name)] = StorageInfo(_FILE, begin, self._file.tell() - begin)
        self._file.flush()
        sync(self.folder / _FILE)
        metadata = Metadata(state_dict_metadata=descriptions, planner_data=paths, storage_data=places)
        metadata.version = CURRENT_DCP_VERSION
        write_synced(self.folder / METADATA, pickle.dumps(metadata))


def _by_path(values: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Values by their paths in the nested state dict. Each optimizer setting is a value."""
    optimizer = values.get("optimizer", {})
    by_path: dict[tuple[Any, ...], Any] = {
        ("optimizer", "param_groups", number, key): value
        for number, group in enumerate(optimizer.get("param_groups", []))
        for key, value in group.items()
    }
    for parameter, scalars in optimizer.get("scalars", {}).items():
        by_path |= {("optimizer", "state", parameter, key): value for key, value in scalars.items()}
    for key, value in values.get("state", {}).items():  # modules' extra state belongs to the model
        by_path[("model", key.removeprefix(MODEL)) if key.startswith(MODEL) else (key,)] = value
    return by_path | {(key,): value for key, value in values.items() if key not in ("optimizer", "state")}
