"""Files of `torch.save`: read as data, written tensor by tensor into space that `torch.save` reserved.

{"weight": tensor, ...}                             a plain state dict: names begin with "model." here
{"model": {...}, "optimizer": {...}, "epoch": 3}    and what else training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import skip_data

from ...errors import CheckpointError
from ..in_place import put_in_place
from ..source import Entry, Sink, Source
from ..write import bytes_of
from .archive import Archive
from .built import Stored
from .state import State, leaves, nested, replaced

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
            state = State(str(path), self._archive.mapped)
            state.add_all(self._archive.root)
            for name, stored in state.tensors.items():
                self._archive.check(name, stored)
        except BaseException:
            self._archive.close()
            raise
        first: dict[Any, str] = {}
        self.ties = {
            name: known for name, one in state.tensors.items() if (known := first.setdefault(one, name)) != name
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
        values: what is none of them: plain Python values, and tensors in these.
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
        self._written: set[str] = set()
        self._places: dict[str, tuple[str, int, int]] = {}  # name to record, its position, its size in bytes
        self._inner: dict[str, torch.Tensor] = {}
        self._file: IO[bytes] | None = None
        try:
            self._reserve(dict(entries), values, ties or {})
            self._file = self._saving.open("r+b")
            for name, tensor in self._inner.items():
                self.write(name, tensor)
        except BaseException:
            self.abort()
            raise

    def _reserve(self, entries: dict[str, Entry], values: Mapping[str, Any], ties: Mapping[str, str]) -> None:
        """Let `torch.save` write all but the elements, of tensors in a file of nothing but holes."""
        named = replaced(values, self._note)
        entries |= {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in self._inner.items()}
        total = sum(_aligned(entry.nbytes) for entry in entries.values()) + ALIGNMENT
        with tempfile.TemporaryFile(dir=self._path.parent) as holes:
            holes.truncate(total)
            self._save(mmap.mmap(holes.fileno(), total), entries, named, ties)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor among the values a name, by which it is written."""
        self._inner[f"\0{len(self._inner)}"] = tensor.detach()
        return torch.empty(0, device="cpu")

    def _save(
        self, memory: mmap.mmap, entries: Mapping[str, Entry], values: Mapping[str, Any], ties: Mapping[str, str]
    ) -> None:
        start, tensors = 0, {}
        for name, entry in entries.items():
            tensors[name] = _in_memory(memory, start, entry)
            start += _aligned(entry.nbytes)
        inner = iter([name for name in tensors if name in self._inner])
        values = replaced(values, lambda _: tensors[next(inner)])
        shown = {name: tensor for name, tensor in tensors.items() if name not in self._inner}
        whole = nested(shown | {name: tensors[known] for name, known in ties.items()}, values)
        with skip_data():
            torch.save(whole, self._saving)
        names = {id(tensor): name for name, tensor in tensors.items()}
        with contextlib.closing(Archive(self._saving)) as archive:
            written = dict(leaves(archive.root))
            for path, leaf in leaves(whole):
                if isinstance(leaf, torch.Tensor):
                    stored = written[path]
                    assert isinstance(stored, Stored)
                    self._places[names[id(leaf)]] = (stored.key, *archive.place(stored))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        assert self._file is not None
        _, position, size = self._places[name]
        data = bytes_of(tensor)
        if len(data) != size:
            raise CheckpointError(
                "A tensor is of another size than was said.", parameter=name, expected=size, got=len(data)
            )
        self._file.seek(position)
        self._file.write(data)
        self._written.add(name)

    def finish(self) -> None:
        assert self._file is not None
        missing = [name for name in self._places if name not in self._written]
        if missing:
            raise CheckpointError("Not all tensors were written.", parameter=missing[0])
        self._file.flush()
        self._file.close()
        put_in_place(self._saving, self._path)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self._saving.unlink(missing_ok=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _in_memory(memory: mmap.mmap, start: int, entry: Entry) -> torch.Tensor:
    """A tensor of storage of its own, whose elements nobody reads."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=entry.dtype, count=entry.numel, offset=start).reshape(entry.shape)
