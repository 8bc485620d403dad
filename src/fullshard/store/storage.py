"""The files of a checkpoint folder as bytes: on a disk, or at an fsspec address."""

from __future__ import annotations

import contextlib
import io
import math
import os
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ConfigError, DamagedCheckpointError
from .hashed import CHUNK
from .names import TensorEntry

MANIFEST = "manifest.json"
"""The file that makes a checkpoint complete; see manifest.py."""
METADATA = ".metadata"
"""The file that makes a DCP folder complete; see metadata.py."""


@dataclass(frozen=True)
class Stored:
    """Where a file stores a rectangle of a tensor, or a value.

    Attributes:
        name: of the tensor or value.
        offsets, sizes: the rectangle; both empty for a value.
        file, begin, nbytes: the bytes of its elements; in a DCP folder, those of its record.
        stride: of the elements in the file; None: row by row.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    nbytes: int
    stride: tuple[int, ...] | None = None


def checked_part(
    name: str, entry: TensorEntry, offsets: tuple[int, ...], sizes: tuple[int, ...], file: str, begin: int, nbytes: int
) -> Stored:
    """Describe a stored rectangle.

    Raises:
        ValueError: it is not within the tensor, or has fewer bytes than its elements need.
    """
    is_inside = len(offsets) == len(sizes) == len(entry.shape) and all(
        at >= 0 and extent >= 0 and at + extent <= whole
        for at, extent, whole in zip(offsets, sizes, entry.shape, strict=True)
    )
    if not is_inside:
        raise ValueError(f"{name!r} of shape {entry.shape} has a part at {offsets} of {sizes}")
    if math.prod(sizes) * entry.dtype.itemsize > nbytes:
        raise ValueError(f"a part of {name!r} of {sizes} has only {nbytes} bytes")
    return Stored(name, offsets, sizes, file, begin, nbytes)


def check_parts(name: str, entry: TensorEntry, parts: Sequence[Stored], total: int) -> None:
    """Check the total size of a tensor's rectangles, before anyone allocates memory for it.

    Args:
        total: bytes of all files.

    Raises:
        DamagedCheckpointError: they have more or fewer elements than the tensor.
        ValueError: they have more bytes than all files.
    """
    numel = sum(math.prod(part.sizes) for part in parts)
    if numel != math.prod(entry.shape):
        raise DamagedCheckpointError(
            "A checkpoint does not hold all elements of a tensor, or holds some twice.",
            parameter=name,
            expected=f"{math.prod(entry.shape)} elements, of shape {entry.shape}",
            got=f"{numel}",
        )
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > total:
        raise ValueError(f"{name!r} has {nbytes} bytes, more than all files")


class Storage(ABC):
    """The files of a folder, for reading. A file is opened when it is first read.

    Attributes:
        sizes: in bytes, by name. Links are left out.
        allocated: bytes allocated on the disk, by name; fewer than the size for a sparse file.
    """

    sizes: dict[str, int]
    allocated: dict[str, int]

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    @abstractmethod
    def _opened(self, name: str) -> Any:
        """Open a file. Raises OSError."""

    @abstractmethod
    def location(self, name: str) -> str:
        """The path or address of a file, for error messages."""

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` of a file.

        Raises:
            DamagedCheckpointError: the file is too short, or cannot be read.
        """
        with _located(self.location(name)):
            if name not in self._open:
                self._open[name] = self._opened(name)
        read_into(self._open[name], begin, target, self.location(name))

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        """The `nbytes` bytes of a file from `begin`; raises as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(name, begin, memoryview(data))
        return bytes(data)

    def keep(self, name: str, begin: int, data: memoryview) -> None:  # noqa: B027, optional to implement
        """Cache verified bytes of a file, if reading them again would be slow.

        Args:
            begin: a multiple of `CHUNK`; `data` has `CHUNK` bytes, or ends where the file does.
        """

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class LocalStorage(Storage):
    """A folder on a disk, cached by the operating system. See `Storage`.

    Raises:
        DamagedCheckpointError: the folder does not exist; or its manifest is a link, which `sizes` would leave out, so
            that nothing would be verified.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        if not path.is_dir():
            raise DamagedCheckpointError("There is no such checkpoint.", got=str(path), topic="checkpoint-missing")
        stats = {p.name: p.stat() for p in path.iterdir() if p.is_file() and not p.is_symlink()}
        if MANIFEST not in stats and os.path.lexists(path / MANIFEST):
            raise DamagedCheckpointError(
                "A checkpoint's manifest is a link, or something else that is not a file.", got=str(path / MANIFEST)
            )
        self.sizes = {name: stat.st_size for name, stat in stats.items()}
        allocated = {name: stat.st_blocks * 512 for name, stat in stats.items()}
        self.allocated = allocated if any(allocated.values()) else self.sizes  # some file systems report no blocks

    def _opened(self, name: str) -> io.FileIO:
        return open_file(self._path / name)

    def location(self, name: str) -> str:
        return str(self._path / name)


