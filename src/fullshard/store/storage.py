"""The files of one checkpoint folder as bytes: on a disk, or behind an fsspec address."""

from __future__ import annotations

import io
import math
import os
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ConfigError, DamagedCheckpointError
from .hashed import CHUNK
from .source import Entry

MANIFEST = "manifest.json"
"""The file that makes a checkpoint whole; see manifest.py."""


@dataclass(frozen=True)
class Stored:
    """One rectangle of a tensor in a file, or a value.

    Attributes:
        name: of the tensor.
        offsets, sizes: the rectangle; both empty for a value.
        file, begin, nbytes: where its elements lie, row by row; in a folder of DCP's, its record.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


def checked_part(
    name: str, entry: Entry, offsets: tuple[int, ...], sizes: tuple[int, ...], file: str, begin: int, nbytes: int
) -> Stored:
    """One rectangle, which must lie within the tensor and have as many bytes as its elements need.

    Raises:
        ValueError: it does not, or has not.
    """
    fits = len(offsets) == len(sizes) == len(entry.shape) and all(
        at >= 0 and extent >= 0 and at + extent <= whole
        for at, extent, whole in zip(offsets, sizes, entry.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name!r} of shape {entry.shape} has a part at {offsets} of {sizes}")
    if math.prod(sizes) * entry.dtype.itemsize > nbytes:
        raise ValueError(f"a part of {name!r} of {sizes} is kept in {nbytes} bytes")
    return Stored(name, offsets, sizes, file, begin, nbytes)


def check_parts(name: str, entry: Entry, parts: Sequence[Stored], total: int | None) -> None:
    """Let a tensor's rectangles have as many elements as it, in no more bytes than there are: memory may be taken then.

    Args:
        total: bytes of all files; None if they are not known.

    Raises:
        DamagedCheckpointError: they have more elements, or fewer.
        ValueError: they have more bytes.
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
    if total is not None and nbytes > total:
        raise ValueError(f"{name!r} is kept in {nbytes} bytes, more than all files have")


