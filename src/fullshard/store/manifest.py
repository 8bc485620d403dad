"""`manifest.json`: everything in a checkpoint that is not a tensor, and the sizes and hashes of its files.

    {"sha256": hash of the bytes of the manifest below,
     "manifest": {
        "format": "fullshard", "version": 3, "writer": {"fullshard": "0.1.0", "torch": "2.13.0"},
        "step": 100, "world": 4, "time": 1790000000.0,
        "tensors": {"model.head.weight": {"shape": [5, 4], "dtype": "float32",
                                          "pieces": [[1, 840, 2, 0, 3, 4], ...]}, ...},
        "ties": {"model.head.weight": "model.embedding.weight"},
        "values": {"optimizer": {...}, "state": {...}},                       see tree.py
        "ranks": [{"rng": ...}, ...],                                          the same, for each rank
        "files": {"rank-0.safetensors": {"bytes": 4096, "xxh3_128": [a hash per 16 MiB of the file]}, ...}}}

A piece is a rectangle of a tensor: the number of its file, counted from 0 in the order of `files`; the byte at which
its elements begin, stored row by row; its first index on every dim; and its extent on every dim. The piece above is
rows 2 to 4. Hashes are `"sha256"` if the writer had no `xxhash`.

The manifest is written last: a checkpoint is complete if it has a valid manifest.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any

import torch

from ..dtypes import dtype_name
from ..errors import CheckpointError, DamagedCheckpointError
from ..version import VERSION as FULLSHARD
from .hashed import BLOCK, KINDS, FileFacts
from .names import COUNTS, TensorEntry, checked_name, checked_shape
from .storage import Stored, check_parts, checked_part
from .tree import dtype_named, unique_keys

VERSION = 3
_LATEST_TIME = 1e11  # seconds since 1970, the year 5138: a later time is damage
_START = re.compile(rb'\{"sha256":"[0-9a-f]{64}",\n"manifest":\{"step":\d+,"world":\d+,"time":([-+.e\d]{1,40}),')
_OUTER = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n"manifest":(.*)\}\n', re.DOTALL)


@dataclass(frozen=True)
class Manifest:
    """See the module's docstring; of a folder that another program wrote, it is empty.

    The first three fields must stay first in the file; see `time_in`.
    """

    step: int = 0
    world: int = 0
    time: float = 0.0
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ranks: list[Any] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)
    stored: dict[str, list[Stored]] = field(default_factory=dict)
    writer: dict[str, str] = field(default_factory=dict)

    def text(self) -> bytes:
        """The bytes of the file."""
        numbers = {file: number for number, file in enumerate(self.files)}
        tensors = {}
        for name, entry in self.tensors.items():
            pieces = [(numbers[part.file], part.begin, *part.offsets, *part.sizes) for part in self.stored[name]]
            tensors[name] = {"shape": entry.shape, "dtype": dtype_name(entry.dtype), "pieces": pieces}
        inner = {key: value for key, value in vars(self).items() if key != "stored"} | {
            "format": "fullshard",
            "version": VERSION,
            "tensors": tensors,
            "files": {k: {"bytes": f.nbytes, f.kind: list(f.hashes)} for k, f in self.files.items()},
        }
        body = json.dumps(inner, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(body.encode()).hexdigest()
        return f'{{"sha256":"{digest}",\n"manifest":{body}}}\n'.encode()


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause garbage collection: searching millions of live descriptions took two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collection()
def parse(data: bytes, where: str) -> Manifest:
    """Parse the bytes of a manifest.

    Args:
        where: the file, for error messages.

    Raises:
        DamagedCheckpointError: the manifest is damaged or inconsistent.
        CheckpointError: it is of a different version.
    """
    try:
        match = _OUTER.fullmatch(data)
        if match is None:
            raise ValueError("it does not begin and end like a manifest")
        if hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
            raise DamagedCheckpointError("A checkpoint's manifest is damaged: its hash does not match.", got=where)
        inner = json.loads(match[2], object_pairs_hook=unique_keys)
        if inner["format"] != "fullshard":
            raise ValueError(f"format {inner['format']!r}")
        if inner["version"] != VERSION:
            raise CheckpointError(
                "This version of Fullshard cannot read the format of a checkpoint.",
                expected=f"version {VERSION}",
                got=f"version {inner['version']}, written by fullshard {inner['writer'].get('fullshard')}",
                remedy="update fullshard, if the checkpoint is newer; load it with the version that wrote it, if it is "
                "older",
            )
        return _manifest(inner)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpointError(
            "A checkpoint's manifest cannot be read: it is damaged, or not a manifest.",
            got=f"{where}: {type(error).__name__}: {error}",
        ) from error


def time_in(start: bytes) -> float | None:
    """The time in a manifest, from its first bytes alone, as a manifest may be large; None if they have no valid time.

    `Manifest.text` writes step, world and time first.
    """
    match = _START.match(start)
    try:
        time = math.nan if match is None else float(match[1])
    except ValueError:
        return None
    return time if abs(time) < _LATEST_TIME else None


def _manifest(inner: dict[str, Any]) -> Manifest:
    files = {}
    for name, facts in inner["files"].items():
        kind = next((kind for kind in KINDS if kind in facts), "sha256")
        nbytes, hashes = _count(facts["bytes"]), tuple(map(str, facts[kind]))
        if len(hashes) != math.ceil(nbytes / BLOCK):
            raise ValueError(f"file {name!r} of {nbytes} bytes has {len(hashes)} hashes")
        files[inside(name)] = FileFacts(nbytes, hashes, kind)
    tensors: dict[str, TensorEntry] = {}
    stored: dict[str, list[Stored]] = {}
    numbered, total = list(files.items()), sum(facts.nbytes for facts in files.values())
    for name, facts in inner["tensors"].items():
        entry = TensorEntry(checked_shape(name, facts["shape"]), dtype_named(facts["dtype"]))
        tensors[checked_name(name)] = entry
        stored[name] = [_part(name, entry, piece, numbered) for piece in facts["pieces"]]
        check_parts(name, entry, stored[name], total)
    _refuse_overlap(stored)
    ties = {checked_name(name): str(first) for name, first in inner["ties"].items()}
    if unknown := [first for first in ties.values() if first not in tensors]:
        raise ValueError(f"a tie to {unknown[0]!r}, which does not exist")
    values, ranks = inner["values"], inner["ranks"]
    if not isinstance(values, dict) or not all(isinstance(value, dict) for value in values.values()):
        raise TypeError("values")
    if not isinstance(ranks, list) or not all(isinstance(rank_values, dict) for rank_values in ranks):
        raise TypeError("ranks")
    if len(ranks) not in (0, inner["world"]):
        raise ValueError(f"values of {len(ranks)} ranks, of {inner['world']}")
    return Manifest(
        step=_count(inner["step"]),
        world=_count(inner["world"]),
        time=float(inner["time"]),
        tensors=tensors,
        ties=ties,
        values=values,
        ranks=ranks,
        files=files,
        stored=stored,
        writer={str(k): str(v) for k, v in inner.get("writer", {}).items()},
    )


def _part(name: str, entry: TensorEntry, piece: Any, files: Sequence[tuple[str, FileFacts]]) -> Stored:
    """A piece, if it is valid and within its file; else ValueError."""
    dims = len(entry.shape)
    if not isinstance(piece, list) or len(piece) != 2 + 2 * dims or any(type(number) is not int for number in piece):
        raise ValueError(f"{name!r} of shape {entry.shape} has a part {str(piece)[:100]}")
    number, begin, sizes = piece[0], piece[1], tuple(piece[2 + dims :])
    if not 0 <= number < len(files):
        raise ValueError(f"a part of {name!r} is in file {number}, of {len(files)}")
    file, facts = files[number]
    nbytes = math.prod(sizes) * entry.dtype.itemsize
    part = checked_part(name, entry, tuple(piece[2 : 2 + dims]), sizes, file, begin, nbytes)
    if begin < 0 or begin + part.nbytes > facts.nbytes:
        raise ValueError(f"a part of {name!r} is at {begin} of {file!r}, with {part.nbytes} bytes: beyond its end")
    return part


def _refuse_overlap(stored: Mapping[str, Sequence[Stored]]) -> None:
    """Raise ValueError if two pieces share bytes: a short file could then expand to any number of tensors."""
    nonempty = [part for parts in stored.values() for part in parts if part.nbytes]
    for part, following in pairwise(sorted(nonempty, key=attrgetter("file", "begin"))):
        if part.file == following.file and part.begin + part.nbytes > following.begin:
            raise ValueError(f"parts of {part.name!r} and {following.name!r} share bytes of {part.file!r}")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < COUNTS:
        raise ValueError(f"{value!r} is not a count")
    return value


def inside(name: Any) -> str:
    """The name of a file in the checkpoint's folder, unchanged.

    Raises:
        CheckpointError: the name leads out of the folder.
    """
    path = PurePosixPath(name) if isinstance(name, str) and "\0" not in name and "\\" not in name else None
    if path is None or path.is_absolute() or len(path.parts) != 1 or path.parts[0] in ("..", "."):
        raise CheckpointError(
            "A checkpoint names a file outside its folder.",
            expected="a name without folders",
            got=repr(name)[:200] if isinstance(name, str) else type(name).__name__,
            remedy="do not load this checkpoint: it is damaged, or crafted to read other files",
        )
    return path.parts[0]


def versions() -> dict[str, str]:
    """The versions of the packages that write a checkpoint."""
    return {"fullshard": FULLSHARD, "torch": str(torch.__version__)}