class NamedFiles(Storage):
    """Files of one checkpoint at any paths, opened one by one. See `Storage`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = self.allocated = {}
        self._paths: dict[str, Path] = {}

    def open(self, path: Path, real: Path | None = None) -> io.FileIO:
        """Open a file, which is named after `path`.

        Args:
            real: its path with links resolved, which must not be a link; None: links are followed.

        Raises:
            DamagedCheckpointError: see `open_file`.
            OSError: see `open_file`.
        """
        file = self._open[path.name] = open_file(path if real is None else real, follow_links=real is None)
        self._paths[path.name], self.sizes[path.name] = path, os.fstat(file.fileno()).st_size
        return file

    def _opened(self, name: str) -> Any:
        raise ConfigError("A checkpoint was closed and then read.", got=self.location(name))

    def location(self, name: str) -> str:
        return str(self._paths[name])


class RemoteStorage(Storage):
    """A folder at an fsspec address, such as `s3://bucket/run/step-000000100`. See `Storage`.

    Verified bytes are cached in a temporary file while there is room: they are downloaded once, and the bytes used are
    the bytes verified.

    Raises:
        DamagedCheckpointError: the folder does not exist.
        ConfigError: fsspec or its package for this kind of address is not installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._fs, self._path = file_system(url)
        self._url = url
        self._cache: IO[bytes] | None = None
        self._cached_at: dict[tuple[str, int], int] = {}  # file and chunk number -> offset in `_cache`, in bytes
        if not self._fs.isdir(self._path):
            raise DamagedCheckpointError("There is no such checkpoint.", got=url, topic="checkpoint-missing")
        listed = self._fs.ls(self._path, detail=True)
        self.sizes = {f["name"].rpartition("/")[2]: int(f["size"]) for f in listed if f["type"] == "file"}
        self.allocated = self.sizes

    def _opened(self, name: str) -> Any:
        return self._fs.open(f"{self._path}/{name}", "rb")

    def location(self, name: str) -> str:
        return f"{self._url}/{name}"

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        end = begin + len(target)
        chunks = range(begin // CHUNK, -(-end // CHUNK))
        if self._cache is None or not all((name, chunk) in self._cached_at for chunk in chunks):
            super().read_into(name, begin, target)
            return
        for chunk in chunks:
            first, last = max(begin, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            offset = self._cached_at[name, chunk] + first - chunk * CHUNK
            read_into(self._cache, offset, target[first - begin : last - begin], self.location(name))

    def keep(self, name: str, begin: int, data: memoryview) -> None:
        offset = len(self._cached_at) * CHUNK
        with contextlib.suppress(OSError):  # no room
            if self._cache is None:
                self._cache = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed in `close`
            if os.pwrite(self._cache.fileno(), data, offset) == len(data):
                self._cached_at[name, begin // CHUNK] = offset

    def close(self) -> None:
        super().close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        ConfigError: see `RemoteStorage`.
    """
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "An address cannot be used.",
            got=f"{url}: {error}",
            remedy="pip install fsspec, and the package that the error names",
        ) from error
    return fs, str(path).rstrip("/")


def open_file(path: Path, follow_links: bool = False) -> io.FileIO:
    """Open a file for unbuffered reading. Never blocks, as opening a pipe without a writer would.

    Raises:
        DamagedCheckpointError: `path` is a pipe, a device or a folder.
        OSError: it cannot be opened, or is a link and `follow_links` is False.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return io.FileIO(fd)
    os.close(fd)
    raise DamagedCheckpointError(
        "A checkpoint's file is not a regular file.",
        expected="a regular file",
        got=f"{path}, a folder, a pipe or a device",
        remedy="copy the checkpoint again from an intact copy",
    )


def read_into(file: Any, begin: int, target: memoryview, location: str) -> None:
    """Fill `target` from byte `begin` of an open file.

    Args:
        location: its path or address, for error messages.

    Raises:
        DamagedCheckpointError: the file is too short, or cannot be read.
    """
    with _located(location):
        file.seek(begin)
        done = 0
        while done < len(target):
            nbytes = file.readinto(target[done:])
            if not nbytes:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is truncated.", expected=f"{len(target) - done} more bytes", got=location
                )
            done += nbytes


@contextlib.contextmanager
def _located(location: str) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DamagedCheckpointError("A file of a checkpoint cannot be read.", got=f"{location}: {error}") from error


BUFFER = 16 * 2**20
"""Bytes to read at once, at most, where only a few elements of each row are needed."""


def read_strided(
    fill: Callable[[int, memoryview], None],
    base: int,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Read a strided tensor: its whole span at once, or a part at a time if most of a large span is not needed.

    Args:
        fill: fills memory from the file, beginning at a byte.
        base: where element 0 is in the file, in bytes.
        start, shape, stride: the elements to read, in elements. The result may have any stride.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    span = extent(shape, stride)
    if span > 2 * math.prod(shape) and span * dtype.itemsize > BUFFER:
        dim = max(range(len(shape)), key=lambda dim: (shape[dim] - 1) * stride[dim])  # the longest way in the file
        most = max(1, BUFFER // max(1, stride[dim] * dtype.itemsize))
        if most < shape[dim]:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            for index in range(0, shape[dim], most):
                count = min(most, shape[dim] - index)
                sizes = [*shape[:dim], count, *shape[dim + 1 :]]
                part = read_strided(fill, base, dtype, start + index * stride[dim], sizes, stride)
                whole.narrow(dim, index, count).copy_(part)
            return whole
    raw = torch.empty(span * dtype.itemsize, dtype=torch.uint8, device="cpu")
    fill(base + start * dtype.itemsize, memoryview(raw.numpy().data))
    return raw.view(dtype).as_strided(shape, stride)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The span from a tensor's first element to its last, in elements; its shape has no zero."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