class Storage(ABC):
    """The files of a folder, for reading. Each is opened when it is first read.

    Attributes:
        sizes: in bytes, by name. Links are left out.
        allocated: bytes that files take on the disk, by name: a file of holes has a size and takes nothing.
    """

    sizes: dict[str, int]
    allocated: dict[str, int]

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    @abstractmethod
    def _opened(self, name: str) -> Any:
        """Open a file. Raises OSError."""

    @abstractmethod
    def called(self, name: str) -> str:
        """The path or address of a file, for errors."""

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` of a file.

        Raises:
            DamagedCheckpointError: the file is too short, or cannot be read.
        """
        with _reported(self.called(name)):
            if name not in self._open:
                self._open[name] = self._opened(name)
        read_into(self._open[name], begin, target, self.called(name))

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        """The `nbytes` bytes of a file from `begin`; raises as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(name, begin, memoryview(data))
        return bytes(data)

    def keep(self, name: str, begin: int, data: memoryview) -> None:  # noqa: B027, most have nothing to keep
        """Keep bytes of a file whose hash was verified, if reading them again would be slow.

        Args:
            begin: a multiple of `CHUNK`; `data` has `CHUNK` bytes, or ends where the file does.
        """

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class LocalStorage(Storage):
    """A folder on a disk; the page cache keeps what was read. See `Storage`.

    Raises:
        DamagedCheckpointError: there is no such folder; or its manifest is a link: without one files would be taken as
            they are.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        if not path.is_dir():
            raise DamagedCheckpointError("There is no such checkpoint.", got=str(path), topic="checkpoint-missing")
        if os.path.lexists(path / MANIFEST) and not (
            (path / MANIFEST).is_file() and not (path / MANIFEST).is_symlink()
        ):
            raise DamagedCheckpointError(
                "A checkpoint's manifest is a link, or something else that is not a file.", got=str(path / MANIFEST)
            )
        stats = {p.name: p.stat() for p in path.iterdir() if p.is_file() and not p.is_symlink()}
        self.sizes = {name: stat.st_size for name, stat in stats.items()}
        allocated = {name: stat.st_blocks * 512 for name, stat in stats.items()}
        self.allocated = allocated if any(allocated.values()) else self.sizes  # some file systems do not say

    def _opened(self, name: str) -> io.FileIO:
        return open_file(self._path / name)

    def called(self, name: str) -> str:
        return str(self._path / name)


class RemoteStorage(Storage):
    """A folder behind an address that fsspec knows, such as `s3://bucket/run/step-000000100`. See `Storage`.

    Bytes whose hash was verified are kept in a temporary file while there is room: they cross the network once, and
    the bytes used are the bytes verified.

    Raises:
        DamagedCheckpointError: there is no such folder.
        ConfigError: fsspec, or what it needs for this kind of address, is not installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._fs, self._path = file_system(url)
        self._url = url
        self._cache: IO[bytes] | None = None
        self._places: dict[tuple[str, int], int] = {}  # file and chunk: where it lies in `_cache`, in bytes
        if not self._fs.isdir(self._path):
            raise DamagedCheckpointError("There is no such checkpoint.", got=url, topic="checkpoint-missing")
        listed = self._fs.ls(self._path, detail=True)
        self.sizes = {f["name"].rpartition("/")[2]: int(f["size"]) for f in listed if f["type"] == "file"}
        self.allocated = self.sizes

    def _opened(self, name: str) -> Any:
        return self._fs.open(f"{self._path}/{name}", "rb")

    def called(self, name: str) -> str:
        return f"{self._url}/{name}"

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        end = begin + len(target)
        chunks = range(begin // CHUNK, -(-end // CHUNK))
        if self._cache is None or not all((name, chunk) in self._places for chunk in chunks):
            super().read_into(name, begin, target)
            return
        for chunk in chunks:
            first, last = max(begin, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            place = self._places[name, chunk] + first - chunk * CHUNK
            read_into(self._cache, place, target[first - begin : last - begin], self.called(name))

    def keep(self, name: str, begin: int, data: memoryview) -> None:
        place = len(self._places) * CHUNK
        try:
            if self._cache is None:
                self._cache = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed in `close`
            whole = os.pwrite(self._cache.fileno(), data, place) == len(data)
        except OSError:  # no room
            whole = False
        if whole:
            self._places[name, begin // CHUNK] = place

    def close(self) -> None:
        super().close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None


_ON_DISK = ("file://", "local://")
"""How addresses begin that are paths on this machine."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address for fsspec rather than one on this machine."""
    return "://" in os.fspath(path) and not os.fspath(path).startswith(_ON_DISK)


def without_scheme(path: str | os.PathLike[str]) -> str:
    """A path on this machine, which may be written as an address: `file:///data/run` is /data/run."""
    text = os.fspath(path)
    return next((text.removeprefix(scheme) for scheme in _ON_DISK if text.startswith(scheme)), text)


def file_system(url: str) -> tuple[Any, str]:
    """What fsspec has for an address: the file system, and the path in it.

    Raises:
        ConfigError: see `RemoteStorage`.
    """
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "An address cannot be used.", got=f"{url}: {error}", remedy="pip install fsspec and what it names"
        ) from error
    return fs, str(path).rstrip("/")


def open_file(path: Path, follow_links: bool = False) -> io.FileIO:
    """A file, open for unbuffered reading. Never waits, as opening a pipe without a writer would.

    Raises:
        DamagedCheckpointError: a pipe, a device or a folder is in its place.
        OSError: it cannot be opened; a link, unless these are followed.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return io.FileIO(fd)
    os.close(fd)
    raise DamagedCheckpointError(
        "Something else is in the place of a checkpoint's file.",
        expected="a regular file",
        got=f"{path}, a folder, a pipe or a device",
        remedy="copy the checkpoint again from where it was whole",
    )


def read_into(file: Any, begin: int, target: memoryview, called: str) -> None:
    """Fill `target` from byte `begin` of an open file.

    Args:
        called: its path or address, for errors.

    Raises:
        DamagedCheckpointError: the file is too short, or cannot be read.
    """
    with _reported(called):
        file.seek(begin)
        done = 0
        while done < len(target):
            nbytes = file.readinto(target[done:])
            if not nbytes:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is truncated.", expected=f"{len(target) - done} bytes more", got=called
                )
            done += nbytes


@contextmanager
def _reported(called: str) -> Iterator[None]:
    """Name the file in an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise DamagedCheckpointError("A file of a checkpoint cannot be read.", got=f"{called}: {error}") from error


# Elements.

BUFFER = 16 * 2**20
"""Bytes that are read at once for a few elements of each row."""


def read_strided(
    fill: Callable[[int, memoryview], None],
    base: int,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Read from the first element to the last; some rows at a time where far more lies there than is asked.

    Args:
        fill: fills memory from a byte of the file on.
        base: where the elements begin in the file, in bytes.
        start, shape, stride: which of them; in elements. The result may have any stride.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    span = extent(shape, stride)
    if span > 2 * math.prod(shape) and span * dtype.itemsize > BUFFER:
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        rows = max(1, BUFFER // max(1, stride[0] * dtype.itemsize))
        for row in range(0, shape[0], rows):
            some = min(rows, shape[0] - row)
            first = start + row * stride[0]
            if some == 1:
                part = read_strided(fill, base, dtype, first, shape[1:], stride[1:])
            else:
                part = read_strided(fill, base, dtype, first, (some, *shape[1:]), stride)
            whole[row : row + some] = part
        return whole
    raw = torch.empty(span * dtype.itemsize, dtype=torch.uint8, device="cpu")
    fill(base + start * dtype.itemsize, memoryview(raw.numpy().data))
    return raw.view(dtype).as_strided(shape, stride)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last; its shape has no zero."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
