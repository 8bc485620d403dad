"""Folders of files that each rank wrote by `torch.save`, of PyTorch's first FSDP: SHARDED_STATE_DICT.

FULL_STATE_DICT is one file of `torch.save`, and a SHARDED_STATE_DICT that DCP saved is a folder of DCP; both are read
elsewhere. LOCAL_STATE_DICT is refused: it holds flat parameters, which do not say what they are made of.

Files of `torch.save` that hold ShardedTensors are not for `torch.load(weights_only=True)`, as they say that `getattr`
be called: here they are read as data, see `pickled.py`, and process groups are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..source import MODEL, Entry
from .archive import Archive
from .built import Made, Sharded, Stored
from .elements import numel
from .pieced import PiecedSource, Run, Whole
from .state import State

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
FLAT = "_flat_param"
"""The name of a parameter that others lie in."""


def is_per_rank(path: Path) -> bool:
    """Whether a folder holds files of `torch.save`, and nothing that says that it is of another format."""
    return path.is_dir() and bool(_files(path))


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.suffix in (".pt", ".pth", ".bin") and one.is_file())


class PerRankSource(PiecedSource):
    """A folder of files, one a rank, with ShardedTensors in them.

    Args:
        path: of the folder.
        model_only: leave everything else out.

    Raises:
        CheckpointError: parts are missing, or parameters are flat.
    """

    def __init__(self, path: Path, model_only: bool = False) -> None:
        archives: list[Archive] = []
        try:
            for file in _files(path):
                archives.append(Archive(file))
            states = [State(str(one.path), one.mapped, sharded_tensor) for one in archives]
            for one, state in zip(archives, states, strict=True):
                state.add_all(one.root)
            reading = _Reading(path, archives, states)
            reading.read_all(model_only)
        except BaseException:
            for one in archives:
                one.close()
            raise
        values = {} if model_only else states[0].values
        super().__init__(archives, reading.where, reading.entries, values, {})


def sharded_tensor(made: Made) -> Sharded | None:
    """A ShardedTensor's state, read as data; None: it is something else.

    Raises:
        TypeError: its state is built in another way than PyTorch 2.13's.
    """
    if made.name != SHARDED_TENSOR:
        return None
    shards, metadata = made.state[:2]
    parts = []
    for shard in shards:
        tensor, where = shard.attribute("tensor"), shard.attribute("metadata")
        offsets, sizes = _integers(where.attribute("shard_offsets")), _integers(where.attribute("shard_sizes"))
        if not isinstance(tensor, Stored) or tensor.shape != sizes:
            raise TypeError("a shard's tensor has another shape than its metadata say")
        parts.append((offsets, sizes, tensor))
    dtype = metadata.attribute("tensor_properties").state[0]
    if not isinstance(dtype, torch.dtype) or any(part[2].dtype != dtype for part in parts):
        raise TypeError("a shard's tensor has another dtype than its metadata say")
    return Sharded(
        _integers(metadata.attribute("size")), dtype, tuple(parts), len(metadata.attribute("shards_metadata"))
    )


def _integers(told: Any) -> tuple[int, ...]:
    found = tuple(told)
    if any(type(one) is not int or one < 0 for one in found):
        raise TypeError("an invalid size")
    return found


class _Reading:
    """What the files say, put together; attributes as `PiecedSource` has them."""

    def __init__(self, path: Path, archives: Sequence[Archive], states: Sequence[State]) -> None:
        self._path, self._archives, self._states = path, archives, states
        self.where: dict[str, Sequence[Run] | Whole] = {}
        self.entries: dict[str, Entry] = {}

    def read_all(self, model_only: bool) -> None:
        names = [name for state in self._states for name in state.tensors]
        kept = [name for name in dict.fromkeys(names) if name.startswith(MODEL) or not model_only]
        if not any(isinstance(one, Sharded) for state in self._states for one in state.tensors.values()):
            raise CheckpointError(
                f"{self._path} has {len(self._archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
            )
        flat = [name for name in kept if name.rpartition(".")[2] == FLAT and name.startswith(MODEL)]
        if flat:
            raise CheckpointError(
                f"{self._path} holds flat parameters (LOCAL_STATE_DICT), which do not say what they are made of.",
                parameter=flat[0].removeprefix(MODEL),
                remedy="load it with PyTorch's FSDP, wrapped as it was, and save a FULL or SHARDED state dict",
            )
        for name in kept:
            self._read_named(name)
        warning = "warning" in self._states[0].values.get("optimizer", {})
        if warning and not model_only:
            raise CheckpointError(
                f"{self._path}: the optimizer's state is of each rank's own parts, by number, which cannot be joined.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
            )

    def _read_named(self, name: str) -> None:
        """A tensor that is whole in every file, or of which every file has rows."""
        for archive, state in zip(self._archives, self._states, strict=True):
            found = state.tensors.get(name)
            if isinstance(found, Stored):
                archive.check(name, found)
                self._put(name, Whole(archive, found), Entry(found.shape, found.dtype))
                return
        runs, whole = self._runs(name)
        self._put(name, runs, Entry(whole.shape, whole.dtype))

    def _runs(self, name: str) -> tuple[list[Run], Sharded]:
        """The parts of a tensor that is cut on its first dim, in order."""
        parts: dict[int, tuple[int, Run]] = {}
        told: Sharded | None = None
        for archive, state in zip(self._archives, self._states, strict=True):
            one = state.tensors.get(name)
            if not isinstance(one, Sharded):
                continue
            told = told or one
            if (one.shape, one.dtype) != (told.shape, told.dtype):
                raise CheckpointError(f"{archive.path} is of another checkpoint than the other files.", parameter=name)
            for offsets, sizes, stored in one.parts:
                archive.check(name, stored)
                if any(offsets[1:]) or sizes[1:] != one.shape[1:] or not _contiguous(stored):
                    raise CheckpointError(
                        f"{archive.path}: a tensor is cut on another dim than the first.", parameter=name
                    )
                line = Stored(stored.key, stored.numel, stored.dtype, stored.offset, (numel(sizes),), (1,))
                parts.setdefault(offsets[0], (sizes[0], Run(archive, line, 0, numel(sizes))))
        assert told is not None
        at = 0
        for start, (rows, _) in sorted(parts.items()):
            if start != at:
                break
            at += rows
        if at != told.shape[0]:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                parameter=name,
                expected=f"{told.world} parts",
                got=f"{len(parts)} parts",
            )
        return [run for _, (_, run) in sorted(parts.items())], told

    def _put(self, name: str, where: Sequence[Run] | Whole, entry: Entry) -> None:
        self.where[name], self.entries[name] = where, entry


def _contiguous(stored: Stored) -> bool:
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
