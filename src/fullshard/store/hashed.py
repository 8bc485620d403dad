"""Files hashed while they are written: one SHA-256 of every 16 MiB, so that a reader checks only what it reads."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK = 16 * 2**20
"""Bytes of a file that one hash is of."""


@dataclass(frozen=True)
class FileFacts:
    """What a file must be.

    Attributes:
        nbytes: its length.
        sha256: of every `BLOCK` bytes, in hexadecimal.
    """

    nbytes: int
    sha256: tuple[str, ...]


class Hashed(io.RawIOBase):
    """A stream that passes on what is written to it, and hashes every `BLOCK` bytes.

    Args:
        below: what is written to.
        progress: called with the number of bytes after each write.

    Attributes:
        error: what `below` raised first: writers in native code report what followed from it.
    """

    def __init__(self, below: Any, progress: Callable[[int], None] | None = None) -> None:
        self._below, self._progress = below, progress
        self._hash, self._room = hashlib.sha256(), BLOCK
        self._hashes: list[str] = []
        self._at = 0
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            now = rest[: self._room]
            try:
                wrote = self._below.write(now)
                if wrote == 0:
                    raise OSError(errno.EIO, "nothing was written")
            except Exception as error:
                self.error = self.error or error
                raise
            now = now[: len(now) if wrote is None else wrote]
            self._hash.update(now)
            self._at += len(now)
            self._room -= len(now)
            if not self._room:
                self._next_block()
            rest = rest[len(now) :]
        if self._progress is not None:
            self._progress(len(view))
        return len(view)

    def _next_block(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash, self._room = hashlib.sha256(), BLOCK

    def facts(self) -> FileFacts:
        """Of what was written. Call it once, at the end."""
        if self._room != BLOCK:
            self._next_block()
        return FileFacts(self._at, tuple(self._hashes))

    def sync(self) -> None:
        """Wait until it is on the disk, if there is one."""
        self._below.flush()
        try:
            number = self._below.fileno()
        except (AttributeError, OSError):  # a remote file: closing it is what makes it last
            return
        os.fsync(number)
