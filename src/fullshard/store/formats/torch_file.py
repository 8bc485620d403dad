"""Files of `torch.save`: read as data, written tensor by tensor into space that `torch.save` reserved.

{"weight": tensor, ...}                             a plain state dict: names begin with "model." here
{"model": {...}, "optimizer": {...}, "epoch": 3}    and what else training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import skip_data

from ..in_place import put_in_place
from ..source import Entry, Sink, Source
from ..write import bytes_of
from .archive import Archive
from .state import State, leaves, nested, replaced

SAVING = ".saving"
"""What the name of a file that is not finished ends with."""


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
        self._path, self._saving = path, path.with_name(path.name + SAVING)
        self._places: dict[str, tuple[int, int]] = {}  # by name: where its record begins, and its size, in bytes
        self._file: IO[bytes] | None = None
        inner = [leaf.detach() for _, leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        unnamed = {f"\0{i}": tensor for i, tensor in enumerate(inner)}
        super().__init__({**entries, **{n: Entry(tuple(t.shape), t.dtype) for n, t in unnamed.items()}})
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
        """Let `torch.save` write everything but the elements."""
        spaces = {name: _space(entry) for name, entry in self._unwritten.items()}
        in_order = iter([spaces[name] for name in unnamed])
        values = replaced(values, lambda _: next(in_order))
        whole = nested({name: spaces[ties.get(name, name)] for name in (*entries, *ties)}, values)
        with skip_data():
            torch.save(whole, self._saving)
        names = {id(space): name for name, space in spaces.items()}
        with contextlib.closing(Archive(self._saving)) as archive:
            written = dict(leaves(archive.root))
            for path, leaf in leaves(whole):
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


def _space(entry: Entry) -> torch.Tensor:
    """A tensor of its own storage, whose memory is reserved but never touched."""
    storage = torch.UntypedStorage(entry.nbytes, device="cpu")
    return torch.empty(0, dtype=entry.dtype, device="cpu").set_(storage, 0, (entry.numel,), (1,)).view(entry.shape)
