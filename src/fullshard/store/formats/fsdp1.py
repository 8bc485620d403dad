"""Folders with one file of `torch.save` per rank: PyTorch FSDP1's SHARDED_STATE_DICT. Read only.

A FULL_STATE_DICT is a single file (`torch_file.py`), and a SHARDED_STATE_DICT that DCP saved is a DCP folder. A
LOCAL_STATE_DICT is refused: it holds flat parameters, and does not record which parameters they consist of.

`torch.load(weights_only=True)` rejects ShardedTensors, because their pickles call `getattr`. Here pickles are decoded
as data (`store/pickles.py`), and no process group is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..pickles import PickledCall, PickledTensor
from ..source import MODEL, TensorEntry
from .archive import Archive
from .pieced import FilePiece, PiecedSource
from .state import StateContents, TensorShards
from .torch_file import SUFFIXES

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
FLAT = "_flat_param"
"""FSDP1's name for a flat parameter."""


def is_per_rank(path: Path) -> bool:
    """Whether a folder contains files of `torch.save`."""
    return bool(_files(path))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())


class PerRankSource(PiecedSource):
    """A folder with one file of ShardedTensors per rank.

    Args:
        path: the folder.
        model_only: read only parameters and buffers.

    Raises:
        CheckpointError: parts are missing, or parameters are flat.
    """

    def __init__(self, path: Path, model_only: bool = False) -> None:
        self._model_only = model_only
        super().__init__(path)

    def _open(self) -> None:
        for file in _files(self._path):
            self._archives.append(Archive(file))
        states = [StateContents(str(archive.path), archive.mapped, sharded_tensor) for archive in self._archives]
        for archive, state in zip(self._archives, states, strict=True):
            state.add_all(archive.root)
        tensors = [state.tensors for state in states]
        if not any(isinstance(tensor, TensorShards) for of_file in tensors for tensor in of_file.values()):
            raise CheckpointError(
                f"{self._path} has {len(self._archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
            )
        names = dict.fromkeys(name for of_file in tensors for name in of_file)
        read = [name for name in names if name.startswith(MODEL) or not self._model_only]
        flat = [name for name in read if name.rpartition(".")[2] == FLAT and name.startswith(MODEL)]
        if flat:
            raise CheckpointError(
                f"{self._path} contains flat parameters (LOCAL_STATE_DICT), which do not name the parameters in them.",
                parameter=flat[0].removeprefix(MODEL),
                remedy="load it with PyTorch's FSDP, wrapped the same way, and save a FULL or SHARDED state dict",
            )
        for name in read:
            self._add_merged(name, [of_file.get(name) for of_file in tensors])
        if self._model_only:
            return
        self.values = states[0].values
        if "warning" in self.values.get("optimizer", {}):
            raise CheckpointError(
                f"{self._path}: optimizer state refers to each rank's own parts by number, and cannot be merged.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
            )

    def _add_merged(self, name: str, tensors: Sequence[PickledTensor | TensorShards | None]) -> None:
        """Add a tensor from its contents in each file: the whole tensor, some of its rows, or nothing."""
        sharded: TensorShards | None = None
        parts: dict[int, tuple[int, FilePiece]] = {}  # first row -> the number of rows, and their elements
        for archive, tensor in zip(self._archives, tensors, strict=True):
            if isinstance(tensor, PickledTensor):
                self._add_whole(name, archive, tensor)
                return
            if tensor is None:
                continue
            sharded = sharded or tensor
            if (tensor.shape, tensor.dtype) != (sharded.shape, sharded.dtype):
                raise CheckpointError(
                    f"{archive.path} belongs to a different checkpoint than the other files.", parameter=name
                )
            for offsets, sizes, stored in tensor.parts:
                archive.check(name, stored)
                if any(offsets[1:]) or sizes[1:] != tensor.shape[1:] or not _contiguous(stored):
                    raise CheckpointError(
                        f"{archive.path}: a tensor is sharded on a dim other than the first.", parameter=name
                    )
                if not sizes[0]:  # it begins where another rank's part does
                    continue
                flat = replace(stored, shape=(math.prod(sizes),), stride=(1,))
                parts.setdefault(offsets[0], (sizes[0], FilePiece(archive, flat)))
        assert sharded is not None
        pieces: list[FilePiece] = []
        next_row = 0
        for first_row, (rows, piece) in sorted(parts.items()):
            if first_row != next_row:
                break
            pieces.append(piece)
            next_row += rows
        if next_row != sharded.shape[0]:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                parameter=name,
                expected=f"{sharded.world} parts",
                got=f"{len(parts)} parts",
            )
        self._add(name, pieces, TensorEntry(sharded.shape, sharded.dtype))


def sharded_tensor(call: PickledCall) -> TensorShards | None:
    """The contents of a pickled ShardedTensor; None for any other class.

    Raises:
        Exception: any, if its state differs from that of PyTorch 2.13.
    """
    if call.name != SHARDED_TENSOR:
        return None
    shards, metadata = call.state[:2]
    parts = []
    for shard in shards:
        tensor, box = shard.attributes["tensor"], shard.attributes["metadata"].attributes
        offsets, sizes = _integers(box["shard_offsets"]), _integers(box["shard_sizes"])
        if not isinstance(tensor, PickledTensor) or tensor.shape != sizes or len(offsets) != len(sizes) or not sizes:
            raise TypeError("the shape of a shard differs from its metadata")
        parts.append((offsets, sizes, tensor))
    dtype = metadata.attributes["tensor_properties"].state[0]
    if not isinstance(dtype, torch.dtype) or any(part[2].dtype != dtype for part in parts):
        raise TypeError("the dtype of a shard differs from its metadata")
    return TensorShards(
        _integers(metadata.attributes["size"]), dtype, tuple(parts), len(metadata.attributes["shards_metadata"])
    )


def _integers(sizes: Any) -> tuple[int, ...]:
    integers = tuple(sizes)
    if any(type(size) is not int or size < 0 for size in integers):
        raise TypeError("an invalid size")
    return integers


def _contiguous(stored: PickledTensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
