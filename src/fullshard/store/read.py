"""Pieces out of DCP's files: only the bytes that this rank needs, checked before anything is changed, nothing executed.

A record is what `torch.save` writes of one tensor: a zip archive that is not compressed, of which `data.pkl` says dtype
and shape and `data/0` holds the elements. The pickle is read by an unpickler that knows tensors and nothing else; the
elements are read straight into the memory that they are for.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from ..layout import dense_strides
from . import manifest as manifests
from .hashed import BLOCK
from .manifest import Manifest
from .metadata import NAME as METADATA
from .metadata import Index, Stored, read_index
from .piece import Piece
from .source import Entry
from .storage import Storage

_MOST_BYTES = 2**16
"""Of what a record says of its tensor."""
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
class Copy:
    """What one rectangle in a file gives to one piece.

    Attributes:
        stored: the rectangle in the file.
        entry: the tensor.
        begin: first index within `stored`, on every dim.
        target: what to fill; a view of the piece.
    """

    stored: Stored
    entry: Entry
    begin: tuple[int, ...]
    target: torch.Tensor


def copies_for(piece: Piece, entry: Entry, stored: Iterable[Stored]) -> list[Copy]:
    """What fills a piece.

    Raises:
        DamagedCheckpointError: the checkpoint lacks some of it.
    """
    found, missing = [], piece.tensor.numel()
    for one in stored:
        low = tuple(map(max, piece.offsets, one.offsets))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.sizes, one.offsets, one.sizes, strict=True)
        )
        if all(a < b for a, b in zip(low, high, strict=True)):
            target = piece.tensor
            for dim, (a, b, at) in enumerate(zip(low, high, piece.offsets, strict=True)):
                target = target.narrow(dim, a - at, b - a)
            found.append(Copy(one, entry, tuple(a - b for a, b in zip(low, one.offsets, strict=True)), target))
            missing -= target.numel()
    if missing:
        raise DamagedCheckpointError(
            "A checkpoint does not hold all elements of a tensor, or holds some twice.",
            parameter=piece.name,
            expected=f"{piece.tensor.numel()} elements at {piece.offsets} of {piece.sizes}",
            got=f"{piece.tensor.numel() - missing}",
        )
    return found


class Files:
    """The files of one checkpoint folder, open for reading.

    Args:
        storage: the folder.

    Attributes:
        manifest: Fullshard's; None in a folder that another program wrote.
        index: what is stored where.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or not what was written.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._verified: set[tuple[str, int]] = set()
        self._records: dict[tuple[str, int], _Record] = {}
        self.manifest: Manifest | None = None
        sizes = storage.sizes
        if manifests.NAME in sizes:
            text = storage.read(manifests.NAME, 0, sizes[manifests.NAME])
            self.manifest = manifests.parse(text, storage.called(manifests.NAME))
        self._check_sizes()
        self.verify(METADATA, 0, sizes[METADATA])
        data = storage.read(METADATA, 0, sizes[METADATA])
        self.index: Index = read_index(data, sizes, storage.called(METADATA))

    def _check_sizes(self) -> None:
        """All files must be what the manifest says."""
        found = self.storage.sizes
        for name, facts in ({} if self.manifest is None else self.manifest.files).items():
            if name not in found:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is missing.", expected=self.storage.called(name), got="no such file"
                )
            if found[name] != facts.nbytes:
                what = "truncated" if found[name] < facts.nbytes else "longer than it was written"
                raise DamagedCheckpointError(
                    f"A file of a checkpoint is {what}.",
                    expected=f"{self.storage.called(name)} of {facts.nbytes} bytes",
                    got=f"{found[name]} bytes",
                )
        if METADATA not in found:
            raise DamagedCheckpointError(
                "A folder is no whole checkpoint: it has no .metadata, which is written last.",
                got=self.storage.called(""),
                remedy="name another one",
            )

    def verify(self, name: str, begin: int, nbytes: int) -> None:
        """Compare the hashes of the blocks that these bytes are in; without a manifest nothing is known of them.

        Raises:
            DamagedCheckpointError: they differ.
        """
        facts = self.manifest.files.get(name) if self.manifest is not None else None
        if facts is None or not nbytes:
            return
        for block in range(begin // BLOCK, (begin + nbytes - 1) // BLOCK + 1):
            if (name, block) in self._verified:
                continue
            at = block * BLOCK
            data = self.storage.read(name, at, min(BLOCK, facts.nbytes - at))
            if hashlib.sha256(data).hexdigest() != facts.sha256[block]:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is damaged: it is not what was written.",
                    expected=f"sha256 {facts.sha256[block][:16]}...",
                    got=f"another, of bytes {at} to {at + len(data)} of {self.storage.called(name)}",
                    remedy="load another checkpoint (load(..., fall_back=True) takes the newest whole one)",
                )
            self._verified.add((name, block))

    def check(self, copies: Iterable[Copy], hashes: bool = True) -> None:
        """Look at every record that is going to be read.

        Raises:
            DamagedCheckpointError: one is not what the metadata says, or has another hash than the manifest says.
        """
        for copy in copies:
            if hashes:
                self.verify(copy.stored.file, copy.stored.begin, copy.stored.nbytes)
            self._record(copy.stored, copy.entry)

    def fill(self, copies: Iterable[Copy]) -> None:
        """Read what `check` looked at into its targets.

        Raises:
            DamagedCheckpointError: a file cannot be read any more.
        """
        for copy in copies:
            self._fill(copy)

    def _fill(self, copy: Copy) -> None:
        record, target, sizes = self._record(copy.stored, copy.entry), copy.target, tuple(copy.target.shape)
        if record.elements is None:
            found = _loaded(self._bytes(copy.stored), copy.stored, copy.entry)
            for dim, (begin, extent) in enumerate(zip(copy.begin, sizes, strict=True)):
                found = found.narrow(dim, begin, extent)
            target.copy_(found)
            return
        strides = dense_strides(copy.stored.sizes, tuple(range(len(sizes))))
        first = sum(a * b for a, b in zip(copy.begin, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        item = copy.entry.dtype.itemsize
        file, begin, nbytes = copy.stored.file, record.elements + first * item, (last - first + 1) * item
        dense = last - first + 1 == target.numel()
        if dense and target.device.type == "cpu" and target.dtype == copy.entry.dtype and target.is_contiguous():
            self.storage.read_into(file, begin, _bytes_of(target))
            return
        scratch = torch.empty(nbytes // item, dtype=copy.entry.dtype)
        self.storage.read_into(file, begin, _bytes_of(scratch))
        target.copy_(scratch.as_strided(sizes, strides))

    def value(self, name: str) -> Any:
        """A value that is no tensor, as DCP's programs keep it. `weights_only`: nothing is executed."""
        stored = self.index.values[name]
        self.verify(stored.file, stored.begin, stored.nbytes)
        return _loaded(self._bytes(stored), stored, None)

    def _bytes(self, stored: Stored) -> bytes:
        return self.storage.read(stored.file, stored.begin, stored.nbytes)

    def _record(self, stored: Stored, entry: Entry) -> _Record:
        key = stored.file, stored.begin
        if key not in self._records:
            window = _Window(self.storage, stored)
            self._records[key] = _parse(window, stored, entry)
        return self._records[key]

    def close(self) -> None:
        """Close the files."""
        self.storage.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Records.


@dataclass(frozen=True)
class _Record:
    """Where in the file a record's elements begin; None if they do not lie there row by row."""

    elements: int | None


class _Window(io.RawIOBase):
    """A record as a file."""

    def __init__(self, storage: Storage, stored: Stored) -> None:
        self.storage, self.file, self.begin, self.nbytes = storage, stored.file, stored.begin, stored.nbytes
        self._at = 0

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
        data = self.storage.read(self.file, self.begin + self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _Shape(pickle.Unpickler):
    """Reads what `data.pkl` says of a tensor: `(dtype, offset, size, stride)`; whatever else it says is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: (storage, offset, tuple(size), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or key != "0":
            raise pickle.UnpicklingError(str(pid))
        return dtype, int(numel)


def _parse(window: _Window, stored: Stored, entry: Entry) -> _Record:
    try:
        with zipfile.ZipFile(window) as archive:
            files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        data = files["data/0"]
        told = _Shape(io.BytesIO(_member(window, files["data.pkl"]))).load()
        order = _member(window, files["byteorder"]) if "byteorder" in files else b"little"
        (dtype, numel), offset, size, stride = told
        begin = _begin(window, data)
    except pickle.UnpicklingError:
        return _Record(None)  # not a plain tensor: torch's own reader, which executes nothing, says what it is
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, IndexError, EOFError, struct.error) as error:
        raise _bad(stored, f"{type(error).__name__}: {error}") from error
    if dtype != entry.dtype or size != stored.sizes:
        raise _bad(stored, f"a tensor of {dtype} and shape {size}, not {entry.dtype} and {stored.sizes}")
    plain = stride == dense_strides(size, tuple(range(len(size)))) or math.prod(size) <= 1
    if not plain or offset or data.compress_type or order != b"little" or data.file_size != numel * dtype.itemsize:
        return _Record(None)
    if numel < math.prod(size):
        raise _bad(stored, f"{numel} elements")
    return _Record(window.begin + begin)


def _begin(window: _Window, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin in the record.

    Raises:
        ValueError: the record says so, and cannot.
    """
    header = window.storage.read(window.file, window.begin + info.header_offset, _HEADER.size)
    mark, name, extra = _HEADER.unpack(header)
    begin: int = info.header_offset + _HEADER.size + name + extra
    if mark != b"PK\3\4" or begin + info.compress_size > window.nbytes:
        raise ValueError(f"{info.filename} lies beyond the record's end")
    return begin


def _member(window: _Window, info: zipfile.ZipInfo) -> bytes:
    """A small member's bytes. (`ZipFile.read` would compare its crc32, which is left out: files are hashed.)"""
    if info.compress_type or info.file_size > _MOST_BYTES or info.file_size != info.compress_size:
        raise ValueError(f"{info.filename} is compressed, or of {info.file_size} bytes")
    return window.storage.read(window.file, window.begin + _begin(window, info), info.file_size)


def _bad(stored: Stored, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "A record of a checkpoint is not what its metadata says.",
        parameter=stored.name,
        expected=f"shape {stored.sizes} at byte {stored.begin} of {stored.file}",
        got=got,
    )


def _loaded(data: bytes, stored: Stored, entry: Entry | None) -> Any:
    """A record, by torch's own reader."""
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _bad(stored, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if entry is not None and (not isinstance(found, torch.Tensor) or tuple(found.shape) != stored.sizes):
        raise _bad(stored, f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}")
    return found


# Bytes.


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().view(1)
    whole: Any = flat.view(torch.uint8).numpy()
    return memoryview(whole)


def pieces_as_asked(entries: dict[str, Entry], names: Sequence[str]) -> list[Piece]:
    """A piece for each whole tensor, in new memory on the CPU."""
    return [
        Piece(n, e.shape, (0,) * len(e.shape), e.shape, torch.empty(e.shape, dtype=e.dtype))
        for n in names
        for e in (entries[n],)
    ]
