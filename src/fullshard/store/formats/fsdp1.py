"""Folders with one file of `torch.save` per rank: PyTorch FSDP1's SHARDED_STATE_DICT. Read only.

A FULL_STATE_DICT is a single file (`torch_file.py`), and a SHARDED_STATE_DICT that DCP saved is a DCP folder. A
LOCAL_STATE_DICT is refused: it holds flat parameters, and does not record which parameters they consist of.

`torch.load(weights_only=True)` rejects ShardedTensors, because their pickles call `getattr`. Here pickles are decoded
as data (`store/pickles.py`), and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, lt
from pathlib import Path

import torch

from ...errors import CheckpointError
from ..names import MODEL, TensorEntry, checked_shape
from ..pickles import PickledCall, PickledTensor
from ..storage import Stored
from .archive import Archive, ArchiveSource
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


class PerRankSource(ArchiveSource):
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
        archives = [self._archive(file) for file in _files(self._path)]
        states = [StateContents(str(archive.path), archive.mapped, sharded_tensor) for archive in archives]
        for archive, state in zip(archives, states, strict=True):
            state.add_all(archive.root)
        if not any(isinstance(tensor, TensorShards) for state in states for tensor in state.tensors.values()):
            raise CheckpointError(
                f"{self._path} has {len(archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
            )
        names = dict.fromkeys(name for state in states for name in state.tensors)
        read = [name for name in names if name.startswith(MODEL) or not self._model_only]
        flat = [name for name in read if name.rpartition(".")[2] == FLAT and name.startswith(MODEL)]
        if flat:
            raise CheckpointError(
                f"{self._path} contains flat parameters (LOCAL_STATE_DICT), which do not name the parameters in them.",
                parameter=flat[0].removeprefix(MODEL),
                remedy="load it with PyTorch's FSDP, wrapped the same way, and save a FULL or SHARDED state dict",
            )
        for name in read:
            of_files = zip(archives, states, strict=True)
            self._add_merged(name, [(archive, s.tensors[name]) for archive, s in of_files if name in s.tensors])
        if self._model_only:
            return
        self.values = states[0].values
        if "warning" in self.values.get("optimizer", {}):
            raise CheckpointError(
                f"{self._path}: optimizer state refers to each rank's own parts by number, and cannot be merged.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
            )

    def _add_merged(self, name: str, tensors: Sequence[tuple[Archive, PickledTensor | TensorShards]]) -> None:
        """Add a tensor from its contents in each file that has any: the whole tensor, or some of its rectangles."""
        first = tensors[0][1]
        parts: dict[tuple[int, ...], Stored] = {}  # by the first index on every dim; replicas have the same
        for archive, tensor in tensors:
            if isinstance(tensor, PickledTensor):
                self._add_whole(name, archive, tensor)
                return
            if isinstance(first, PickledTensor) or (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{archive.path} belongs to a different checkpoint than the other files.", parameter=name
                )
            for offsets, stored in tensor.parts:
                if 0 not in stored.shape:  # it begins where another rank's part does
                    parts.setdefault(offsets, archive.stored(name, stored, offsets))
        assert isinstance(first, TensorShards)
        entry = TensorEntry(first.shape, first.dtype)
        if sum(part.nbytes for part in parts.values()) != entry.nbytes:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                parameter=name,
                expected=f"{first.world} parts",
                got=f"{len(parts)} parts",
            )
        if entry.nbytes > sum(self.storage.sizes.values()):
            raise CheckpointError(f"{self._path}: a tensor is larger than the files.", parameter=name, got=first.shape)
        self._add(name, entry, list(parts.values()))


def sharded_tensor(call: PickledCall) -> TensorShards | None:
    """The contents of a pickled ShardedTensor; None for any other class.

    Raises:
        Exception: any, if its state differs from that of PyTorch 2.13.
    """
    if call.name != SHARDED_TENSOR:
        return None
    shards, metadata = call.state[:2]
    shape, parts = checked_shape("a tensor", metadata.attributes["size"]), []
    for shard in shards:
        tensor, box = shard.attributes["tensor"], shard.attributes["metadata"].attributes
        offsets, sizes = (checked_shape("a shard", box[key]) for key in ("shard_offsets", "shard_sizes"))
        if not isinstance(tensor, PickledTensor) or tensor.shape != sizes:
            raise TypeError("the shape of a shard differs from its metadata")
        if len(offsets) != len(shape) or any(map(lt, shape, map(add, offsets, sizes))):
            raise TypeError("a shard extends beyond its tensor")
        parts.append((offsets, tensor))
    dtype = metadata.attributes["tensor_properties"].state[0]
    if not isinstance(dtype, torch.dtype) or any(tensor.dtype != dtype for _, tensor in parts):
        raise TypeError("the dtype of a shard differs from its metadata")
    return TensorShards(shape, dtype, tuple(parts), len(metadata.attributes["shards_metadata"]))
