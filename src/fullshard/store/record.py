"""A record of a DCP file: a tensor or a value that `torch.save` wrote, read without executing it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError, DamagedCheckpointError
from .formats.archive import Records
from .formats.state import StateContents
from .pickles import PickledTensor
from .storage import Storage, Stored

_EDGE = 1024
"""Bytes at a record's beginning and end that contain everything except its elements: read once, ahead."""


class _Window(io.RawIOBase):
    """A record as a file."""

    def __init__(self, storage: Storage, stored: Stored) -> None:
        self._storage, self._stored, self._at = storage, stored, 0
        edge = min(_EDGE, stored.nbytes)
        self._edges = {
            begin: storage.read(stored.file, stored.begin + begin, edge) for begin in (0, stored.nbytes - edge)
        }

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, self._stored.nbytes - self._at)]
        begin, self._at = self._at, self._at + len(target)
        for first, edge in self._edges.items():
            if first <= begin and self._at <= first + len(edge):
                target[:] = edge[begin - first :][: len(target)]
                return len(target)
        self._storage.read_into(self._stored.file, self._stored.begin + begin, target)
        return len(target)


def elements_in(storage: Storage, stored: Stored, dtype: torch.dtype) -> Stored:
    """Where the elements of a record's tensor are in the file.

    Args:
        dtype: of the tensor, in the metadata.

    Raises:
        DamagedCheckpointError: the record does not match the metadata.
    """
    record = _opened(storage, stored)
    tensor: PickledTensor = record.root
    if not isinstance(tensor, PickledTensor):
        raise _bad(stored, f"a {type(tensor).__name__}")
    got = tensor.dtype, tensor.shape
    if got != (dtype, stored.sizes):
        raise _bad(stored, f"a tensor of {got[0]} and shape {got[1]}, not {dtype} and {stored.sizes}")
    try:
        record.check(stored.name, tensor)
    except CheckpointError as error:
        raise _bad(stored, error) from error
    return replace(stored, begin=stored.begin + record.begin(tensor), stride=tensor.stride)


def value_in(storage: Storage, stored: Stored) -> Any:
    """Read a record of a value: plain values, and tensors in them.

    Raises:
        CheckpointError: it contains anything else.
        DamagedCheckpointError: it cannot be read.
    """
    record = _opened(storage, stored)
    try:
        return StateContents(storage.location(stored.file), record.read).plain(record.root, stored.name)
    except CheckpointError as error:
        raise _bad(stored, error) from error


def _opened(storage: Storage, stored: Stored) -> Records:
    try:
        return Records(storage.location(stored.file), _Window(storage, stored), stored.nbytes)
    except CheckpointError as error:
        raise _bad(stored, error) from error


def _bad(stored: Stored, got: object) -> CheckpointError:
    """The error for a record that cannot be read: damage, unless it is a value that is intact but not supported."""
    if isinstance(got, CheckpointError) and got.topic == "not-plain-values":
        return got
    return DamagedCheckpointError(
        "A record of a checkpoint does not match its metadata.",
        parameter=stored.name,
        expected=f"shape {stored.sizes} at byte {stored.begin} of {stored.file}",
        got=str(got).partition("\n")[0][:300],
    )
