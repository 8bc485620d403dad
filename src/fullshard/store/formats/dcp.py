"""Folders of `torch.distributed.checkpoint` (DCP), for its readers: records of `torch.save`, and `.metadata`."""

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
from ..metadata import NAME as METADATA
from ..source import MODEL, OPTIMIZER, Entry, state_path
from .own import FolderSink

_FILE = "__0_0.distcp"


class DcpSink(FolderSink):
    """A folder of DCP's, of one nested state dict: `model`, `optimizer` as PyTorch's programs have it, and values.

    Args:
        path, entries: see `FolderSink`.
        values: what is not a tensor: `optimizer` (`param_groups`, `scalars`), `state`, and others by name.
        ties: see `Source`. DCP has no ties: both names have one place.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, Entry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, entries, _FILE)
        self._values, self._ties = _by_path(values), dict(ties or {})
        groups = values.get("optimizer", {}).get("param_groups", [])
        self._parameters = {name for group in groups for name in group["params"]}

    def _put(self, tensor: torch.Tensor) -> tuple[int, int]:
        whole = tensor.detach().contiguous()
        if whole.untyped_storage().nbytes() != whole.numel() * whole.element_size():
            whole = whole.clone()  # `torch.save` writes whole storages
        return self._save(whole)

    def _save(self, value: Any) -> tuple[int, int]:
        begin = self._file.tell()
        torch.save(value, self._file)
        return begin, self._file.tell()

    def _path_of(self, name: str) -> tuple[Any, ...]:
        """The keys that lead to a tensor in the nested state dict."""
        if name.startswith(MODEL):
            return "model", name.removeprefix(MODEL)
        path = state_path(name, self._parameters) if name.startswith(OPTIMIZER) else None
        return (name,) if path is None else ("optimizer", "state", *path)

    def _end(self) -> None:
        listed: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        paths = {name: self._path_of(name) for name in (*self._entries, *self._ties)}
        for name in paths:
            part = self._stored[self._ties.get(name, name)]
            entry, corner = self._entries[part.name], torch.Size(part.offsets)
            chunk = ChunkStorageMetadata(corner, torch.Size(part.sizes))
            listed[name] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), [chunk])
            places[MetadataIndex(name, corner)] = StorageInfo(_FILE, part.begin, part.nbytes)
        for path, value in self._values.items():
            name = ".".join(map(str, path))
            begin, end = self._save(value)
            paths[name], listed[name] = path, BytesStorageMetadata()
            places[MetadataIndex(name)] = StorageInfo(_FILE, begin, end - begin)
        self._file.flush()
        sync(self._here / _FILE)
        metadata = Metadata(state_dict_metadata=listed, planner_data=paths, storage_data=places)
        metadata.version = CURRENT_DCP_VERSION
        write_synced(self._here / METADATA, pickle.dumps(metadata))


def _by_path(values: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Values by the keys that lead to them in the nested state dict: settings of optimizers one by one."""
    optimizer = values.get("optimizer", {})
    found: dict[tuple[Any, ...], Any] = {
        ("optimizer", "param_groups", number, key): value
        for number, group in enumerate(optimizer.get("param_groups", []))
        for key, value in group.items()
    }
    for parameter, own in optimizer.get("scalars", {}).items():
        found |= {("optimizer", "state", parameter, key): value for key, value in own.items()}
    for key, value in values.get("state", {}).items():  # what modules add to a state dict is with the model
        found[("model", key.removeprefix(MODEL)) if key.startswith(MODEL) else (key,)] = value
    return found | {(key,): value for key, value in values.items() if key not in ("optimizer", "state")}
