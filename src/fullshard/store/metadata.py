"""Reads DCP's `.metadata` without executing it: which file contains which part of which tensor.

The file is a pickle. It may name only the classes of DCP's metadata; anything else is refused by name.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import CheckpointError, DamagedCheckpointError
from .manifest import inside, without_collection
from .pickles import read_pickle
from .source import MODEL_KEYS, MOST_NAME, OPTIMIZER_KEYS, Entry, checked_name, checked_shape
from .storage import Stored, check_parts, checked_part

_T = TypeVar("_T")


@dataclass(frozen=True)
class Index:
    """Where everything in a checkpoint is stored.

    Attributes:
        entries: tensors, by name.
        stored: their rectangles, by name.
        values: records of values that are not tensors, by name.
        paths: for each name, its keys in the nested state dict that was saved.
    """

    entries: dict[str, Entry]
    stored: dict[str, list[Stored]]
    values: dict[str, Stored]
    paths: dict[str, tuple[Any, ...]]


class _Record:
    """An instance of a class that metadata names: the attributes in the pickle, and no code of the class."""

    def __init__(self, *arguments: Any) -> None:
        """Arguments of enums and paths, which are not needed."""


class _Properties(_Record):
    """The properties of a tensor, of which only the dtype is needed."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    *((f"{_DCP}metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}metadata", f"{name}Metadata") for name in ("TensorStorage", "BytesStorage", "ChunkStorage")),
    (f"{_DCP}metadata", "TensorProperties"),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath", "Path")),
}
"""The classes and functions that metadata may name, by module and name: each becomes a class of `_Record`s."""


def _find_class(module: str, name: str) -> Any:
    """A new class for a name in `_RECORDS`, so that a pickle that sets its attributes changes nothing else."""
    if (module, name) in _RECORDS:
        return type(name, (_Properties if name == "TensorProperties" else _Record,), {})
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    value = vars(torch).get(name) if module == "torch" else None  # `getattr` would import submodules
    if value is torch.Size or isinstance(value, torch.dtype):
        return value
    raise CheckpointError(
        "A checkpoint's metadata names something that is not metadata; nothing was executed.",
        expected="the classes of torch.distributed.checkpoint.metadata",
        got=f"{module}.{name}",
        remedy="do not load this checkpoint by any means: it was crafted to run code",
        topic="not-plain-values",
    )


def _kind(value: Any) -> str:
    """The name of the class that a `_Record` stands for; that of any other value's class."""
    return type(value).__name__


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
        metadata = read_pickle(data, functools.cache(_find_class))  # one class for a name, however often it occurs
        if _kind(metadata) != "Metadata":
            raise TypeError(f"a {_kind(metadata)}")
        return _index(metadata, sizes)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(
            "A checkpoint's metadata cannot be read: it is damaged.",
            got=f"{where}: {type(error).__name__}: {str(error)[:200]}",
        ) from error


def _index(metadata: Any, sizes: dict[str, int]) -> Index:
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for key, info in (getattr(metadata, "storage_data", None) or {}).items():
        if _kind(info) != "_StorageInfo" or getattr(info, "transform_descriptors", None):
            raise ValueError("an unknown kind of storage, such as compressed")
        begin, nbytes = int(info.offset), int(info.length)
        file = inside(info.relative_path)
        if begin < 0 or nbytes < 0:
            raise ValueError(f"a record at {begin} of {nbytes} bytes")
        if file not in sizes:
            raise DamagedCheckpointError("A file of a checkpoint is missing.", got=file, parameter=str(key.fqn))
        if begin + nbytes > sizes[file]:
            raise DamagedCheckpointError(
                "A file of a checkpoint is truncated.",
                parameter=str(key.fqn),
                expected=f"{file} of at least {begin + nbytes} bytes",
                got=f"{sizes[file]}",
            )
        places[checked_name(key.fqn), tuple(getattr(key, "offset", None) or ())] = (file, begin, nbytes)
    entries: dict[str, Entry] = {}
    stored: dict[str, list[Stored]] = {}
    values: dict[str, Stored] = {}
    total = sum(sizes.values())
    for name, facts in metadata.state_dict_metadata.items():
        if _kind(facts) == "BytesStorageMetadata":
            if (name, ()) in places:
                values[name] = Stored(name, (), (), *places[name, ()])
        elif _kind(facts) == "TensorStorageMetadata":
            dtype = facts.properties.dtype
            if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                raise TypeError(f"a tensor {str(name)[:100]!r} of {dtype!r}")
            entries[checked_name(name)] = Entry(checked_shape(name, facts.size), dtype)
            stored[name] = [_stored(name, entries[name], chunk, places) for chunk in facts.chunks]
            check_parts(name, entries[name], stored[name], total)
        else:
            raise TypeError(f"{_kind(facts)} of {name!r}")
    paths = {checked_name(name): tuple(path) for name, path in (getattr(metadata, "planner_data", None) or {}).items()}
    if any(not isinstance(key, (str, int)) or len(str(key)) > MOST_NAME for path in paths.values() for key in path):
        raise TypeError("a path with a key that is not a short name or a number")
    return _under_our_keys(Index(entries, stored, values, paths))


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


def _stored(name: str, entry: Entry, chunk: Any, places: dict[Any, Any]) -> Stored:
    offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
    return checked_part(name, entry, offsets, sizes, *places[name, offsets])
