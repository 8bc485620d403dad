"""The zip file that `torch.save` writes: a pickle with the structure, and a record of bytes for each storage.

    name/data.pkl      the pickle, decoded as data (`store/pickles.py`)
    name/byteorder     "little" or "big"
    name/data/0 ...    elements of storages, not compressed

Every size is checked against the file before memory is allocated for it. Only the requested part of a record is read,
into new memory: tensors of the model and the optimizer are not memory-mapped, so a process uses no more memory than it
reads. Tensors among other values, which may never be used, are mapped.
"""

from __future__ import annotations

import math
import mmap
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..manifest import without_collection
from ..names import TensorEntry
from ..pickles import PickledTensor, decode
from ..source import Source
from ..storage import NamedFiles, Stored, extent, read_into, read_strided

LOCAL_HEADER = 30  # bytes of a zip's local header, before the record's name and extra field


class Records:
    """The output of `torch.save`, in a file or in a part of one.

    Args:
        location: the file's name, for error messages.
        file: unbuffered, and containing only the archive.
        size: of the archive, in bytes.

    Attributes:
        root: the decoded pickle, see `pickles.decode`.

    Raises:
        CheckpointError: the file is not a zip file, is truncated, or was not written by `torch.save`.
    """

    @without_collection()
    def __init__(self, location: str, file: Any, size: int) -> None:
        self._location, self._file, self._size = location, file, size
        self._records = self._directory()
        self.root: Any = decode(self._record("data.pkl"), location)
        order = self._record("byteorder").decode("ascii", "replace") if "byteorder" in self._records else "little"
        if order != sys.byteorder:
            raise CheckpointError(f"{location} was written on a machine with a different byte order.", got=order)

    def _fill(self, position: int, target: memoryview) -> None:
        read_into(self._file, position, target, self._location)

    def check(self, name: str, stored: PickledTensor) -> None:
        """Check a tensor before it is read.

        Raises:
            CheckpointError: it is not within its record, or needs more memory than the file.
        """
        record = self._records.get(f"data/{stored.key}")
        if record is None:
            raise CheckpointError(f"{self._location} has no record for a tensor.", parameter=name, expected=stored.key)
        size = stored.dtype.itemsize
        if record[1] != stored.numel * size:
            raise CheckpointError(
                f"{self._location}: a record has the wrong size.",
                parameter=name,
                expected=f"{stored.numel * size:,} bytes",
                got=f"{record[1]:,} bytes",
            )
        if 0 in stored.shape:
            return
        if stored.offset + extent(stored.shape, stored.stride) > stored.numel:
            raise CheckpointError(f"{self._location}: a tensor extends beyond its record.", parameter=name)
        if math.prod(stored.shape) * size > self._size:
            raise CheckpointError(
                f"{self._location}: a tensor is larger than the file.", parameter=name, got=stored.shape
            )

    def begin(self, stored: PickledTensor) -> int:
        """The position of a tensor's first element in the file, in bytes."""
        return self._records[f"data/{stored.key}"][0] + stored.offset * stored.dtype.itemsize

    def read(self, name: str, stored: PickledTensor) -> torch.Tensor:
        """Check and read a tensor, into new memory of any strides."""
        self.check(name, stored)
        return read_strided(self._fill, self.begin(stored), stored.dtype, 0, stored.shape, stored.stride)

    def _record(self, name: str) -> bytes:
        if name not in self._records:
            raise CheckpointError(f"{self._location} is a zip file, but not one of torch.save: it has no {name}.")
        position, size = self._records[name]
        buffer = bytearray(size)
        self._fill(position, memoryview(buffer))
        return bytes(buffer)

    def _directory(self) -> dict[str, tuple[int, int]]:
        """The position and size of each record in bytes, by its name without the archive's folder."""
        try:
            with zipfile.ZipFile(self._file) as archive:
                records = archive.infolist()
            places = {record.filename.partition("/")[2]: self._place_of(record) for record in records}
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{self._location} is not a complete zip file ({error}): truncated, or not written by torch.save."
            ) from error
        end = 0
        for position, size in sorted(places.values()):
            if position < end:
                raise CheckpointError(f"{self._location}: records overlap.")
            end = position + size
        if len(places) != len(records):
            raise CheckpointError(f"{self._location}: two records have the same name.")
        if end > self._size:
            raise CheckpointError(
                f"{self._location} is truncated.", expected=f"{end:,} bytes", got=f"{self._size:,} bytes"
            )
        return places

    def _place_of(self, record: zipfile.ZipInfo) -> tuple[int, int]:
        stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
        if not stored or record.flag_bits & 1:
            raise CheckpointError(
                f"{self._location}: a record is compressed or encrypted, which torch.save does not do."
            )
        header = bytearray(LOCAL_HEADER)
        self._fill(record.header_offset, memoryview(header))
        if header[:4] != b"PK\3\4":
            raise zipfile.BadZipFile("a record is not at its position in the directory")
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return record.header_offset + LOCAL_HEADER + name + extra, record.file_size


class Archive(Records):
    """A file of `torch.save`, opened in a storage.

    Attributes:
        path: the file.

    Raises:
        CheckpointError: see `Records`.
    """

    def __init__(self, storage: NamedFiles, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        super().__init__(str(path), storage.open(path), storage.sizes[path.name])

    def stored(self, name: str, tensor: PickledTensor, offsets: tuple[int, ...] | None = None) -> Stored:
        """Check a tensor, which is the rectangle at `offsets` (None: all) of the tensor `name`, and say where it is.

        Raises:
            CheckpointError: see `check`.
        """
        self.check(name, tensor)
        offsets = (0,) * len(tensor.shape) if offsets is None else offsets
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        return Stored(name, offsets, tensor.shape, self.path.name, self.begin(tensor), nbytes, tensor.stride)

    def mapped(self, name: str, stored: PickledTensor) -> torch.Tensor:
        """Map a tensor from the file, without reading it. It remains valid after the archive is closed.

        Raises:
            CheckpointError: see `check`.
        """
        self.check(name, stored)
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns about read-only memory
        nbytes = extent(stored.shape, stored.stride) * stored.dtype.itemsize
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=self.begin(stored))
        if data.data_ptr() % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).as_strided(stored.shape, stored.stride)


class ArchiveSource(Source):
    """A checkpoint in files of `torch.save`. See `Source`.

    Args:
        path: the file or folder.
    """

    storage: NamedFiles

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(NamedFiles())

    def _archive(self, path: Path) -> Archive:
        """Open one of the files."""
        return Archive(self.storage, path)

    def _add(self, name: str, entry: TensorEntry, parts: Sequence[Stored]) -> None:
        if name in self.entries:
            raise CheckpointError(f"{self._path} has two tensors of the same name.", parameter=name)
        self.entries[name], self.stored[name] = entry, parts

    def _add_whole(self, name: str, archive: Archive, tensor: Any) -> None:
        """Add a tensor that is whole in a single file."""
        if not isinstance(tensor, PickledTensor):
            raise CheckpointError(f"{archive.path} has a value in place of a tensor.", parameter=name)
        self._add(name, TensorEntry(tensor.shape, tensor.dtype), [archive.stored(name, tensor)])
