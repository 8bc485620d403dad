"""Checkpoints of any format: rectangles of tensors in files, from which any rectangle of any tensor is read.

    Source   names, shapes and dtypes first; then any rectangle of any tensor
    Copy     a read of a part of a stored rectangle into memory that is ready for it

A format differs only in how it says where the rectangles are. Reading needs no process group, and memory for what is
read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from ..checkpoint.fit import check_cast, check_memory, check_shape, check_tied
from ..errors import ConfigError, DamagedCheckpointError
from ..layout import dense_strides
from .names import MODEL, TensorEntry
from .piece import Piece
from .storage import Storage, Stored, extent, read_strided
from .write import bytes_of


@dataclass(frozen=True)
class Copy:
    """A read of a rectangle in a file into a piece.

    Attributes:
        stored: the rectangle in the file.
        entry: the tensor.
        begin: first index within `stored`, on every dim.
        target: the memory to fill; a view of the piece.
    """

    stored: Stored
    entry: TensorEntry
    begin: tuple[int, ...]
    target: torch.Tensor


def copies_for(piece: Piece, entry: TensorEntry, stored: Iterable[Stored]) -> list[Copy]:
    """The reads that fill a piece.

    Raises:
        DamagedCheckpointError: the checkpoint lacks elements of it, or has some twice.
    """
    copies, missing = [], piece.tensor.numel()
    for part in stored:
        if (common := _intersection(piece, part)) is not None:
            target = piece.tensor
            for dim, (start, stop, offset) in enumerate(zip(*common, piece.offsets, strict=True)):
                target = target.narrow(dim, start - offset, stop - start)
            begin = tuple(start - offset for start, offset in zip(common[0], part.offsets, strict=True))
            copies.append(Copy(part, entry, begin, target))
            missing -= target.numel()
    if missing or _overlap([copy.stored for copy in copies]):
        raise DamagedCheckpointError(
            "A checkpoint does not hold all elements of a tensor, or holds some twice.",
            parameter=piece.name,
            expected=f"{piece.tensor.numel()} elements at {piece.offsets} of {piece.sizes}",
            got=f"{piece.tensor.numel() - missing}",
        )
    return copies


def _intersection(rectangle: Piece | Stored, other: Stored) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """First index and end, on every dim, of the intersection of two rectangles of a tensor; None if it is empty."""
    low = tuple(map(max, rectangle.offsets, other.offsets))
    high = tuple(map(min, _ends(rectangle), _ends(other)))
    return (low, high) if all(map(operator.lt, low, high)) else None


def _overlap(stored: Sequence[Stored]) -> bool:
    """Whether any two of these rectangles of a tensor have elements in common."""
    if len(stored) < 2:
        return False
    dims = range(len(stored[0].offsets))
    dim = max(dims, key=lambda d: len({part.offsets[d] for part in stored}), default=0)  # with the most offsets
    current: list[Stored] = []
    for part in sorted(stored, key=lambda part: part.offsets[dim]):
        current = [other for other in current if other.offsets[dim] + other.sizes[dim] > part.offsets[dim]]
        if any(_intersection(part, other) for other in current):
            return True
        current.append(part)
    return False


def _ends(rectangle: Piece | Stored) -> tuple[int, ...]:
    return tuple(map(operator.add, rectangle.offsets, rectangle.sizes))


class Source:
    """A checkpoint that can be read. Close it, or use it in a `with`.

    Subclasses say in `_open` what is where.

    Args:
        storage: its files.

    Attributes:
        entries: its tensors by name, in the order that is fastest to read.
        stored: the rectangles of each tensor.
        values: everything that is not a tensor: nested dicts and lists of plain Python values.
        ties: further names, each with the name of its entry: `{"model.head.weight": "model.embedding.weight"}`.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.entries: dict[str, TensorEntry] = {}
        self.stored: dict[str, Sequence[Stored]] = {}
        self.values: Mapping[str, Any] = {}
        self.ties: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Open the files, and read the lists of tensors and the values."""

    def copies_into(self, piece: Piece, names: Sequence[str], cast: bool) -> list[Copy]:
        """The reads that fill a piece of a model, once shape, dtype, and values under its several names are checked.

        Args:
            names: of the tensor here, at least one; more if it is tied in the model.
            cast: see `check_cast`.

        Raises:
            CheckpointError: see `check_memory`, `check_shape`, `check_cast` and `check_tied`.
            DamagedCheckpointError: see `copies_for`.
        """
        check_memory(piece.name, piece.tensor)
        for name in names:
            check_shape(piece.name, piece.shape, self.entries[name].shape)
            check_cast(piece.name, piece.dtype, self.entries[name].dtype, cast)
        first, *aliases = names
        for alias in aliases if piece.tensor.numel() else ():
            if _places(self.stored[alias]) != _places(self.stored[first]):
                values = [(n.removeprefix(MODEL), self.read(n, piece.offsets, piece.sizes)) for n in (first, alias)]
                check_tied(piece.name, *values)
        return copies_for(piece, self.entries[first], self.stored[first])

    def check(self, copies: Iterable[Copy]) -> None:
        """Verify everything that will be read, if the format allows it.

        Raises:
            DamagedCheckpointError: it was changed since it was written.
        """

    def fill(self, copies: Iterable[Copy]) -> None:
        """Read the copies, once checked, into their targets.

        Raises:
            DamagedCheckpointError: a file can no longer be read.
        """
        for copy in copies:
            target, place = copy.target, self._place(copy)
            first, strides, by_rows = _layout(copy, place)
            same = target.dtype == copy.entry.dtype and not target.is_conj() and not target.is_neg()
            dense = by_rows and extent(target.shape, strides) == target.numel() and target.is_contiguous()
            if dense and same and target.device.type == "cpu":
                begin = place.begin + first * copy.entry.dtype.itemsize
                self.storage.read_into(place.file, begin, bytes_of(target))
            else:
                target.copy_(self._read(copy))

    def _place(self, copy: Copy) -> Stored:
        """Where the elements of a copy's rectangle are."""
        return copy.stored

    def _read(self, copy: Copy) -> torch.Tensor:
        """Read a copy, once checked, into new memory of any strides."""
        place, read_into = self._place(copy), self.storage.read_into
        first, strides, _ = _layout(copy, place)
        shape = tuple(copy.target.shape)
        return read_strided(partial(read_into, place.file), place.begin, copy.entry.dtype, first, shape, strides)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Verify and read a tensor, or its rectangle at `offsets` of `sizes`, into new memory.

        Raises:
            DamagedCheckpointError: the checkpoint has no tensor of this name, or it cannot be read.
            ConfigError: the source was closed.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise DamagedCheckpointError("A checkpoint has no tensor of this name.", parameter=name)
        sizes = entry.shape if sizes is None else tuple(sizes)
        offsets = (0,) * len(sizes) if offsets is None else tuple(offsets)
        part = torch.empty(sizes, dtype=entry.dtype, device="cpu")
        copies = copies_for(Piece(name, entry.shape, offsets, sizes, part), entry, self.stored[name])
        self.check(copies)
        if len(copies) == 1:
            return self._read(copies[0])
        self.fill(copies)
        return part

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Rename the entries of a model.

        Args:
            new_name: maps a name, without `model.`, to the new one.

        Raises:
            ConfigError: it maps two names to one.
        """
        renamed: dict[str, str] = {}
        for name in self.entries:
            first = renamed.setdefault(MODEL + (new := new_name(name.removeprefix(MODEL))), name)
            if first != name:
                raise ConfigError(
                    "rename= gives two tensors in the files one name; nothing was loaded.",
                    parameter=new,
                    expected="a different new name for each name in the files",
                    got=f"{first.removeprefix(MODEL)} and {name.removeprefix(MODEL)}",
                )
        self.entries = {new: self.entries[name] for new, name in renamed.items()}
        self.stored = {new: self.stored[name] for new, name in renamed.items()}

    def files_of(self, name: str) -> list[str]:
        """The names of the files that contain an entry."""
        return [part.file for part in self.stored.get(name, ())]

    def close(self) -> None:
        """Close the files. May be called again."""
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _layout(copy: Copy, place: Stored) -> tuple[int, tuple[int, ...], bool]:
    """Of the elements of a copy in the file: the first one's number, their strides, and whether these are by rows."""
    by_rows = dense_strides(place.sizes, tuple(range(len(place.sizes))))
    strides = by_rows if place.stride is None else place.stride
    return sum(at * stride for at, stride in zip(copy.begin, strides, strict=True)), strides, strides == by_rows


def _places(stored: Iterable[Stored]) -> set[tuple[str, int]]:
    return {(part.file, part.begin) for part in stored}
