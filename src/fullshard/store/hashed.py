"""Files hashed while they are written: one hash of every 16 MiB, so that a reader checks only what it reads.

XXH3 of 128 bits (Y. Collet, https://xxhash.com) where the package `xxhash` is installed, else SHA-256, which takes many
times as long on a processor without instructions for it. A file's entry in the manifest says which. Both find what
chance does to a file; neither is a signature: who may write the file may write the manifest, too.
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
_SYNC_WRITE = 2  # SYNC_FILE_RANGE_WRITE of Linux (sync_file_range(2)): begin, and do not wait

BLOCK = 16 * 2**20
"""Bytes of a file that one hash is of."""
CHUNK = 2**19
"""Bytes that are written or read, and hashed, in one go: they stay in the processor's cache in between."""

KINDS: Mapping[str, Callable[[], Any] | None] = {
    "sha256": hashlib.sha256,
    "xxh3_128": None if xxhash is None else xxhash.xxh3_128,
}
"""How files may be hashed, by the name that the manifest gives it; None: not without a package that is missing."""


def new_hash(kind: str, file: str) -> Any:
    """An object with `update` and `hexdigest`.

    Args:
        file: what it is for, for the error.

    Raises:
        CheckpointError: it cannot be made here.
    """
    new = KINDS.get(kind)
    if new is None:
        raise CheckpointError(
            "A checkpoint's files cannot be checked here: the package that makes their hashes is not installed.",
            expected=f"hashes of kind {kind}, of {file}",
            got="no package xxhash",
            remedy="pip install xxhash, or leave hashes out: load(check=False), fullshard inspect --no-hashes",
        )
    return new()


@dataclass(frozen=True)
class FileFacts:
    """What a file must be.

    Attributes:
        nbytes: its length.
        hashes: of every `BLOCK` bytes, in hexadecimal.
        kind: of `KINDS`.
    """

    nbytes: int
    hashes: tuple[str, ...]
    kind: str = "sha256"


class Hashed:
    """A stream that passes on what is written to it, and hashes every `BLOCK` bytes.

    Args:
        below: what is written to.
        progress: called with the number of bytes after each write.
    """

    def __init__(self, below: Any, progress: Callable[[int], None] | None = None) -> None:
        self._below, self._progress = below, progress
        self._kind = "sha256" if KINDS["xxh3_128"] is None else "xxh3_128"
        self._hash, self._room = new_hash(self._kind, "a file"), BLOCK
        self._hashes: list[str] = []
        self._at = 0

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            now = rest[: min(self._room, CHUNK)]
            wrote = self._below.write(now)
            if wrote == 0:
                raise OSError(errno.EIO, "nothing was written")
            now = now[: len(now) if wrote is None else wrote]
            self._hash.update(now)
            self._at += len(now)
            self._room -= len(now)
            if not self._room:
                self._next_block()
                self._start_writing()
            rest = rest[len(now) :]
        if self._progress is not None:
            self._progress(len(view))
        return len(view)

    def _next_block(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash, self._room = new_hash(self._kind, "a file"), BLOCK

    def facts(self) -> FileFacts:
        """Of what was written. Call it once, at the end."""
        if self._room != BLOCK:
            self._next_block()
        return FileFacts(self._at, tuple(self._hashes), self._kind)

    def _start_writing(self) -> None:
        """Let the last block go to the disk while others are made: `sync` has the less to wait for."""
        number = self._descriptor()
        if number is not None and _sync_file_range is not None:
            _sync_file_range(number, ctypes.c_int64(self._at - BLOCK), ctypes.c_int64(BLOCK), _SYNC_WRITE)

    def sync(self) -> None:
        """Wait until it is on the disk, if there is one."""
        self._below.flush()
        number = self._descriptor()
        if number is not None:
            os.fsync(number)

    def _descriptor(self) -> int | None:
        """Of the file; None of a remote one: closing it is what makes it last."""
        try:
            return int(self._below.fileno())
        except (AttributeError, OSError):
            return None
