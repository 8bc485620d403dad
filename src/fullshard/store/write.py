"""Pieces into DCP's files: one file a rank, written from front to back, hashed on the way.

DCP's own writer copies every piece that is a view, keeps the copies until the last is written, and has a crc32 made of
every byte; this one writes from the shard's memory. The files are the same: records of `torch.save`, one a piece,
which DCP's readers read. Metadata and the file systems are DCP's.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..torch_private.dcp_files import CURRENT_DCP_VERSION, StorageInfo
from .hashed import FileFacts, Hashed
from .piece import Piece
from .source import Entry
from .storage import Stored

_crc_lock = threading.Lock()


class PieceWriter:
    """What is Fullshard's of a DCP writer; a class of DCP's comes after it (see `LocalWriter`).

    Attributes:
        facts: of the files that this rank wrote, by name.
        progress: called with a number of bytes whenever some were written.
    """

    facts: dict[str, FileFacts]
    progress: Callable[[int], None] | None = None

    def write_pieces(self, rank: int, pieces: Iterable[Piece], values: Mapping[str, Any]) -> list[Stored]:
        """Write one file of pieces, and of values that are not tensors; where each lies. No file if there are none.

        Args:
            rank: whose file it is.
        """
        self.facts = {}
        pieces = list(pieces)
        if not pieces and not values:
            return []
        name, here = f"__{rank}_0.distcp", cast(Any, self)
        with here.fs.create_stream(here.fs.concat_path(here.path, name), "wb") as below:
            stream = Hashed(below, self.progress)
            records = RecordWriter(stream, name)
            stored = [records.piece(piece) for piece in pieces]
            stored += [records.value(key, value) for key, value in values.items()]
            stream.sync()
        self.facts[name] = stream.facts()
        return stored

    def write_metadata(self, metadata: Metadata) -> None:
        """Write `.metadata`. Nothing that a path or a process can be told by is in it."""
        here = cast(Any, self)
        with here.fs.create_stream(here.fs.concat_path(here.path, ".metadata"), "wb") as below:
            stream = Hashed(below, self.progress)
            pickle.dump(metadata, stream)
            stream.sync()
        self.facts[".metadata"] = stream.facts()


class LocalWriter(PieceWriter, FileSystemWriter):
    """DCP's writer to a folder, with `PieceWriter`'s way of writing."""


class RecordWriter:
    """Writes records: what `torch.save` makes of a tensor or a value.

    What it writes around the elements is the same for all tensors of one dtype and shape, and is kept: making it takes
    as long as copying a megabyte.

    Args:
        stream: what they are written to.
        name: of the file.
    """

    def __init__(self, stream: Hashed, name: str) -> None:
        self._stream, self._name = stream, name
        self._around: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}

    def piece(self, piece: Piece) -> Stored:
        """Write a piece; where it lies."""
        begin = self._stream.tell()
        self._tensor(_alone(piece.tensor))
        return self._stored(piece.name, piece.offsets, piece.sizes, begin)

    def value(self, name: str, value: Any) -> Stored:
        """Write a value that is not a tensor; where it lies."""
        begin = self._stream.tell()
        saved(value, self._stream)
        return self._stored(name, (), (), begin)

    def _stored(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], begin: int) -> Stored:
        return Stored(name, offsets, sizes, self._name, begin, self._stream.tell() - begin)

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Write one that is alone in its storage."""
        key = tensor.dtype, tensor.shape
        around = self._around.get(key)
        if around is None:
            parted = _Parted(self._stream, tensor.untyped_storage().nbytes())
            saved(tensor, parted)
            if parted.times == 1:
                self._around[key] = b"".join(parted.before), b"".join(parted.after)
            return
        self._stream.write(around[0])
        self._stream.write(bytes_of(tensor))
        self._stream.write(around[1])


class _Parted(io.RawIOBase):
    """Passes on what is written to it, and keeps all but the elements, which come in one go.

    Args:
        below: what it is passed on to.
        nbytes: of the elements.

    Attributes:
        before, after: what came before and after them.
        times: how often something came that may have been them.
    """

    def __init__(self, below: Hashed, nbytes: int) -> None:
        self._below, self._nbytes, self.times = below, nbytes, 0
        self.before: list[bytes] = []
        self.after: list[bytes] = []

    @property
    def error(self) -> Exception | None:
        return self._below.error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(data) == self._nbytes:
            self.times += 1
        else:
            (self.after if self.times else self.before).append(bytes(data))
        return self._below.write(data)


def saved(data: Any, stream: Hashed | _Parted) -> None:
    """`torch.save`, which raises what the stream raised."""
    try:
        with _without_crc():
            torch.save(data, cast(IO[bytes], stream))
    except RuntimeError as error:
        raise stream.error or error from error


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, contiguous, as all there is of its storage: `torch.save` writes whole storages.

    Shares memory with it if that is in host memory, contiguous and dense.
    """
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not host.numel() or host.untyped_storage().nbytes() == host.numel() * host.element_size():
        return host
    flat = host.view(-1) if host.dim() else host.view(1)
    raw = torch.from_numpy(flat.view(torch.uint8).numpy())  # a storage that begins and ends where the tensor does
    return raw.view(host.dtype).view(host.shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements, row by row."""
    host = _alone(tensor)
    whole: Any = (host.view(-1) if host.dim() else host.view(1)).view(torch.uint8).numpy()
    return memoryview(whole)


@contextmanager
def _without_crc() -> Iterator[None]:
    """`torch.save` without its checksums, which nothing reads: files are hashed. The setting is torch's, and global."""
    with _crc_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


def metadata_of(
    entries: Mapping[str, Entry],
    stored: Iterable[Stored],
    paths: dict[str, tuple[Any, ...]],
    ties: Mapping[str, str],
) -> Metadata:
    """DCP's metadata of what all ranks wrote.

    Args:
        entries: all tensors; what is stored under another name is a value.
        paths: for each name the keys that lead to it in the nested state dict.
        ties: other names of tensors, under which DCP's readers are to find them, too.
    """
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    aliases: dict[str, list[str]] = {}
    for name, first in ties.items():
        aliases.setdefault(first, []).append(name)
    for one in stored:
        info = StorageInfo(one.file, one.begin, one.nbytes)
        entry = entries.get(one.name)
        if entry is None:
            found[one.name], places[MetadataIndex(one.name)] = BytesStorageMetadata(), info
            continue
        offsets = torch.Size(one.offsets)
        if one.name not in found:
            properties = TensorProperties(dtype=entry.dtype)
            found[one.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
        found[one.name].chunks.append(ChunkStorageMetadata(offsets, torch.Size(one.sizes)))
        for name in (one.name, *aliases.get(one.name, ())):
            places[MetadataIndex(name, offsets)] = info
    for name, first in ties.items():
        found[name] = found[first]
    whole = Metadata(state_dict_metadata=found, planner_data=paths, storage_data=places)
    whole.version = CURRENT_DCP_VERSION
    return whole
