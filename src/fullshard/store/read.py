"""The files of a checkpoint folder: only the bytes that a rank needs are read, verified first; nothing is executed.

Their location comes from the manifest; in a folder that another program saved by DCP, from `.metadata` (`metadata.py`)
and the records (`record.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import DamagedCheckpointError
from .entries import name_of_rank
from .hashed import BLOCK, CHUNK, new_hash
from .manifest import Manifest, parse
from .metadata import read_index
from .names import OPTIMIZER, state_path
from .record import elements_in, value_in
from .source import Copy, Source
from .storage import MANIFEST, METADATA, Storage, Stored
from .tree import from_json

_GROUPS = ("optimizer", "param_groups")
"""The keys of an optimizer's groups in the nested state dicts that DCP saves."""
MOST_WHOLE = 2**28
"""The most bytes of a manifest or metadata, which is read as a whole, unless the files it describes are larger."""


class Files(Source):
    """A folder of Fullshard or DCP, open for reading. See `Source`; tied tensors are entries under all their names.

    Args:
        storage: the folder.
        hashes: whether to verify the hashes of bytes that are read.

    Attributes:
        is_foreign: whether another program wrote the folder, by DCP: there are no hashes.
        manifest: Fullshard's; empty in a foreign folder.
        records: where values that are not tensors are stored, in a foreign folder.
        paths: for names, their keys in the nested state dict that was saved.
        digest: a hash of the manifest, which has hashes of all other files, or of the metadata.
        asked: names that were read, or that the reader expects.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or changed.
    """

    manifest: Manifest
    digest: str

    def __init__(self, storage: Storage, hashes: bool = True) -> None:
        self._hashes = hashes
        self._verified: set[tuple[str, int]] = set()
        self._scratch = memoryview(bytearray(CHUNK))
        self._elements: dict[tuple[Stored, torch.dtype], Stored] = {}  # by DCP's record
        self.asked: set[str] = set()
        self.records: dict[str, Stored] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        super().__init__(storage)

    def _open(self) -> None:
        sizes = self.storage.sizes
        self.is_foreign = MANIFEST not in sizes
        name = METADATA if self.is_foreign else MANIFEST
        if name not in sizes:
            raise DamagedCheckpointError(
                f"A folder is not a complete checkpoint: it has no {MANIFEST} or {METADATA}, written last.",
                got=self.storage.location(""),
                remedy="choose a different checkpoint",
            )
        text, where = self._small(name), self.storage.location(name)
        self.digest = hashlib.sha256(text).hexdigest()
        if self.is_foreign:
            self.manifest = Manifest()
            index = read_index(text, sizes, where)
            self.entries |= index.entries
            self.stored |= index.stored
            self.records, self.paths = index.values, index.paths
            return
        self.manifest = parse(text, where)
        self._check_sizes()
        self.entries |= self.manifest.tensors
        self.stored |= self.manifest.stored
        for name, first in self.manifest.ties.items():
            self.entries[name], self.stored[name] = self.entries[first], self.stored[first]
        groups = self.manifest.values.get("optimizer", {}).get("param_groups", [])
        parameters = {str(name) for group in (groups if _are_groups(groups) else ()) for name in group["params"]}
        for name in self.entries:
            if name.startswith(OPTIMIZER) and (path := state_path(name, parameters)) is not None:
                self.paths[name] = ("optimizer", "state", *path)

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
        """See `Source`.

        Raises:
            DamagedCheckpointError: a hash differs from the manifest, or a record from the metadata.
        """
        for copy in copies:
            self.verify(copy.stored.file, copy.stored.begin, copy.stored.nbytes)
            self._place(copy)  # raises here, not when it is read

    def _place(self, copy: Copy) -> Stored:
        if not self.is_foreign:
            return copy.stored
        key = copy.stored, copy.entry.dtype
        if key not in self._elements:
            self._elements[key] = elements_in(self.storage, *key)
        return self._elements[key]

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        self.asked.add(name)
        return super().read(name, offsets, sizes)

    def read_of_rank(self, rank: int, name: str) -> torch.Tensor:
        """Read a rank's own tensor of a name, or that of all ranks."""
        own_name = name_of_rank(rank, name)
        return self.read(own_name if own_name in self.entries else name)

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor, from a DCP folder."""
        return value_in(self.storage, self.records[name])

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is neither a tensor nor one value per element, by parameter and key.

        Raises:
            DamagedCheckpointError: it is not of that form.
        """
        scalars: Any = {}
        if not self.is_foreign:
            scalars = from_json(self.manifest.values.get("optimizer", {}).get("scalars", {}), self.read)
        if not isinstance(scalars, dict) or not all(isinstance(values, dict) for values in scalars.values()):
            raise DamagedCheckpointError("A checkpoint's optimizer state cannot be read.", got=str(scalars)[:80])
        for name in self.records:
            path = self.paths.get(name, ())
            if path[:2] == ("optimizer", "state") and len(path) == 4:
                scalars.setdefault(str(path[2]), {})[str(path[3])] = self.value(name)
        return scalars

    def groups(self) -> list[dict[str, Any]]:
        """The settings of optimizers: by group; in a DCP folder perhaps by parameter.

        `params` are names; in a checkpoint of plain PyTorch's optimizers perhaps numbers.

        Raises:
            DamagedCheckpointError: a group does not list its parameters.
        """
        if not self.is_foreign:
            return _checked_groups(
                from_json(self.manifest.values.get("optimizer", {}).get("param_groups", []), self.read)
            )
        by_number: dict[int, dict[str, Any]] = {}
        by_parameter: dict[str, dict[str, Any]] = {}
        for name, path in self.paths.items():
            if path[:2] == _GROUPS and len(path) == 4 and type(path[2]) is int:
                group, key = by_number.setdefault(path[2], {}), str(path[3])
            elif len(path) == 2 and path[0] == _GROUPS[0] and str(path[1]).startswith(f"{_GROUPS[1]}."):
                parameter, _, key = str(path[1]).removeprefix(f"{_GROUPS[1]}.").rpartition(".")
                group = by_parameter.setdefault(parameter, {"params": [parameter]})
            else:
                continue
            group[key] = self.read(name) if name in self.entries else self.value(name)
        return _checked_groups([*(by_number[number] for number in sorted(by_number)), *by_parameter.values()])


def most_listed(storage: Storage, listing: str) -> int:
    """The most bytes that a manifest or metadata describing these files can have.

    Its description of a piece is shorter than the piece's record, or than its entry in the header of its file; a
    manifest repeats names of parameters in settings and ties. Holes in sparse files do not count: a short file could
    otherwise claim all memory.
    """
    others = sum(nbytes for name, nbytes in storage.allocated.items() if name != listing)
    return min(4 * others, 4 * storage.allocated[listing])  # the disk may compress


def _checked_groups(groups: Any) -> list[dict[str, Any]]:
    """An optimizer's saved groups, unchanged.

    Raises:
        DamagedCheckpointError: they are not groups of parameters.
    """
    if not _are_groups(groups):
        raise DamagedCheckpointError("A checkpoint's optimizer groups cannot be read.", got=str(groups)[:80])
    return list(groups)


def _are_groups(groups: Any) -> bool:
    """Whether it is a list of groups, each with a list of names or numbers."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    names = [group.get("params") for group in groups]
    return all(isinstance(of_group, list) and all(type(name) in (str, int) for name in of_group) for of_group in names)
