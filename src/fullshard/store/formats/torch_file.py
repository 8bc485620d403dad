"""Files of `torch.save`: decoded as data, and written tensor by tensor into space that `torch.save` reserved.

{"weight": tensor, ...}                             a plain state dict: entries get the prefix "model."
{"model": {...}, "optimizer": {...}, "epoch": 3}    and other dicts that training scripts write, see `state.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from ..in_place import put_in_place
from ..names import TensorEntry
from ..pickles import PickledTensor
from ..storage import NamedFiles
from ..write import bytes_of
from .archive import Archive, ArchiveSource
from .state import StateContents, leaves, nested, replaced

SUFFIXES = (".pt", ".pth", ".bin")
SAVING = ".saving"
"""The last suffix of an unfinished file."""


class TorchFileSource(ArchiveSource):
    """A file of `torch.save` in the zip format (PyTorch 1.6 and later). Nothing in it is executed.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is damaged, or contains anything but tensors and plain values.
    """

    def _open(self) -> None:
        archive = self._archive(self._path)
        state = StateContents(str(self._path), archive.mapped)
        state.add_all(archive.root)
        self.values = state.values
        names: dict[PickledTensor, str] = {}
        for name, tensor in state.tensors.items():
            if tensor in names:
                self.ties[name] = names[tensor]
            else:
                names[tensor] = name
                self._add_whole(name, archive, tensor)


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
