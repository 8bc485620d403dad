"""Writes pieces into a rank's safetensors file, sequentially, from the shards' memory, and hashes them on the way.

    "model.blocks.0.weight[2:3,2:4]"     a rectangle of a tensor: rows [2, 3), columns [2, 4)

A key gives the tensor's name and the rectangle, so that tensors can be assembled without Fullshard. Fullshard itself
reads the manifest, not these headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from .formats.safetensors_header import NAMES, make_header
from .hashed import Hashed
from .piece import Piece
from .source import Entry
from .storage import Stored

RANK_FILE = re.compile(r"rank-\d+\.safetensors")
"""The names that `file_of` returns."""


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def write_pieces(stream: Hashed, file: str, pieces: Iterable[Piece]) -> list[Stored]:
    """Write a file of pieces, and wait until it is on the disk; returns where each is stored.

    Args:
        stream: a new, empty file.
        file: its name.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # so that each is aligned to its item size
    entries = {
        key_of(piece.name, piece.offsets, piece.sizes): shown(Entry(piece.sizes, piece.dtype)) for piece in ordered
    }
    assert len(entries) == len(ordered), "a rank writes a rectangle twice"
    stream.write(make_header(entries, {"format": "fullshard"})[0])
    stored = []
    for piece in ordered:
        begin = stream.tell()
        stream.write(bytes_of(piece.tensor))
        stored.append(Stored(piece.name, piece.offsets, piece.sizes, file, begin, piece.nbytes))
    stream.sync()
    return stored


def key_of(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The key of a tensor's rectangle in a file."""
    return f"{name}[{','.join(f'{at}:{at + extent}' for at, extent in zip(offsets, sizes, strict=True))}]"


def shown(entry: Entry) -> Entry:
    """The entry of a rectangle in a file's header: bytes, if safetensors has no such dtype."""
    return entry if entry.dtype in NAMES else Entry((entry.nbytes,), torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of the elements, row by row; a view of a contiguous tensor in host memory, else a copy."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    octets: Any = host.view(-1).view(torch.uint8).numpy()
    return memoryview(octets)
