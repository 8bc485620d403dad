"""One record of a DCP file: what `torch.save` writes of a tensor or a value, read without executing it.

A record is a zip archive that is not compressed: `data.pkl` says dtype and shape, `data/0` holds the elements. The
pickle is read by an unpickler that knows tensors and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from ..layout import dense_strides
from .pickles import look_through, read_pickle
from .source import Entry
from .storage import Storage, Stored

_EDGE = 1024
"""Bytes at a record's beginning and end that say everything but its elements."""
_MOST_BYTES = 2**16
"""Of what a record says of its tensor."""
_MOST_LISTED = 2**20  # bytes of the list of a record's parts, and of what follows it
_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip archive: mark, then lengths of its name and its extra field

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""What records name dtypes by; others are read by torch's own reader."""


@dataclass(frozen=True)
class Record:
    """What is known of one.

    Attributes:
        elements: where in the file its elements begin; None if they do not lie there row by row.
    """

    elements: int | None


class _Window(io.RawIOBase):
    """A record as a file."""

    def __init__(self, storage: Storage | _Bytes, stored: Stored, begin: int | None = None) -> None:
        self.storage, self.file, self.nbytes = storage, stored.file, stored.nbytes
        self.begin = stored.begin if begin is None else begin
        self._at = 0
        edge = min(_EDGE, self.nbytes)
        self.head = storage.read(self.file, self.begin, edge)
        self.tail = storage.read(self.file, self.begin + self.nbytes - edge, edge)

    def bytes_at(self, begin: int, nbytes: int) -> bytes:
        """Some of its bytes; those of its edges without asking the disk again."""
        if begin + nbytes <= len(self.head):
            return self.head[begin : begin + nbytes]
        if begin >= (first := self.nbytes - len(self.tail)):
            return self.tail[begin - first : begin - first + nbytes]
        return self.storage.read(self.file, self.begin + begin, nbytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.nbytes - self._at)
        left = left if size < 0 else min(size, left)
        if left > _MOST_LISTED:
            raise ValueError(f"the list of a record's parts has {left} bytes")
        data = self.bytes_at(self._at, left)
        self._at += len(data)
        return data


def _named(module: str, name: str) -> Any:
    """What `data.pkl` may name, for it to say `(dtype, offset, size, stride)` of a tensor."""
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return lambda storage, offset, size, stride, *rest: (storage, offset, tuple(size), tuple(stride))
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    raise pickle.UnpicklingError(f"{module}.{name}")


def _storage(pid: Any) -> tuple[torch.dtype, int]:
    kind, dtype, key, _, numel = pid
    if kind != "storage" or key != "0":
        raise pickle.UnpicklingError(str(pid))
    return dtype, int(numel)


class RecordFinder:
    """Finds the elements of records, and reads those bytes around them that it has not seen yet.

    Records of one dtype and shape begin and end alike: what was made of such bytes once need not be made again.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._alike: dict[tuple[torch.dtype, tuple[int, ...], int], tuple[bytes, bytes, int]] = {}

    def find(self, stored: Stored, entry: Entry) -> Record:
        """Where a tensor's elements are.

        Raises:
            DamagedCheckpointError: it is not what the metadata says.
        """
        window, key = _Window(self._storage, stored), (entry.dtype, stored.sizes, stored.nbytes)
        head, tail, begin = self._alike.get(key, (b"", b"", 0))
        if begin and window.head.startswith(head) and window.tail.endswith(tail):
            return Record(stored.begin + begin)
        found = _find(window, stored, entry)
        if found.elements is not None:
            begin = found.elements - stored.begin
            rest = stored.nbytes - begin - math.prod(stored.sizes) * entry.dtype.itemsize
            if begin <= len(window.head) and 0 < rest <= len(window.tail):
                self._alike[key] = (window.head[:begin], window.tail[-rest:], begin)
        return found


def _find(window: _Window, stored: Stored, entry: Entry) -> Record:
    try:
        files = _members(window)
        data = files["data/0"]
        told = read_pickle(_member(window, files["data.pkl"]), _named, _storage)
        order = _member(window, files["byteorder"]) if "byteorder" in files else b"little"
        (dtype, numel), offset, size, stride = told
        begin = _begin(window, data)
    except pickle.UnpicklingError:
        return Record(None)  # not a plain tensor: torch's own reader, which executes nothing, says what it is
    except DamagedCheckpointError:
        raise
    except Exception as error:  # whatever damaged bytes make of zipfile and the unpickler
        raise _bad(stored, f"{type(error).__name__}: {error}") from error
    if dtype != entry.dtype or size != stored.sizes:
        raise _bad(stored, f"a tensor of {dtype} and shape {size}, not {entry.dtype} and {stored.sizes}")
    plain = stride == dense_strides(size, tuple(range(len(size)))) or math.prod(size) <= 1
    if not plain or offset or order != b"little" or data.file_size != numel * dtype.itemsize:
        return Record(None)
    if numel < math.prod(size):
        raise _bad(stored, f"{numel} elements")
    return Record(window.begin + begin)


def _members(window: _Window) -> dict[str, zipfile.ZipInfo]:
    """A record's parts, by name.

    Raises:
        ValueError: they are not as `torch.save` writes them: as they are, none compressed, each within the record.
    """
    with zipfile.ZipFile(window) as archive:
        listed = archive.infolist()
    for info in listed:
        if info.compress_type or info.file_size != info.compress_size:
            raise ValueError(f"{info.filename} is compressed: {info.compress_size} bytes stand for {info.file_size}")
        if info.header_offset < 0 or info.header_offset + info.file_size > window.nbytes:
            raise ValueError(f"{info.filename} lies beyond the record's end")
    return {info.filename.partition("/")[2]: info for info in listed}


def _begin(window: _Window, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin in the record.

    Raises:
        ValueError: the record says so, and cannot.
    """
    header = window.bytes_at(info.header_offset, _HEADER.size)
    mark, name, extra = _HEADER.unpack(header)
    begin: int = info.header_offset + _HEADER.size + name + extra
    if mark != b"PK\3\4" or begin + info.compress_size > window.nbytes:
        raise ValueError(f"{info.filename} lies beyond the record's end")
    return begin


def _member(window: _Window, info: zipfile.ZipInfo) -> bytes:
    """A small member's bytes. (`ZipFile.read` would compare its crc32, which is left out: files are hashed.)"""
    if info.file_size > _MOST_BYTES:
        raise ValueError(f"{info.filename} has {info.file_size} bytes")
    return window.bytes_at(_begin(window, info), info.file_size)


def _bad(stored: Stored, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "A record of a checkpoint is not what its metadata says.",
        parameter=stored.name,
        expected=f"shape {stored.sizes} at byte {stored.begin} of {stored.file}",
        got=got,
    )


def load_record(data: bytes, stored: Stored, entry: Entry | None) -> Any:
    """A record, by torch's own reader, which would unpack what is compressed to any size.

    Args:
        entry: what it must be; None: any value.

    Raises:
        DamagedCheckpointError: it is something else, or cannot be read.
    """
    try:
        window = _Window(_Bytes(data), stored, 0)
        pickled = _members(window)["data.pkl"]
        look_through(window.bytes_at(_begin(window, pickled), pickled.file_size))
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged record makes of zipfile and torch
        raise _bad(stored, f"{type(error).__name__}: {str(error).partition('. ')[0][:200]}") from error
    if entry is not None:
        fits = isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) == (stored.sizes, entry.dtype)
        if not fits:
            raise _bad(stored, f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}")
    return found


class _Bytes:
    """A record that is in memory, as far as `_Window` asks."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        return self.data[begin : begin + nbytes]
