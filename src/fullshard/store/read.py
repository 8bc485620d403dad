"""Reads pieces from a checkpoint's files: only the bytes that this rank needs, verified first, and nothing is executed.

Elements are read straight into their destination. Their location comes from the manifest; in a folder that another
program saved by DCP, from `.metadata` (`metadata.py`) and the records (`record.py`).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from ..layout import dense_strides
from .entries import name_of_rank
from .hashed import BLOCK, CHUNK, new_hash
from .manifest import Manifest, no_manifest, parse
from .metadata import Index, read_index
from .piece import Piece
from .record import TensorRecord, value_in
from .source import OPTIMIZER, TensorEntry, state_path
from .storage import MANIFEST, METADATA, Storage, Stored, extent, read_strided
from .tree import from_json
from .write import bytes_of

_GROUPS = ("optimizer", "param_groups")
"""The keys of an optimizer's groups in the nested state dicts that DCP saves."""
MOST_WHOLE = 2**28
"""The most bytes of a manifest or metadata, which is read as a whole, unless the files it describes are larger."""


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


class Files:
    """The files of a checkpoint, open for reading.

    Args:
        storage: the folder.
        hashes: whether to verify the hashes of bytes that are read.

    Attributes:
        is_foreign: whether another program wrote the folder, by DCP: there are no hashes.
        manifest: Fullshard's; empty in a foreign folder.
        index: where everything is stored.
        digest: a hash of the manifest, which has hashes of all other files, or of the metadata.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or changed.
    """

    def __init__(self, storage: Storage, hashes: bool = True) -> None:
        self.storage, self._hashes = storage, hashes
        self._verified: set[tuple[str, int]] = set()
        self._scratch = memoryview(bytearray(CHUNK))
        self._records: dict[tuple[Stored, torch.dtype], TensorRecord] = {}
        self.manifest = no_manifest()
        sizes = storage.sizes
        self.is_foreign = MANIFEST not in sizes
        try:
            name = METADATA if self.is_foreign else MANIFEST
            if name not in sizes:
                raise DamagedCheckpointError(
                    f"A folder is not a complete checkpoint: it has no {MANIFEST} or {METADATA}, written last.",
                    got=storage.location(""),
                    remedy="choose a different checkpoint",
                )
            text = self._small(name)
            self.digest = hashlib.sha256(text).hexdigest()
            self.index: Index
            if self.is_foreign:
                self.index = read_index(text, sizes, storage.location(METADATA))
            else:
                self.manifest = parse(text, storage.location(MANIFEST))
                self._check_sizes()
                self.index = _index_of(self.manifest)
        except BaseException:
            self.close()
            raise

    def _small(self, name: str) -> bytes:
        """Read a manifest or metadata."""
        nbytes, most = self.storage.sizes[name], max(MOST_WHOLE, most_listed(self.storage, name))
        if nbytes > most:
            raise DamagedCheckpointError(
                "A checkpoint's manifest or metadata is too large to be valid.",
                expected=f"at most {most} bytes",
                got=f"{self.storage.location(name)} of {nbytes} bytes",
            )
        return self.storage.read(name, 0, nbytes)

    def _check_sizes(self) -> None:
        """Compare the sizes of all files with the manifest."""
        sizes = self.storage.sizes
        for name, facts in self.manifest.files.items():
            if name not in sizes:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is missing.", expected=self.storage.location(name), got="no such file"
                )
            if sizes[name] != facts.nbytes:
                difference = "truncated" if sizes[name] < facts.nbytes else "longer than when it was written"
                raise DamagedCheckpointError(
                    f"A file of a checkpoint is {difference}.",
                    expected=f"{self.storage.location(name)} of {facts.nbytes} bytes",
                    got=f"{sizes[name]} bytes",
                )

    def verify(self, name: str, begin: int, nbytes: int) -> None:
        """Compare the hashes of the blocks that contain these bytes, if there is a manifest.

        Raises:
            DamagedCheckpointError: they differ.
        """
        if self.is_foreign or not nbytes or not self._hashes:
            return
        facts = self.manifest.files[name]
        for block in range(begin // BLOCK, (begin + nbytes - 1) // BLOCK + 1):
            if (name, block) in self._verified:
                continue
            at = block * BLOCK
            end, block_hash = min(at + BLOCK, facts.nbytes), new_hash(facts.kind, self.storage.location(name))
            for part in range(at, end, CHUNK):
                data = self._scratch[: min(CHUNK, end - part)]
                self.storage.read_into(name, part, data)
                block_hash.update(data)
                self.storage.keep(name, part, data)
            if block_hash.hexdigest() != facts.hashes[block]:
                raise DamagedCheckpointError(
                    "A file of a checkpoint is damaged: its contents have changed.",
                    expected=f"{facts.kind} {facts.hashes[block][:16]}...",
                    got=f"a different hash of bytes {at} to {end} of {self.storage.location(name)}",
                    remedy="load a different checkpoint (load(..., fall_back=True) loads the newest intact one)",
                )
            self._verified.add((name, block))

    def check(self, copies: Iterable[Copy]) -> None:
        """Verify everything that will be read.

        Raises:
            DamagedCheckpointError: a hash differs from the manifest, or a record from the metadata.
        """
        for copy in copies:
            self.verify(copy.stored.file, copy.stored.begin, copy.stored.nbytes)
            if self.is_foreign:
                self._record(copy)  # raises here, not when it is read

    def fill(self, copies: Iterable[Copy]) -> None:
        """Read the copies, once checked, into their targets.

        Raises:
            DamagedCheckpointError: a file can no longer be read.
        """
        for copy in copies:
            target, sizes = copy.target, tuple(copy.target.shape)
            if self.is_foreign:
                target.copy_(self._record(copy).read(copy.begin, sizes))
                continue
            dtype, read_into = copy.entry.dtype, partial(self.storage.read_into, copy.stored.file)
            strides = dense_strides(copy.stored.sizes, tuple(range(len(sizes))))
            first = sum(at * stride for at, stride in zip(copy.begin, strides, strict=True))
            dense = extent(sizes, strides) == target.numel() and target.is_contiguous()
            same = target.dtype == dtype and not target.is_conj() and not target.is_neg()
            if dense and same and target.device.type == "cpu":
                read_into(copy.stored.begin + first * dtype.itemsize, bytes_of(target))
            else:
                target.copy_(read_strided(read_into, copy.stored.begin, dtype, first, sizes, strides))

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Verify and read a tensor, or its rectangle at `offsets` of `sizes`, into new memory.

        Raises:
            DamagedCheckpointError: the checkpoint has no tensor of this name, or it cannot be read.
        """
        entry = self.index.entries.get(name)
        if entry is None:
            raise DamagedCheckpointError("A checkpoint has no tensor of this name.", parameter=name)
        sizes = entry.shape if sizes is None else tuple(sizes)
        offsets = (0,) * len(sizes) if offsets is None else tuple(offsets)
        part = torch.empty(sizes, dtype=entry.dtype, device="cpu")
        copies = copies_for(Piece(name, entry.shape, offsets, sizes, part), entry, self.index.stored[name])
        self.check(copies)
        self.fill(copies)
        return part

    def read_of_rank(self, rank: int, name: str) -> torch.Tensor:
        """Read a rank's own tensor of a name, or that of all ranks."""
        own_name = name_of_rank(rank, name)
        return self.read(own_name if own_name in self.index.entries else name)

    def files_of(self, name: str) -> list[str]:
        """The names of the files that contain a tensor."""
        return [part.file for part in self.index.stored.get(name, [])]

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor, from a DCP folder."""
        return value_in(self.storage, self.index.values[name])

    def scalars(self, tensor: Callable[[str], torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Optimizer state that is neither a tensor nor one value per element, by parameter and key.

        Args:
            tensor: returns a tensor by its name.

        Raises:
            DamagedCheckpointError: it is not of that form.
        """
        scalars: Any = {}
        if not self.is_foreign:
            scalars = from_json(self.manifest.values.get("optimizer", {}).get("scalars", {}), tensor)
        if not isinstance(scalars, dict) or not all(isinstance(values, dict) for values in scalars.values()):
            raise DamagedCheckpointError("A checkpoint's optimizer state cannot be read.", got=str(scalars)[:80])
        for name in self.index.values:
            path = self.index.paths.get(name, ())
            if path[:2] == ("optimizer", "state") and len(path) == 4:
                scalars.setdefault(str(path[2]), {})[str(path[3])] = self.value(name)
        return scalars

    def groups(self, tensor: Callable[[str], torch.Tensor]) -> list[dict[str, Any]]:
        """The settings of optimizers: by group; in a DCP folder perhaps by parameter.

        Args:
            tensor: returns a tensor by its name.

        Raises:
            DamagedCheckpointError: a group does not list its parameters.
        """
        if not self.is_foreign:
            return _checked_groups(from_json(self.manifest.values.get("optimizer", {}).get("param_groups", []), tensor))
        by_number: dict[int, dict[str, Any]] = {}
        by_parameter: dict[str, dict[str, Any]] = {}
        for name, path in self.index.paths.items():
            if path[:2] == _GROUPS and len(path) == 4 and type(path[2]) is int:
                group, key = by_number.setdefault(path[2], {}), str(path[3])
            elif len(path) == 2 and path[0] == _GROUPS[0] and str(path[1]).startswith(f"{_GROUPS[1]}."):
                parameter, _, key = str(path[1]).removeprefix(f"{_GROUPS[1]}.").rpartition(".")
                group = by_parameter.setdefault(parameter, {"params": [parameter]})
            else:
                continue
            group[key] = tensor(name) if name in self.index.entries else self.value(name)
        return _checked_groups([*(by_number[number] for number in sorted(by_number)), *by_parameter.values()])

    def _record(self, copy: Copy) -> TensorRecord:
        """DCP's record of a rectangle."""
        key = copy.stored, copy.entry.dtype
        if key not in self._records:
            self._records[key] = TensorRecord(self.storage, copy.stored, copy.entry)
        return self._records[key]

    def close(self) -> None:
        """Close the files."""
        self.storage.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def most_listed(storage: Storage, listing: str) -> int:
    """The most bytes that a manifest or metadata describing these files can have.

    Its description of a piece is shorter than the piece's record, or than its entry in the header of its file; a
    manifest repeats names of parameters in settings, layouts and ties. Holes in sparse files do not count: a short file
    could otherwise claim all memory.
    """
    others = sum(nbytes for name, nbytes in storage.allocated.items() if name != listing)
    return min(4 * others, 4 * storage.allocated[listing])  # the disk may compress


def _index_of(manifest: Manifest) -> Index:
    """The index of a manifest, with tied tensors under all their names."""
    entries, stored = dict(manifest.tensors), dict(manifest.stored)
    for name, first in manifest.ties.items():
        entries[name], stored[name] = entries[first], stored[first]
    groups = manifest.values.get("optimizer", {}).get("param_groups", [])
    parameters = {name for group in (groups if _are_groups(groups) else ()) for name in group["params"]}
    paths: dict[str, tuple[Any, ...]] = {
        name: ("optimizer", "state", *path)
        for name in entries
        if name.startswith(OPTIMIZER) and (path := state_path(name, parameters)) is not None
    }
    return Index(entries, stored, {}, paths)


def _checked_groups(groups: Any) -> list[dict[str, Any]]:
    """An optimizer's saved groups, unchanged.

    Raises:
        DamagedCheckpointError: they are not groups of parameters.
    """
    if not _are_groups(groups):
        raise DamagedCheckpointError("A checkpoint's optimizer groups cannot be read.", got=str(groups)[:80])
    return list(groups)


def _are_groups(groups: Any) -> bool:
    """Whether it is a list of groups, each with a list of names."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    names = [group.get("params") for group in groups]
    return all(isinstance(of_group, list) and all(isinstance(name, str) for name in of_group) for of_group in names)
