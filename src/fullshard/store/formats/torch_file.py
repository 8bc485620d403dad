"""Files of `torch.save`: decoded as data, and written tensor by tensor into space that `torch.save` reserved.

Also folders with one file per rank of PyTorch's FSDP1 (SHARDED_STATE_DICT), which are only read. A LOCAL_STATE_DICT is
refused: it holds flat parameters, and does not record which parameters they consist of.

{"weight": tensor, ...}                             a plain state dict: entries get the prefix "model."
{"model": {...}, "optimizer": {...}, "epoch": 3}    and other dicts that training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from ...errors import CheckpointError
from ..in_place import put_in_place
from ..names import MODEL, TensorEntry
from ..pickles import PickledTensor
from ..storage import NamedFiles, Stored
from ..write import bytes_of
from .archive import Archive, ArchiveSource
from .fsdp1 import sharded_tensor
from .state import StateContents, TensorShards, leaves, nested, replaced

SUFFIXES = (".pt", ".pth", ".bin")
SAVING = ".saving"
"""The last suffix of an unfinished file."""


FLAT = "_flat_param"
"""FSDP1's name for a flat parameter."""


def files_in(path: Path) -> list[Path]:
    """The files of `torch.save` in a folder."""
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())


class TorchFileSource(ArchiveSource):
    """A file of `torch.save` in the zip format (PyTorch 1.6 and later), or a folder with one per rank of FSDP1.

    Nothing in them is executed.

    Args:
        path: the file or folder.
        model_only: read only parameters and buffers.

    Raises:
        CheckpointError: a file is damaged, or contains anything but tensors and plain values; parts are missing, or
            parameters are flat.
    """

    def __init__(self, path: Path, model_only: bool = False) -> None:
        self._model_only = model_only
        super().__init__(path)

    def _open(self) -> None:
        archives = [self._archive(file) for file in (files_in(self._path) if self._path.is_dir() else [self._path])]
        states = [StateContents(str(archive.path), archive.mapped, sharded_tensor) for archive in archives]
        for archive, state in zip(archives, states, strict=True):
            state.add_all(archive.root)
        several = len(archives) > 1
        if several and not any(isinstance(tensor, TensorShards) for s in states for tensor in s.tensors.values()):
            raise CheckpointError(
                f"{self._path} has {len(archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
            )
        names: dict[Any, str] = {}
        for name in dict.fromkeys(name for state in states for name in state.tensors):
            if self._model_only and not name.startswith(MODEL):
                continue
            of_files = [(a, s.tensors[name]) for a, s in zip(archives, states, strict=True) if name in s.tensors]
            first = names.setdefault(tuple(of_files), name)
            if first != name:
                self.ties[name] = first
            else:
                self._add_merged(name, of_files)
        if self._model_only:
            return
        self.values = states[0].values
        if several and "warning" in self.values.get("optimizer", {}):
            raise CheckpointError(
                f"{self._path}: optimizer state refers to each rank's own parts by number, and cannot be merged.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
            )

    def _add_merged(self, name: str, tensors: Sequence[tuple[Archive, PickledTensor | TensorShards]]) -> None:
        """Add a tensor from its contents in each file that has any: the whole tensor, or some of its rectangles."""
        whole = next(((archive, tensor) for archive, tensor in tensors if isinstance(tensor, PickledTensor)), None)
        if whole is not None:
            self._add_whole(name, *whole)
            return
        shards: list[tuple[Archive, TensorShards]] = [*tensors]  # type: ignore[list-item]
        first = shards[0][1]
        if name.rpartition(".")[2] == FLAT:
            raise CheckpointError(
                f"{self._path} contains flat parameters (LOCAL_STATE_DICT), which do not name the parameters in them.",
                parameter=name.removeprefix(MODEL),
                remedy="load it with PyTorch's FSDP, wrapped the same way, and save a FULL or SHARDED state dict",
            )
        parts: dict[tuple[int, ...], Stored] = {}  # by the first index on every dim; replicas have the same
        for archive, tensor in shards:
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{archive.path} belongs to a different checkpoint than the other files.", parameter=name
                )
            for offsets, stored in tensor.parts:
                if 0 not in stored.shape:  # it begins where another rank's part does
                    parts.setdefault(offsets, archive.stored(name, stored, offsets))
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


def write_torch_file(
    path: Path,
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, Any],
    ties: Mapping[str, str],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a file of `torch.save`: a plain state dict if there is only a model, else a dict with `model`, ...

    `torch.save` writes the file with empty space for the elements, which are then written tensor by tensor. This takes
    the memory of a single tensor.

    Args:
        path: the file. Until it is complete, `.saving` is appended to its name.
        entries: all tensors.
        values: everything else: plain Python values, which may contain tensors.
        ties: see `Source`. Both names are saved as the same tensor.
        read: see `write_checkpoint`.
    """
    saving = path.with_name(path.name + SAVING)
    in_values = {f"\0{i}": t.detach() for i, (_, t) in enumerate(leaves(values)) if isinstance(t, torch.Tensor)}
    spaces = {name: _space(entry) for name, entry in entries.items()}
    spaces |= {name: _space(TensorEntry(tuple(t.shape), t.dtype)) for name, t in in_values.items()}
    in_order = iter([spaces[name] for name in in_values])
    root = nested(
        {name: spaces[ties.get(name, name)] for name in (*entries, *ties)}, replaced(values, lambda _: next(in_order))
    )
    try:
        with skip_data():
            torch.save(root, saving)
        with contextlib.closing(NamedFiles()) as files:
            archive = Archive(files, saving)
            written, names = dict(leaves(archive.root)), {id(space): name for name, space in spaces.items()}
            tensors = ((key, leaf) for key, leaf in leaves(root) if isinstance(leaf, torch.Tensor))
            places = {names[id(leaf)]: archive.begin(written[key]) for key, leaf in tensors}
        with saving.open("r+b") as file:
            for name in (*in_values, *entries):
                file.seek(places[name])
                file.write(bytes_of(in_values[name] if name in in_values else entries[name].checked(name, read(name))))
        put_in_place(saving, path)
    finally:
        saving.unlink(missing_ok=True)


def _space(entry: TensorEntry) -> torch.Tensor:
    """A tensor with its own storage, whose memory is allocated but never touched."""
    storage = torch.UntypedStorage(entry.nbytes, device="cpu")
    return torch.empty(0, dtype=entry.dtype, device="cpu").set_(storage, 0, (entry.numel,), (1,)).view(entry.shape)
