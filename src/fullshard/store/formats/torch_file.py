"""Files of `torch.save`: decoded as data, and written tensor by tensor into space that `torch.save` reserved.

{"weight": tensor, ...}                             a plain state dict: entries get the prefix "model."
{"model": {...}, "optimizer": {...}, "epoch": 3}    and other dicts that training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import skip_data

from ..in_place import put_in_place
from ..source import Sink, Source, TensorEntry
from ..write import bytes_of
from .archive import Archive
from .state import StateContents, leaves, nested, replaced

SUFFIXES = (".pt", ".pth", ".bin")
SAVING = ".saving"
"""The last suffix of an unfinished file."""


class TorchFileSource(Source):
    """A file of `torch.save` in the zip format (PyTorch 1.6 and later). Nothing in it is executed.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is damaged, or contains anything but tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        self._archive = Archive(path)
        try:
            state = StateContents(str(path), self._archive.mapped)
            state.add_all(self._archive.root)
            for name, stored in state.tensors.items():
                self._archive.check(name, stored)
        except BaseException:
            self._archive.close()
            raise
        first_names: dict[Any, str] = {}
        originals = {name: first_names.setdefault(stored, name) for name, stored in state.tensors.items()}
        self.ties = {name: original for name, original in originals.items() if name != original}
        self._stored = {name: stored for name, stored in state.tensors.items() if name not in self.ties}
        self.entries = {name: TensorEntry(stored.shape, stored.dtype) for name, stored in self._stored.items()}
        self.values = state.values

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return self._archive.read(self._stored[name], offsets, sizes)

    def files_of(self, name: str) -> list[str]:
        return [self._archive.path.name]

    def close(self) -> None:
        self._archive.close()


class TorchFileSink(Sink):
    """A file of `torch.save`: a plain state dict if there is only a model, else a dict with `model`, `optimizer`, ...

    `torch.save` writes the file with empty space for the elements, which are then written tensor by tensor. This takes
    the memory of a single tensor.

    Args:
        path: the file. Until `finish`, `.saving` is appended to its name.
        entries: all tensors.
        values: everything else: plain Python values, which may contain tensors.
        ties: see `Source`. Both names are saved as the same tensor.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry],
        values: Mapping[str, Any],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self._path, self._saving = path, path.with_name(path.name + SAVING)
        self._places: dict[str, tuple[int, int]] = {}  # by name: position and size of the record, in bytes
        self._file: IO[bytes] | None = None
        in_values = [leaf.detach() for _, leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        unnamed = {f"\0{i}": tensor for i, tensor in enumerate(in_values)}
        super().__init__({**entries, **{n: TensorEntry(tuple(t.shape), t.dtype) for n, t in unnamed.items()}})
        try:
            self._reserve(entries, unnamed, values, ties or {})
            self._file = self._saving.open("r+b")
            for name, tensor in unnamed.items():
                self.write(name, tensor)
        except BaseException:
            self.abort()
            raise

    def _reserve(
        self, entries: Iterable[str], unnamed: Iterable[str], values: Mapping[str, Any], ties: Mapping[str, str]
    ) -> None:
        """Write everything except the elements."""
        spaces = {name: _space(entry) for name, entry in self._unwritten.items()}
        in_order = iter([spaces[name] for name in unnamed])
        values = replaced(values, lambda _: next(in_order))
        root = nested({name: spaces[ties.get(name, name)] for name in (*entries, *ties)}, values)
        with skip_data():
            torch.save(root, self._saving)
        names = {id(space): name for name, space in spaces.items()}
        with contextlib.closing(Archive(self._saving)) as archive:
            written = dict(leaves(archive.root))
            for path, leaf in leaves(root):
                if isinstance(leaf, torch.Tensor):
                    self._places[names[id(leaf)]] = archive.place(written[path])

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        assert self._file is not None
        position, nbytes = self._places[name]
        data = bytes_of(tensor)
        assert len(data) == nbytes
        self._file.seek(position)
        self._file.write(data)

    def _end(self) -> None:
        assert self._file is not None
        self._file.close()
        put_in_place(self._saving, self._path)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self._saving.unlink(missing_ok=True)


def _space(entry: TensorEntry) -> torch.Tensor:
    """A tensor with its own storage, whose memory is allocated but never touched."""
    storage = torch.UntypedStorage(entry.nbytes, device="cpu")
    return torch.empty(0, dtype=entry.dtype, device="cpu").set_(storage, 0, (entry.numel,), (1,)).view(entry.shape)
