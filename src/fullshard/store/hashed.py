"""Hashes of files, computed during the write: one per 16 MiB, so that a reader hashes only the blocks it needs.

XXH3 of 128 bits (Y. Collet, https://xxhash.com) if the package `xxhash` is installed, else SHA-256, which is many times
slower on processors without instructions for it. The manifest says which. Both detect accidental damage; neither is a
signature: whoever can write the file can write the manifest, too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

try:
    import xxhash
except ImportError:  # an extra: checkpoints are then written with SHA-256
    xxhash = None  # type: ignore[assignment]

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
_SYNC_WRITE = 2  # SYNC_FILE_RANGE_WRITE of Linux (sync_file_range(2)): start writing, do not wait

BLOCK = 16 * 2**20
"""Bytes of a file per hash."""
CHUNK = 2**19
"""Bytes to write or read, and then hash, at once: they stay in the processor's cache in between."""

KINDS: Mapping[str, Callable[[], Any] | None] = {
    "sha256": hashlib.sha256,
    "xxh3_128": None if xxhash is None else xxhash.xxh3_128,
}
"""Constructors of hashes, by name in the manifest; None: its package is not installed."""


def new_hash(kind: str, file: str) -> Any:
    """Create a hash: an object with `update` and `hexdigest`.

    Args:
        file: the file to hash, for the error message.

    Raises:
        CheckpointError: hashes of this kind need a package that is not installed.
    """
    new = KINDS.get(kind)
    if new is None:
        raise CheckpointError(
            "A checkpoint's files cannot be verified: the package for their hashes is not installed.",
            expected=f"hashes of kind {kind}, of {file}",
            got="no package xxhash",
            remedy="pip install xxhash, or skip verification: load(check=False), fullshard inspect --no-hashes",
        )
    return new()


@dataclass(frozen=True)
class FileFacts:
    """The expected size and hashes of a file.

    Attributes:
        nbytes: the size.
        hashes: of every `BLOCK` bytes, in hexadecimal.
        kind: a key of `KINDS`.
    """

    nbytes: int
    hashes: tuple[str, ...]
    kind: str


class Hashed:
    """A stream that writes to another stream and hashes every `BLOCK` bytes.

    Args:
        below: the stream to write to.
        progress: called with the number of bytes after each write.
    """

    def __init__(self, below: Any, progress: Callable[[int], None] | None = None) -> None:
        self._below, self._progress = below, progress
        self._kind = "sha256" if KINDS["xxh3_128"] is None else "xxh3_128"
        self._hash, self._room = new_hash(self._kind, "a file"), BLOCK  # _room: bytes until the next hash
        self._hashes: list[str] = []
        self._at = 0

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            chunk = rest[: min(self._room, CHUNK)]
            written = self._below.write(chunk)
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            chunk = chunk[: len(chunk) if written is None else written]
            self._hash.update(chunk)
            self._at += len(chunk)
            self._room -= len(chunk)
            if not self._room:
                self._next_block()
                self._start_sync()
            rest = rest[len(chunk) :]
        if self._progress is not None:
            self._progress(len(view))
        return len(view)

    def _next_block(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash, self._room = new_hash(self._kind, "a file"), BLOCK

    def facts(self) -> FileFacts:
        """The size and hashes of the file. Call it once, after the last write."""
        if self._room != BLOCK:
            self._next_block()
        return FileFacts(self._at, tuple(self._hashes), self._kind)

    def _start_sync(self) -> None:
        """Start writing the last block to the disk, so that `sync` waits for less."""
        fd = self._descriptor()
        if fd is not None and _sync_file_range is not None:
            _sync_file_range(fd, ctypes.c_int64(self._at - BLOCK), ctypes.c_int64(BLOCK), _SYNC_WRITE)

    def sync(self) -> None:
        """Wait until everything is on the disk, if there is one."""
        self._below.flush()
        fd = self._descriptor()
        if fd is not None:
            os.fsync(fd)

    def _descriptor(self) -> int | None:
        """The file's descriptor; None for a remote file, which is stored when it is closed."""
        try:
            return int(self._below.fileno())
        except (AttributeError, OSError):
            return None
