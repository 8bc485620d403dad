"""Reads DCP's `.metadata` without executing it: which file contains which part of which tensor.

The file is a pickle. It may name only the classes of DCP's metadata; anything else is refused by name.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from ..errors import CheckpointError, DamagedCheckpointError
from ..torch_private.dcp_files import NAMED_IN_METADATA, StorageInfo
from .manifest import inside, without_collection
from .pickles import read_pickle
from .source import MOST_NAME, Entry, checked_name, checked_shape
from .storage import Stored, check_parts, checked_part

NAME = ".metadata"


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


def _find_class(module: str, name: str) -> Any:
    """The class or function of this name, if metadata may name it."""
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "Path"):
        return _path_text
    try:
        return NAMED_IN_METADATA[module, name]
    except KeyError:
        raise CheckpointError(
            "A checkpoint's metadata names something that is not metadata; nothing was executed.",
            expected="the classes of torch.distributed.checkpoint.metadata",
            got=f"{module}.{name}",
            remedy="do not load this checkpoint by any means: it was crafted to run code",
            topic="not-plain-values",
        ) from None


def _isolated(original: Any) -> Any:
    """An equivalent class or function with its own attributes, so that a pickle cannot change the original."""
    if isinstance(original, type) and original.__flags__ & _MUTABLE and not issubclass(original, Enum):
        return type(original.__name__, (original,), {})
    if isinstance(original, FunctionType) or (isinstance(original, type) and issubclass(original, Enum)):
        return partial(original)
    return original


_MUTABLE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes whose attributes can be set


def _path_text(*parts: Any) -> str:
    """Stands in for a path, which says where the checkpoint was written and is not needed."""
    return "/".join(map(str, parts))


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
        find = functools.cache(lambda module, name: _isolated(_find_class(module, name)))  # the same class every time
        metadata = read_pickle(data, find)
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        return _index(metadata, sizes)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(
            "A checkpoint's metadata cannot be read: it is damaged.",
            got=f"{where}: {type(error).__name__}: {str(error)[:200]}",
        ) from error


def _index(metadata: Metadata, sizes: dict[str, int]) -> Index:
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for key, info in (metadata.storage_data or {}).items():
        if not isinstance(info, StorageInfo) or getattr(info, "transform_descriptors", None):
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
        places[checked_name(key.fqn), tuple(key.offset or ())] = (file, begin, nbytes)
    entries: dict[str, Entry] = {}
    stored: dict[str, list[Stored]] = {}
    values: dict[str, Stored] = {}
    total = sum(sizes.values())
    for name, facts in metadata.state_dict_metadata.items():
        if isinstance(facts, BytesStorageMetadata):
            if (name, ()) in places:
                values[name] = Stored(name, (), (), *places[name, ()])
        elif isinstance(facts, TensorStorageMetadata):
            dtype = facts.properties.dtype
            if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                raise TypeError(f"a tensor {str(name)[:100]!r} of {dtype!r}")
            entries[checked_name(name)] = Entry(checked_shape(name, facts.size), dtype)
            stored[name] = [_stored(name, entries[name], chunk, places) for chunk in facts.chunks]
            check_parts(name, entries[name], stored[name], total)
        else:
            raise TypeError(f"{type(facts).__name__} of {name!r}")
    paths = {checked_name(name): tuple(path) for name, path in (metadata.planner_data or {}).items()}
    if any(not isinstance(key, (str, int)) or len(str(key)) > MOST_NAME for path in paths.values() for key in path):
        raise TypeError("a path that is not of names and numbers")
    return Index(entries, stored, values, paths)


def _stored(name: str, entry: Entry, chunk: Any, places: dict[Any, Any]) -> Stored:
    offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
    return checked_part(name, entry, offsets, sizes, *places[name, offsets])
