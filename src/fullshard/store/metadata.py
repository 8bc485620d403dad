"""Reads DCP's `.metadata` without executing it: which file contains which part of which tensor.

The file is a pickle (`pickles.py`). It may name only the classes of DCP's metadata; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import CheckpointError, DamagedCheckpointError
from .manifest import inside, without_collection
from .names import MODEL_KEYS, MOST_NAME, OPTIMIZER_KEYS, TensorEntry, checked_name, checked_shape
from .pickles import PLAIN_KEYS, PickledCall, named, read_pickle
from .storage import Stored, check_parts, checked_part

_T = TypeVar("_T")
_MOST_KEYS = 100  # in the path of a value: one path can belong to any number of values


@dataclass(frozen=True)
class Index:
    """Where everything in a checkpoint is stored.

    Attributes:
        entries: tensors, by name.
        stored: their rectangles, by name.
        values: records of values that are not tensors, by name.
        paths: for each name, its keys in the nested state dict that was saved.
    """

    entries: dict[str, TensorEntry]
    stored: dict[str, list[Stored]]
    values: dict[str, Stored]
    paths: dict[str, tuple[Any, ...]]


_DCP = "torch.distributed.checkpoint."
_NAMES = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    *((f"{_DCP}metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}metadata", f"{name}Metadata") for name in ("TensorStorage", "BytesStorage", "ChunkStorage")),
    (f"{_DCP}metadata", "TensorProperties"),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
}
"""The classes and functions that metadata may name, by module and name; and dtypes."""


def _find_class(module: str, name: str) -> Any:
    value = named(module, name)
    if (module, name) in _NAMES or isinstance(value, torch.dtype):
        return value
    raise CheckpointError(
        "A checkpoint's metadata names something that is not metadata; nothing was executed.",
        expected="the classes of torch.distributed.checkpoint.metadata",
        got=f"{module}.{name}",
        remedy="do not load this checkpoint by any means: it was crafted to run code",
        topic="not-plain-values",
    )


def _kind(value: Any) -> str:
    """The name of the class of an instance in the pickle; that of any other value's class."""
    return value.name.rpartition(".")[2] if isinstance(value, PickledCall) else type(value).__name__


@without_collection()
def read_index(data: bytes, sizes: dict[str, int], where: str) -> Index:
    """Parse the bytes of `.metadata`.

    Args:
        sizes: of the files, in bytes.
        where: the file, for error messages.

    Raises:
        CheckpointError: it is damaged or inconsistent, or names something other than metadata.
    """
    try:
        metadata = read_pickle(data, _find_class, keys=PLAIN_KEYS | {PickledCall})
        if _kind(metadata) != "Metadata":
            raise TypeError(f"a {_kind(metadata)}")
        return _index(metadata.attributes, sizes)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(
            "A checkpoint's metadata cannot be read: it is damaged.",
            got=f"{where}: {type(error).__name__}: {str(error)[:200]}",
        ) from error


def _index(metadata: Mapping[str, Any], sizes: dict[str, int]) -> Index:
    places = _places(metadata.get("storage_data") or {}, sizes)
    entries: dict[str, TensorEntry] = {}
    stored: dict[str, list[Stored]] = {}
    values: dict[str, Stored] = {}
    total, parts = sum(sizes.values()), 0
    for name, facts in metadata["state_dict_metadata"].items():
        if _kind(facts) == "BytesStorageMetadata":
            if (name, ()) in places:
                values[name] = Stored(name, (), (), *places[name, ()])
        elif _kind(facts) == "TensorStorageMetadata":
            of_tensor = facts.attributes
            dtype = of_tensor["properties"].state[0]
            if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                raise TypeError(f"a tensor {str(name)[:100]!r} of a dtype that is a {type(dtype).__name__}")
            parts += len(of_tensor["chunks"])
            if parts > len(places):  # one list can belong to any number of tensors
                raise ValueError(f"at least {parts} parts in {len(places)} records")
            entries[checked_name(name)] = TensorEntry(checked_shape(name, of_tensor["size"]), dtype)
            stored[name] = [_stored(name, entries[name], chunk, places) for chunk in of_tensor["chunks"]]
            check_parts(name, entries[name], stored[name], total)
        else:
            raise TypeError(f"{_kind(facts)} of {name!r}")
    paths = {checked_name(name): _path(path) for name, path in (metadata.get("planner_data") or {}).items()}
    return _under_our_keys(Index(entries, stored, values, paths))


