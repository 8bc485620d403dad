"""Folders of files that each rank wrote by `torch.save`, of PyTorch's first FSDP: SHARDED_STATE_DICT.

FULL_STATE_DICT is one file of `torch.save`, and a SHARDED_STATE_DICT that DCP saved is a folder of DCP; both are read
elsewhere. LOCAL_STATE_DICT is refused: it holds flat parameters, which do not say what they are made of.

Files of `torch.save` that hold ShardedTensors are not for `torch.load(weights_only=True)`, as they say that `getattr`
be called: here they are read as data, see `pickled.py`, and process groups are not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..source import MODEL, Entry
from .archive import Archive
from .built import Call, Sharded, Stored
from .pieced import PiecedSource, Run
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
        self._model_only = model_only
        super().__init__(path)

    def _open(self) -> None:
        for file in _files(self._path):
            self._archives.append(Archive(file))
        states = [State(str(archive.path), archive.mapped, sharded_tensor) for archive in self._archives]
        for archive, state in zip(self._archives, states, strict=True):
            state.add_all(archive.root)
        tensors = [state.tensors for state in states]
        if not any(isinstance(tensor, Sharded) for of_file in tensors for tensor in of_file.values()):
            raise CheckpointError(
                f"{self._path} has {len(self._archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
            )
        names = dict.fromkeys(name for of_file in tensors for name in of_file)
        read = [name for name in names if name.startswith(MODEL) or not self._model_only]
        flat = [name for name in read if name.rpartition(".")[2] == FLAT and name.startswith(MODEL)]
        if flat:
            raise CheckpointError(
                f"{self._path} holds flat parameters (LOCAL_STATE_DICT), which do not say what they are made of.",
                parameter=flat[0].removeprefix(MODEL),
                remedy="load it with PyTorch's FSDP, wrapped as it was, and save a FULL or SHARDED state dict",
            )
        for name in read:
            self._read_named(name, [of_file.get(name) for of_file in tensors])
        if self._model_only:
            return
        self.values = states[0].values
        if "warning" in self.values.get("optimizer", {}):
            raise CheckpointError(
                f"{self._path}: the optimizer's state is of each rank's own parts, by number, which cannot be joined.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
            )

    def _read_named(self, name: str, of_files: Sequence[Stored | Sharded | None]) -> None:
        """Add a tensor that is whole in a file, or of which files have rows: what each has of it is in `of_files`."""
        sharded: Sharded | None = None
        parts: dict[int, tuple[int, Run]] = {}  # by their first row: how many, and where they are
        for archive, tensor in zip(self._archives, of_files, strict=True):
            if isinstance(tensor, Stored):
                self._add_whole(name, archive, tensor)
                return
            if tensor is None:
                continue
            sharded = sharded or tensor
            if (tensor.shape, tensor.dtype) != (sharded.shape, sharded.dtype):
                raise CheckpointError(f"{archive.path} is of another checkpoint than the other files.", parameter=name)
            for offsets, sizes, stored in tensor.parts:
                archive.check(name, stored)
                if any(offsets[1:]) or sizes[1:] != tensor.shape[1:] or not _contiguous(stored):
                    raise CheckpointError(
                        f"{archive.path}: a tensor is cut on another dim than the first.", parameter=name
                    )
                line = Stored(stored.key, stored.numel, stored.dtype, stored.offset, (math.prod(sizes),), (1,))
                parts.setdefault(offsets[0], (sizes[0], Run(archive, line, 0, math.prod(sizes))))
        assert sharded is not None
        at = 0
        for start, (rows, _) in sorted(parts.items()):
            if start != at:
                break
            at += rows
        if at != sharded.shape[0]:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                parameter=name,
                expected=f"{sharded.world} parts",
                got=f"{len(parts)} parts",
            )
        runs = [run for _, (_, run) in sorted(parts.items())]
        self._add(name, runs, Entry(sharded.shape, sharded.dtype))


def sharded_tensor(made: Call) -> Sharded | None:
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


def _integers(sizes: Any) -> tuple[int, ...]:
    integers = tuple(sizes)
    if any(type(size) is not int or size < 0 for size in integers):
        raise TypeError("an invalid size")
    return integers


def _contiguous(stored: Stored) -> bool:
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
