"""The zip file that `torch.save` writes: a pickle that says what there is, and a record of bytes for each storage.

    name/data.pkl      the pickle, read as data (`pickled.py`)
    name/byteorder     "little" or "big"
    name/data/0 ...    elements of storages, not compressed

Every size is checked against the file before memory is taken for it. Records are read into memory of their own, only
the part that is asked for: nothing is mapped, so that what a process holds is what it reads.
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
from ..storage import extent, open_file, read_into, read_strided
from .built import Stored
from .pickled import decode

LOCAL_HEADER = 30  # bytes of a zip's local header, before the record's name and extra field


class Records:
    """What `torch.save` wrote, wherever it lies.

    Args:
        called: the file, for errors.
        file: unbuffered; its bytes are the archive's, from beginning to end.
        size: of these, in bytes.

    Attributes:
        root: what the pickle says, see `pickled.decode`.

    Raises:
        CheckpointError: no zip file, a truncated one, or one that `torch.save` does not write.
    """

    def __init__(self, called: str, file: Any, size: int) -> None:
        self._called, self._file, self._size = called, file, size
        self._records = self._directory()
        self.root: Any = decode(self._record("data.pkl"), called)
        order = self._record("byteorder").decode("ascii", "replace") if "byteorder" in self._records else "little"
        if order != sys.byteorder:
            raise CheckpointError(f"{called} was written on a machine of another byte order.", got=order)

    def _fill(self, position: int, target: memoryview) -> None:
        read_into(self._file, position, target, self._called)

    def check(self, name: str, stored: Stored) -> None:
        """That a tensor lies within its record, and takes no more memory than the file.

        Raises:
            CheckpointError: it does not.
        """
        record = self._records.get(f"data/{stored.key}")
        if record is None:
            raise CheckpointError(f"{self._called} has no record for a tensor.", parameter=name, expected=stored.key)
        size = stored.dtype.itemsize
        if record[1] != stored.numel * size:
            got = f"{record[1]:,} bytes"
            expected = f"{stored.numel * size:,} bytes"
            raise CheckpointError(
                f"{self._called}: a record has another size.", parameter=name, expected=expected, got=got
            )
        if 0 in stored.shape:
            return
        if stored.offset + extent(stored.shape, stored.stride) > stored.numel:
            raise CheckpointError(f"{self._called}: a tensor reaches beyond its record.", parameter=name)
        if math.prod(stored.shape) * size > self._size:
            raise CheckpointError(
                f"{self._called}: a tensor is larger than the file.", parameter=name, got=stored.shape
            )

    def read(
        self, stored: Stored, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor that was checked, or a rectangle of it. May have any stride.

        Args:
            stored: which.
            offsets, sizes: an index and an extent for every dim; None: from the start; to the end.
        """
        start = stored.offset
        shape = tuple(stored.shape if sizes is None else sizes)
        if offsets is not None:
            start += sum(at * step for at, step in zip(offsets, stored.stride, strict=True))
        base = self._records[f"data/{stored.key}"][0]
        return read_strided(self._fill, base, stored.dtype, start, shape, stored.stride)

    def place(self, stored: Stored) -> tuple[int, int]:
        """Where the record of a tensor begins in the file, and its size, in bytes."""
        return self._records[f"data/{stored.key}"]

    def _record(self, name: str) -> bytes:
        if name not in self._records:
            raise CheckpointError(f"{self._called} is a zip file, but none of torch.save: it has no {name}.")
        position, size = self._records[name]
        buffer = bytearray(size)
        self._fill(position, memoryview(buffer))
        return bytes(buffer)

    def _directory(self) -> dict[str, tuple[int, int]]:
        """Position and size in bytes of each record, by its name below the archive's own folder."""
        try:
            with zipfile.ZipFile(self._file) as opened:
                listed = opened.infolist()
            places = {record.filename.partition("/")[2]: self._place(record) for record in listed}
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{self._called} is no whole zip file ({error}): truncated, or not of torch.save."
            ) from error
        end = 0
        for position, size in sorted(places.values()):
            if position < end:
                raise CheckpointError(f"{self._called}: its records lie on one another.")
            end = position + size
        if len(places) != len(listed):
            raise CheckpointError(f"{self._called}: two of its records have the same name.")
        if end > self._size:
            raise CheckpointError(
                f"{self._called} is truncated.", expected=f"{end:,} bytes", got=f"{self._size:,} bytes"
            )
        return places

    def _place(self, record: zipfile.ZipInfo) -> tuple[int, int]:
        stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
        if not stored or record.flag_bits & 1:
            raise CheckpointError(
                f"{self._called}: its records are compressed or encrypted, which torch.save does not do."
            )
        header = bytearray(LOCAL_HEADER)
        self._fill(record.header_offset, memoryview(header))
        if header[:4] != b"PK\3\4":
            raise zipfile.BadZipFile("a record is not where the directory says")
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return record.header_offset + LOCAL_HEADER + name + extra, record.file_size


class Archive(Records):
    """A file of `torch.save`, open for reading. Close it.

    Attributes:
        path: of the file.

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
        """Let the file go. A map of it ends with the last tensor that views it."""
        self._file.close()
        self._map = None

    def mapped(self, name: str, stored: Stored) -> torch.Tensor:
        """A tensor as a view of the file: takes memory only while it is read, and stays when the archive is closed.

        Raises:
            CheckpointError: see `check`.
        """
        self.check(name, stored)
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it
        start = self.place(stored)[0] + stored.offset * stored.dtype.itemsize
        count = extent(stored.shape, stored.stride)
        octets = torch.frombuffer(self._map, dtype=torch.uint8, count=count * stored.dtype.itemsize, offset=start)
        if octets.data_ptr() % stored.dtype.itemsize:
            octets = octets.clone()
        return octets.view(stored.dtype).as_strided(stored.shape, stored.stride)
