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
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..manifest import without_collection
from ..pickles import PickledTensor, decode
from ..storage import extent, open_file, read_into, read_strided

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

    def read(
        self, stored: PickledTensor, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read a tensor, or a rectangle of it, after `check`. The result may have any strides.

        Args:
            stored: the tensor.
            offsets, sizes: the first index and the extent on every dim; None: zeros; the whole shape.
        """
        start = stored.offset
        shape = tuple(stored.shape if sizes is None else sizes)
        if offsets is not None:
            start += sum(at * step for at, step in zip(offsets, stored.stride, strict=True))
        return read_strided(self._fill, self.place(stored)[0], stored.dtype, start, shape, stored.stride)

    def place(self, stored: PickledTensor) -> tuple[int, int]:
        """The position of a tensor's record in the file, and its size, in bytes."""
        return self._records[f"data/{stored.key}"]

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
    """A file of `torch.save`, open for reading. Close it.

    Attributes:
        path: the file.

    Raises:
        CheckpointError: see `Records`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        file = open_file(path, follow_links=True)
        try:
            super().__init__(str(path), file, os.fstat(file.fileno()).st_size)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Close the file. A memory map of it lives as long as the tensors that view it."""
        self._file.close()
        self._map = None

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
        start = self.place(stored)[0] + stored.offset * stored.dtype.itemsize
        count = extent(stored.shape, stored.stride)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=count * stored.dtype.itemsize, offset=start)
        if data.data_ptr() % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).as_strided(stored.shape, stored.stride)
