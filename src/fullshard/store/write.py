"""Pieces into a rank's safetensors file, from front to back, out of the shards' memory, hashed on the way.

    "model.blocks.0.weight[2:3,2:4]"     a rectangle of a tensor: rows [2, 3), columns [2, 4)

Every key names its tensor and where in that it lies, so that files can be put together without Fullshard. What a
reader of ours needs is in the manifest: it does not look at headers.
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
"""The names that `file_of` gives."""


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def write_pieces(stream: Hashed, file: str, pieces: Iterable[Piece]) -> list[Stored]:
    """Write one file of pieces, and wait until it is on the disk; where each lies.

    Args:
        stream: what they are written to, from its beginning.
        file: its name.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # so that all are aligned to their size
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
    """What a file calls a rectangle of a tensor."""
    return f"{name}[{','.join(f'{at}:{at + extent}' for at, extent in zip(offsets, sizes, strict=True))}]"


def shown(entry: Entry) -> Entry:
    """What a file says of a rectangle: of a dtype that safetensors files do not have, bytes."""
    return entry if entry.dtype in NAMES else Entry((entry.nbytes,), torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements, row by row; a view of the tensor's memory if that is the host's, and they lie there so."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    whole: Any = (host.view(-1) if host.dim() else host.view(1)).view(torch.uint8).numpy()
    return memoryview(whole)