def _places(storage_data: Mapping[Any, Any], sizes: dict[str, int]) -> dict[tuple[str, tuple[int, ...]], Any]:
    """The file, position and size of each record, by the name and the first index of what it holds."""
    places = {}
    for index, info in storage_data.items():
        if _kind(info) != "_StorageInfo" or info.attributes.get("transform_descriptors"):
            raise ValueError("an unknown kind of storage, such as compressed")
        record, key = info.attributes, index.attributes
        begin, nbytes, name, file = int(record["offset"]), int(record["length"]), key["fqn"], record["relative_path"]
        if type(file) is not str or file not in sizes:
            file = inside(file)
        if begin < 0 or nbytes < 0:
            raise ValueError(f"a record at {begin} of {nbytes} bytes")
        if file not in sizes:
            raise DamagedCheckpointError("A file of a checkpoint is missing.", got=file, parameter=name)
        if begin + nbytes > sizes[file]:
            raise DamagedCheckpointError(
                "A file of a checkpoint is truncated.",
                parameter=name,
                expected=f"{file} of at least {begin + nbytes} bytes",
                got=f"{sizes[file]}",
            )
        places[checked_name(name), tuple(map(int, key.get("offset") or ()))] = (file, begin, nbytes)
    return places


def _path(keys: Sequence[Any]) -> tuple[str | int, ...]:
    if len(keys) > _MOST_KEYS or any(type(key) not in (str, int) or len(str(key)) > MOST_NAME for key in keys):
        raise TypeError("a path with a key that is not a short name or a number, or too many keys")
    return tuple(keys)


def _under_our_keys(index: Index) -> Index:
    """Rename the model and its optimizer to "model" and "optimizer", if they are under other usual keys.

    {"app": {"model": ..., "optim": ...}} is the form of PyTorch's tutorial. Several optimizers keep their keys.
    """
    starts = [(path[: at + 1], path[at + 1]) for path in index.paths.values() for at in (0, 1) if len(path) > at + 1]
    optimizers = {
        start
        for start, key in starts
        if start[-1] in OPTIMIZER_KEYS and str(key).partition(".")[0] in ("state", "param_groups")
    }
    if len(optimizers) > 1:
        return index
    beside = next(iter(optimizers), ("",))[:-1]
    models = {start for start, _ in starts if start[-1] in MODEL_KEYS and start[:-1] == beside}
    keys = dict.fromkeys(optimizers, "optimizer") | (dict.fromkeys(models, "model") if len(models) == 1 else {})
    paths = dict(index.paths)
    for name, path in index.paths.items():
        for start, key in keys.items():
            if path[: len(start)] == start:
                paths[name] = (key, *path[len(start) :])
    names = {name: ".".join(map(str, path)) for name, path in paths.items() if path != index.paths[name]}
    if len({*names.values()}) < len(names) or not {*names.values()}.isdisjoint([*index.entries, *index.values]):
        return index

    def renamed(by_name: dict[str, _T]) -> dict[str, _T]:
        return {names.get(name, name): value for name, value in by_name.items()}

    return Index(renamed(index.entries), renamed(index.stored), renamed(index.values), renamed(paths))


def _stored(name: str, entry: TensorEntry, chunk: Any, places: dict[Any, Any]) -> Stored:
    offsets, sizes = (tuple(map(int, chunk.attributes[key])) for key in ("offsets", "sizes"))
    return checked_part(name, entry, offsets, sizes, *places[name, offsets])
