"""Writes a save: each rank's safetensors file, from the shards' memory; then the manifest.

    "model.blocks.0.weight[2:3,2:4]"     a rectangle of a tensor: rows [2, 3), columns [2, 4)

A key gives the tensor's name and the rectangle, so that tensors can be assembled without Fullshard. Fullshard itself
reads the manifest, not these headers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from .folder import Folder
from .formats.safetensors_header import NAMES, make_header
from .hashed import FileFacts, Hashed
from .manifest import Manifest, without_collection
from .names import TensorEntry
from .piece import Piece
from .storage import MANIFEST, Stored

RANK_FILE = re.compile(r"rank-\d+\.safetensors")
"""The names that `file_of` returns."""


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


@dataclass
class Order:
    """One rank's part of a save, written at once or by its writer process.

    Attributes:
        folder: the folder of checkpoints.
        name: of the new checkpoint, as `Folder.begin` returned it.
        rank, world: this rank's number, and the number of ranks that save.
        manifest: on the rank that publishes; see `plan_save`.
        keep_last, keep_every: see `Folder.prune`.
    """

    folder: Folder
    name: str
    rank: int
    world: int
    manifest: Manifest | None
    keep_last: int | None
    keep_every: int | None


@dataclass
class Written:
    """The result of one rank's write.

    Attributes:
        stored: where each piece is stored.
        facts: sizes and hashes, by file.
    """

    stored: list[Stored]
    facts: dict[str, FileFacts]


def write(order: Order, pieces: Sequence[Piece], progress: Callable[[int], None] | None = None) -> Written:
    """Write a rank's file, and wait until it is on the disk. No file if there are no pieces.

    Args:
        progress: called with the number of bytes after each write.
    """
    if not pieces:
        return Written([], {})
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # aligns each piece to its item size
    parts = [(piece.name, piece.offsets, TensorEntry(piece.sizes, piece.dtype)) for piece in ordered]
    file = file_of(order.rank)
    with order.folder.create(order.name, file) as below:
        return write_file(below, file, parts, (piece.tensor for piece in ordered), progress)


Part = tuple[str, tuple[int, ...], TensorEntry]
"""A rectangle in a rank's file: the tensor's name, the first index on every dim, and its own shape and dtype."""


def write_file(
    below: IO[bytes],
    file: str,
    parts: Sequence[Part],
    tensors: Iterator[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write a rank's file, and wait until it is on the disk.

    Args:
        below, file: the file, and its name.
        parts: what to write, in order.
        tensors: its elements; each is dropped before the next.
        progress: see `write`.
    """
    stream, stored = Hashed(below, progress), []
    stream.write(header_of(parts))
    for name, offsets, entry in parts:
        begin = stream.tell()
        stream.write(bytes_of(next(tensors)))
        stored.append(Stored(name, offsets, entry.shape, file, begin, entry.nbytes))
    stream.sync()
    return Written(stored, {file: stream.facts()})


@without_collection()
def publish(order: Order, written: Sequence[Written]) -> str:
    """On the first rank: write the manifest, publish the checkpoint, and remove old ones; returns its name.

    Args:
        written: by all ranks.
    """
    assert order.manifest is not None
    files: dict[str, FileFacts] = {}
    stored: dict[str, list[Stored]] = {name: [] for name in order.manifest.tensors}
    for of_rank in written:
        files |= of_rank.facts
        for part in of_rank.stored:
            stored[part.name].append(part)
    time_of_save = order.folder.time_of_next(order.manifest.time)
    manifest = dataclasses.replace(order.manifest, time=time_of_save, files=files, stored=stored)
    final = order.folder.publish(order.name, {MANIFEST: manifest.text()})
    order.folder.prune(order.keep_last, order.keep_every)
    return final


def header_of(parts: Iterable[Part]) -> bytes:
    """The header of a rank's file. If safetensors lacks a dtype, it says bytes."""
    entries: dict[str, TensorEntry] = {}
    for name, offsets, entry in parts:
        ranges = ",".join(f"{at}:{at + extent}" for at, extent in zip(offsets, entry.shape, strict=True))
        key = f"{name}[{ranges}]"
        assert key not in entries, "a rank writes a rectangle twice"
        entries[key] = entry if entry.dtype in NAMES else TensorEntry((entry.nbytes,), torch.uint8)
    return make_header(entries, {"format": "fullshard"})[0]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of the elements, row by row; a view of a contiguous tensor in host memory, else a copy."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    octets: Any = host.view(-1).view(torch.uint8).numpy()
    return memoryview(octets)
