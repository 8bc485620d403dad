"""Pieces into DCP's files: one file a rank, written from front to back, hashed on the way.

DCP's own writer copies every piece that is a view, keeps the copies until the last is written, and has a crc32 made of
every byte; this one writes from the shard's memory. The files are the same: records of `torch.save`, one a piece,
which DCP's readers read. Everything else is DCP's: planning, metadata, and the file systems behind its writers.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..torch_private.dcp_files import CURRENT_DCP_VERSION, StorageInfo
from .hashed import FileFacts, Hashed
from .piece import Piece

_crc_lock = threading.Lock()


def write_items(pieces: Iterable[Piece]) -> list[WriteItem]:
    """DCP's description of pieces."""
    return [
        WriteItem(
            index=MetadataIndex(piece.name, torch.Size(piece.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
                TensorProperties(dtype=piece.dtype),
                torch.Size(piece.shape),
            ),
        )
        for piece in pieces
    ]


def value_items(names: Iterable[str]) -> list[WriteItem]:
    """DCP's description of values that are no tensors."""
    return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in names]


class Planner(SavePlanner):
    """Gives DCP's writers the data of items.

    Args:
        pieces: of this rank.
        values: what is no tensor, by name; for PyTorch's readers: Fullshard reads its manifest instead.
    """

    def __init__(self, pieces: Iterable[Piece], values: dict[str, Any]) -> None:
        self._pieces = {(piece.name, torch.Size(piece.offsets)): piece for piece in pieces}
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A tensor of the item's shape, or `torch.save` of a value."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._values[index.fqn], buffer)
            return buffer
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset].tensor

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: made with what it gives."""

    def create_local_plan(self) -> SavePlan:
        """All pieces that this rank writes, and the values."""
        items = write_items(piece for piece in self._pieces.values() if piece.writes)
        return SavePlan([*items, *value_items(self._values)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """The plans as they are: who writes what is settled by then."""
        return all_plans, None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan


class PieceWriter:
    """What is Fullshard's of a DCP writer; a class of DCP's comes after it (see `LocalWriter`).

    Attributes:
        facts: of the files that this rank wrote, by name.
        progress: called with a number of bytes whenever some were written.
        ties: other names of tensors, under which DCP's readers are to find them, too.
    """

    facts: dict[str, FileFacts]
    progress: Callable[[int], None] | None = None
    ties: Mapping[str, str] = MappingProxyType({})

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items into one file; see `StorageWriter.write_data`."""
        results, self.facts = [], {}
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            here: Any = self
            with here.fs.create_stream(here.fs.concat_path(here.path, name), "wb") as below:
                stream = Hashed(below, self.progress)
                records = RecordWriter(stream, name)
                results = [records.write(planner.resolve_data(item), item) for item in plan.items]
                stream.sync()
            self.facts[name] = stream.facts()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`; see `StorageWriter.finish`. Nothing that a path or a process can be told by is in it."""
        places = {result.index: result.storage_data for each in results for result in each}
        found = dict(metadata.state_dict_metadata)
        for name, first in self.ties.items():
            found[name] = found[first]
            places |= {MetadataIndex(name, i.offset): info for i, info in list(places.items()) if i.fqn == first}
        here: Any = self
        with here.fs.create_stream(here.fs.concat_path(here.path, ".metadata"), "wb") as below:
            stream = Hashed(below, self.progress)
            whole = Metadata(found, metadata.planner_data, places)
            whole.version = CURRENT_DCP_VERSION
            pickle.dump(whole, stream)
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

    def write(self, data: Any, item: WriteItem) -> WriteResult:
        """Write a tensor, or the bytes in a buffer, or a value; where it lies."""
        stream = self._stream
        begin = stream.tell()
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        elif isinstance(data, torch.Tensor):
            self._tensor(_alone(data))
        else:
            saved(data, stream)
        length = stream.tell() - begin
        return WriteResult(index=item.index, size_in_bytes=length, storage_data=StorageInfo(self._name, begin, length))

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


def metadata_of(plans: Iterable[SavePlan], paths: dict[str, tuple[Any, ...]]) -> Metadata:
    """DCP's metadata of what all ranks write.

    Args:
        paths: for each name the keys that lead to it in the nested state dict.
    """
    found: dict[str, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            found[name] = BytesStorageMetadata()
        else:
            known = found.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            known.chunks.append(data.chunk)
    return Metadata(state_dict_metadata=found, planner_data=paths)
