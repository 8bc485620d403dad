"""The files of one checkpoint folder as bytes: on a disk, or behind an fsspec address."""

from __future__ import annotations

import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

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
    held = sum(math.prod(part.sizes) for part in parts)
    if held != math.prod(entry.shape):
        raise DamagedCheckpointError(
            "A checkpoint does not hold all elements of a tensor, or holds some twice.",
            parameter=name,
            expected=f"{math.prod(entry.shape)} elements, of shape {entry.shape}",
            got=f"{held}",
        )
    nbytes = sum(part.nbytes for part in parts)
    if total is not None and nbytes > total:
        raise ValueError(f"{name!r} is kept in {nbytes} bytes, more than all files have")


class Storage(Protocol):
    """Files to read.

    Attributes:
        sizes: in bytes, by name. Links are not followed, and not here.
        allocated: bytes that files take on the disk, by name: a file of holes has a size and takes nothing.
    """

    sizes: dict[str, int]
    allocated: dict[str, int]

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill `target` from a file's byte `begin` on.

        Raises:
            DamagedCheckpointError: the file ends before, or cannot be read.
        """

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        """So many bytes; raises as `read_into`."""

    def keep(self, name: str, begin: int, data: memoryview) -> None:
        """Bytes of a file that were compared with their hash, and will be used: they need not be read again.

        Args:
            begin: a multiple of `CHUNK`; `data` has as many bytes, or ends where the file does.
        """

    def called(self, name: str) -> str:
        """A file, as errors speak of it."""

    def close(self) -> None:
        """Let files go."""


class LocalStorage:
    """A folder on a disk. See `Storage`.

    Raises:
        DamagedCheckpointError: there is no such folder; or its manifest is a link: without one files would be taken as
            they are.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, int] = {}
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

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        with _told(self.called(name)):
            if name not in self._open:
                self._open[name] = open_file(self._path / name)
        read_exactly(self._open[name], begin, target, self.called(name))

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        return _read(self, name, begin, nbytes)

    def keep(self, name: str, begin: int, data: memoryview) -> None:
        """Nothing: the system's page cache has them."""

    def called(self, name: str) -> str:
        return str(self._path / name)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


class RemoteStorage:
    """A folder behind an address that fsspec knows, such as `s3://bucket/run/step-000000100`. See `Storage`.

    What was compared with its hash is kept in a temporary file, while there is room: it crosses the network once, and
    what is used is what was compared.

    Raises:
        DamagedCheckpointError: there is no such folder.
        ConfigError: fsspec, or what it needs for this kind of address, is not installed.
    """

    def __init__(self, url: str) -> None:
        self._fs, self._path = file_system(url)
        self._url = url
        self._open: dict[str, Any] = {}
        self._kept: IO[bytes] | None = None
        self._places: dict[tuple[str, int], int] = {}  # file and chunk: where it lies in `_kept`, in bytes
        if not self._fs.isdir(self._path):
            raise DamagedCheckpointError("There is no such checkpoint.", got=url, topic="checkpoint-missing")
        listed = self._fs.ls(self._path, detail=True)
        self.sizes = {f["name"].rpartition("/")[2]: int(f["size"]) for f in listed if f["type"] == "file"}
        self.allocated = self.sizes

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        if self._from_kept(name, begin, target):
            return
        with _told(self.called(name)):
            if name not in self._open:
                self._open[name] = self._fs.open(f"{self._path}/{name}", "rb")
            file = self._open[name]
            file.seek(begin)
            _fill(lambda rest, _: file.readinto(rest), target, self.called(name))

    def read(self, name: str, begin: int, nbytes: int) -> bytes:
        return _read(self, name, begin, nbytes)

    def _from_kept(self, name: str, begin: int, target: memoryview) -> bool:
        """Fill `target` from what was kept, if all of it was."""
        end = begin + len(target)
        chunks = range(begin // CHUNK, -(-end // CHUNK))
        if self._kept is None or not all((name, chunk) in self._places for chunk in chunks):
            return False
        for chunk in chunks:
            first, last = max(begin, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            place = self._places[name, chunk] + first - chunk * CHUNK
            read_exactly(self._kept.fileno(), place, target[first - begin : last - begin], self.called(name))
        return True

    def keep(self, name: str, begin: int, data: memoryview) -> None:
        place = len(self._places) * CHUNK
        try:
            if self._kept is None:
                self._kept = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed in `close`
            whole = os.pwrite(self._kept.fileno(), data, place) == len(data)
        except OSError:  # no room
            whole = False
        if whole:
            self._places[name, begin // CHUNK] = place

    def called(self, name: str) -> str:
        return f"{self._url}/{name}"

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._kept is not None:
            self._kept.close()
            self._kept = None


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


def open_file(path: Path, follow_links: bool = False) -> int:
    """File descriptor of a file to read. Never waits, as opening a pipe without a writer would.

    Raises:
        DamagedCheckpointError: a pipe, a device or a folder is in its place.
        OSError: it cannot be opened; a link, unless these are followed.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise DamagedCheckpointError(
        "Something else is in the place of a checkpoint's file.",
        expected="a regular file",
        got=f"{path}, a folder, a pipe or a device",
        remedy="copy the checkpoint again from where it was whole",
    )


def read_exactly(fd: int, begin: int, target: memoryview, called: str) -> None:
    """Fill `target` from a file's byte `begin` on.

    Raises:
        DamagedCheckpointError: the file ends before, or cannot be read.
    """
    with _told(called):
        _fill(lambda rest, at: os.preadv(fd, [rest], begin + at), target, called)


@contextmanager
def _told(called: str) -> Iterator[None]:
    """Say of which file a system's error is."""
    try:
        yield
    except OSError as error:
        raise DamagedCheckpointError("A file of a checkpoint cannot be read.", got=f"{called}: {error}") from error


def _read(storage: Storage, name: str, begin: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    storage.read_into(name, begin, memoryview(data))
    return bytes(data)


def _fill(read: Callable[[memoryview, int], int], target: memoryview, called: str) -> None:
    done = 0
    while done < len(target):
        got = read(target[done:], done)
        if not got:
            raise DamagedCheckpointError(
                "A file of a checkpoint is truncated.", expected=f"{len(target) - done} bytes more", got=called
            )
        done += got
