"""Files of `torch.save`: read as data, written tensor by tensor into space that `torch.save` reserved.

{"weight": tensor, ...}                             a plain state dict: names begin with "model." here
{"model": {...}, "optimizer": {...}, "epoch": 3}    and what else training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import skip_data

from ...errors import CheckpointError
from ..source import Entry, Sink, Source
from .archive import Archive
from .state import nested, state_of
from .zip_sums import put_sums

SAVING = ".saving"
"""What the name of a file that is not finished ends with."""
ALIGNMENT = 64  # bytes


class TorchFileSource(Source):
    """A file of `torch.save` in the zip format (PyTorch 1.6 and later). Nothing in it is executed.

    Args:
        path: of the file.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        self._archive = Archive(path)
        try:
            state = state_of(self._archive.root, str(path))
            for name, stored in state.tensors.items():
                self._archive.check(name, stored)
        except BaseException:
            self._archive.close()
            raise
        first: dict[Any, str] = {}
        self.ties = {
            name: known for name, stored in state.tensors.items() if (known := first.setdefault(stored, name)) != name
        }
        self._stored = {name: stored for name, stored in state.tensors.items() if name not in self.ties}
        self.entries = {name: Entry(stored.shape, stored.dtype) for name, stored in self._stored.items()}
        self.values = state.values

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return self._archive.read(self._stored[name], offsets, sizes)

    def close(self) -> None:
        self._archive.close()


class TorchFileSink(Sink):
    """A file of `torch.save`. A model alone is a plain state dict; with more, a dict with `model`, `optimizer`, ...

    `torch.save` writes the file without the tensors' elements, and those are put in where it left space for them: no
    more memory is taken than for one tensor.

    Args:
        path: of the file; until `finish` it is beside it, with `.saving` at the end.
        entries: all tensors.
        values: what is no tensor: plain Python values.
        ties: other names of entries: saved as one tensor.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._saving = path.with_name(path.name + SAVING)
        self._entries = entries
        self._sums: dict[str, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        try:
            self._reserve(values, ties or {})
            with contextlib.closing(Archive(self._saving)) as archive:
                state = state_of(archive.root, str(path))
                self._places = {name: (one.key, *archive.place(one)) for name, one in state.tensors.items()}
            self._file = self._saving.open("r+b")
        except BaseException:
            self.abort()
            raise

    def _reserve(self, values: Mapping[str, Any], ties: Mapping[str, str]) -> None:
        """Let `torch.save` write all but the elements, of tensors in a file of nothing but holes."""
        starts, total = {}, 0
        for name, entry in self._entries.items():
            starts[name] = total
            total += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        with tempfile.TemporaryFile(dir=self._path.parent) as holes:
            holes.truncate(max(total, 1))
            with mmap.mmap(holes.fileno(), max(total, 1)) as memory:
                tensors = {name: _in_memory(memory, starts[name], entry) for name, entry in self._entries.items()}
                tensors |= {name: tensors[known] for name, known in ties.items()}
                whole = nested(tensors, values)
                with skip_data():
                    torch.save(whole, self._saving)
                del tensors, whole  # views of the memory, which cannot be closed while there are any

    def write(self, name: str, tensor: torch.Tensor) -> None:
        assert self._file is not None
        key, position, size = self._places[name]
        data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if len(data) != size:
            raise CheckpointError(
                "A tensor is of another size than was said.", parameter=name, expected=size, got=len(data)
            )
        self._file.seek(position)
        self._file.write(data)
        self._sums[f"data/{key}"] = (position + size, zlib.crc32(data))

    def finish(self) -> None:
        assert self._file is not None
        missing = self._entries.keys() - {
            name for name in self._entries if f"data/{self._places[name][0]}" in self._sums
        }
        if missing:
            raise CheckpointError("Not every tensor was written.", parameter=min(missing))
        put_sums(self._file, self._sums)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._saving.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self._saving.unlink(missing_ok=True)


def _in_memory(memory: mmap.mmap, start: int, entry: Entry) -> torch.Tensor:
    """A tensor of storage of its own, whose elements nobody reads."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(memory, dtype=entry.dtype, count=entry.numel, offset=start).reshape(entry.shape)
