"""Writes a save: each rank's safetensors file, from the shards' memory; then the manifest.

    "model.blocks.0.weight[2:3,2:4]"     a rectangle of a tensor: rows [2, 3), columns [2, 4)

A key gives the tensor's name and the rectangle, so that tensors can be assembled without Fullshard. Fullshard itself
reads the manifest, not these headers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .folder import Folder
from .formats.safetensors_header import NAMES, make_header
from .hashed import FileFacts, Hashed
from .manifest import Manifest, without_collection
from .piece import Piece
from .source import TensorEntry
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
    file, stored = file_of(order.rank), []
    with order.folder.create(order.name, file) as below:
        stream = Hashed(below, progress)
        stream.write(header_of((piece.name, piece.offsets, TensorEntry(piece.sizes, piece.dtype)) for piece in ordered))
        for piece in ordered:
            begin = stream.tell()
            stream.write(bytes_of(piece.tensor))
            stored.append(Stored(piece.name, piece.offsets, piece.sizes, file, begin, piece.nbytes))
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


def header_of(parts: Iterable[tuple[str, tuple[int, ...], TensorEntry]]) -> bytes:
    """The header of a rank's file.

    Args:
        parts: rectangles in the order of the file: the tensor's name, the first index on every dim, and the rectangle's
            shape and dtype. If safetensors has no such dtype, the header says bytes.
    """
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
