"""Writes folders of `torch.distributed.checkpoint` (DCP): records of `torch.save`, and `.metadata`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Mapping
from pathlib import Path
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
from ..in_place import new_folder, sync, write_synced
from ..names import MODEL, OPTIMIZER, TensorEntry, state_path
from ..storage import METADATA

_FILE = "__0_0.distcp"


def write_dcp(
    path: Path,
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, Any],
    ties: Mapping[str, str],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a DCP folder with one nested state dict: `model`, `optimizer` as PyTorch programs save it, and values.

    Args:
        path, entries, read: see `write_checkpoint`.
        values: everything else: `optimizer` (`param_groups`, `scalars`), `state`, and others by name.
        ties: see `Source`. DCP has no ties: both names refer to the same bytes.
    """
    groups = values.get("optimizer", {}).get("param_groups", [])
    parameters = {name for group in groups for name in group["params"]}
    names: dict[str, list[str]] = {name: [name] for name in entries}
    for alias, first in ties.items():
        names[first].append(alias)
    descriptions: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    places: dict[MetadataIndex, Any] = {}
    with new_folder(path) as folder:
        with (folder / _FILE).open("xb") as file:
            for name, entry in entries.items():
                begin, corner = file.tell(), torch.Size((0,) * len(entry.shape))
                torch.save(_alone(entry.checked(name, read(name))), file)
                chunk = ChunkStorageMetadata(corner, torch.Size(entry.shape))
                for alias in names[name]:
                    properties = TensorProperties(dtype=entry.dtype)
                    descriptions[alias] = TensorStorageMetadata(properties, torch.Size(entry.shape), [chunk])
                    places[MetadataIndex(alias, corner)] = StorageInfo(_FILE, begin, file.tell() - begin)
                    paths[alias] = _path_of(alias, parameters)
            for value_path, value in _by_path(values).items():
                name, begin = ".".join(map(str, value_path)), file.tell()
                torch.save(value, file)
                paths[name], descriptions[name] = value_path, BytesStorageMetadata()
                places[MetadataIndex(name)] = StorageInfo(_FILE, begin, file.tell() - begin)
            file.flush()
            sync(folder / _FILE)
        metadata = Metadata(state_dict_metadata=descriptions, planner_data=paths, storage_data=places)
        metadata.version = CURRENT_DCP_VERSION
        write_synced(folder / METADATA, pickle.dumps(metadata))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a storage of its own, as `torch.save` writes whole storages."""
    contiguous = tensor.detach().contiguous()
    return contiguous if contiguous.untyped_storage().nbytes() == contiguous.nbytes else contiguous.clone()


def _path_of(name: str, parameters: Container[str]) -> tuple[Any, ...]:
    """The path of a tensor in the nested state dict."""
    if name.startswith(MODEL):
        return "model", name.removeprefix(MODEL)
    path = state_path(name, parameters) if name.startswith(OPTIMIZER) else None
    return (name,) if path is None else ("optimizer", "state", *path)


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
