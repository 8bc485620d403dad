"""Folders of files that each rank wrote by `torch.save`, of PyTorch's first FSDP.

FULL_STATE_DICT is one file of `torch.save`, and SHARDED_STATE_DICT is usually saved by DCP; both are read elsewhere.
Here are LOCAL_STATE_DICT, and sharded ones that every rank saved by itself. What PyTorch 2.13 writes, as observed:

    "blocks.0._flat_param"   a ShardedTensor of one dim: all parameters of a wrapped module, those of wrapped modules
                             within it left out, in the order of `named_parameters`; cut into equal parts, one a rank
    "blocks.0.buffer"        a tensor: buffers are whole in every file
    "blocks.0.weight"        with use_orig_params=True, what this rank holds of a parameter: also in the flat one

    use_orig_params=False    parameters back to back, and nothing else in the flat one's size
    use_orig_params=True     each parameter begins at a multiple of 16 bytes, and 42s fill the gaps and the end, up to a
                             multiple of the number of ranks

The files do not say what parameters there are, so that the model is needed. Files of `torch.save` that hold
ShardedTensors are not for `torch.load(weights_only=True)`, as they say that `getattr` be called: here they are read as
data, see `pickled.py`, and process groups are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError
from ..source import MODEL, Entry
from .archive import Archive
from .built import Made, Sharded, Stored
from .elements import numel
from .pieced import PiecedSource, Run, Whole
from .state import State

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
FLAT = "_flat_param"
ALIGNMENT = 16  # bytes
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def is_per_rank(path: Path) -> bool:
    """Whether a folder holds files of `torch.save`, and nothing that says that it is of another format."""
    return path.is_dir() and bool(_files(path))


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.suffix in (".pt", ".pth", ".bin") and one.is_file())


class PerRankSource(PiecedSource):
    """A folder of files, one a rank, with ShardedTensors in them.

    Args:
        path: of the folder.
        model: returns the model as it is before wrapping; called on the meta device. Needed for local state dicts.
        model_only: leave everything else out.

    Raises:
        CheckpointError: parts are missing, or the model is another one.
        ConfigError: the model is needed.
    """

    def __init__(self, path: Path, model: Callable[[], nn.Module] | None = None, model_only: bool = False) -> None:
        archives: list[Archive] = []
        try:
            for file in _files(path):
                archives.append(Archive(file))
            states = [State(str(one.path), one.mapped, sharded_tensor) for one in archives]
            for one, state in zip(archives, states, strict=True):
                state.add_all(one.root)
            reading = _Reading(path, archives, states)
            reading.read_all(model, model_only)
        except BaseException:
            for one in archives:
                one.close()
            raise
        values = {} if model_only else states[0].values
        super().__init__(archives, reading.where, reading.entries, values, reading.ties)


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
        raise TypeError("a size that is none")
    return found


class _Reading:
    """What the files say, put together; attributes as `PiecedSource` has them."""

    def __init__(self, path: Path, archives: Sequence[Archive], states: Sequence[State]) -> None:
        self._path, self._archives, self._states = path, archives, states
        self.where: dict[str, Sequence[Run] | Whole] = {}
        self.entries: dict[str, Entry] = {}
        self.ties: dict[str, str] = {}

    def read_all(self, model: Callable[[], nn.Module] | None, model_only: bool) -> None:
        names = [name for state in self._states for name in state.tensors]
        kept = [name for name in dict.fromkeys(names) if name.startswith(MODEL) or not model_only]
        if not any(isinstance(one, Sharded) for state in self._states for one in state.tensors.values()):
            raise CheckpointError(
                f"{self._path} has {len(self._archives)} files of torch.save, none with parts of sharded tensors.",
                remedy="convert one file",
                code="K075",
            )
        flat = [name for name in kept if name.rpartition(".")[2] == FLAT and name.startswith(MODEL)]
        local = {MODEL + name for name in self._read_flat(flat, model)} if flat else set()
        for name in kept:
            if name not in local and name not in flat:
                self._read_named(name)
        warning = "warning" in self._states[0].values.get("optimizer", {})
        if warning and not model_only:
            raise CheckpointError(
                f"{self._path}: the optimizer's state is of each rank's own parts, by number, which cannot be joined.",
                remedy="convert the model alone (--model-only), or save FSDP.optim_state_dict(model, optimizer)",
                code="K076",
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
                raise CheckpointError(
                    f"{archive.path} is of another checkpoint than the other files.", parameter=name, code="K077"
                )
            for offsets, sizes, stored in one.parts:
                archive.check(name, stored)
                if any(offsets[1:]) or sizes[1:] != one.shape[1:] or not _contiguous(stored):
                    raise CheckpointError(
                        f"{archive.path}: a tensor is cut on another dim than the first.", parameter=name, code="K078"
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
                f"{self._path} is half a checkpoint: files of ranks are missing.",
                parameter=name,
                expected=f"{told.world} parts",
                got=f"{len(parts)} parts",
                code="K079",
            )
        return [run for _, (_, run) in sorted(parts.items())], told

    def _read_flat(self, flat: Sequence[str], model: Callable[[], nn.Module] | None) -> set[str]:
        """Parameters out of flat ones; the names of those, all of them."""
        if model is None:
            raise ConfigError(
                f"{self._path} holds flat parameters (LOCAL_STATE_DICT), which do not say what they are made of.",
                remedy="name a function that returns the model before wrapping: --model MODULE:FUNCTION",
                code="C186",
            )
        with torch.device("meta"):
            made = model()
        parameters = {clean(name): one for name, one in made.named_parameters()}
        of = {id(one): name for name, one in parameters.items()}
        units = {clean(name.removeprefix(MODEL).removesuffix(FLAT)): name for name in flat}
        members: dict[str, dict[str, nn.Parameter]] = {prefix: {} for prefix in units}
        for name, parameter in parameters.items():
            inside = [prefix for prefix in units if name.startswith(prefix)]
            if inside:
                members[max(inside, key=len)][name] = parameter
        for prefix, own in members.items():
            runs, told = self._runs(units[prefix])
            self._read_unit(units[prefix], own, runs, told)
        for name, parameter in made.named_parameters(remove_duplicate=False):
            if of[id(parameter)] != clean(name):
                self.ties[f"{MODEL}{clean(name)}"] = f"{MODEL}{of[id(parameter)]}"
        return parameters.keys() | {name.removeprefix(MODEL) for name in self.ties}

    def _read_unit(self, flat: str, members: Mapping[str, nn.Parameter], runs: Sequence[Run], told: Sharded) -> None:
        sizes = {name: parameter.numel() for name, parameter in members.items()}
        starts = starts_in(sizes, told.shape[0], told.dtype.itemsize, told.world)
        if starts is None:
            raise CheckpointError(
                f"{self._path}: the model has other parameters than the checkpoint.",
                parameter=flat.removeprefix(MODEL),
                expected=f"{told.shape[0]:,} elements, with padding",
                got=f"{sum(sizes.values()):,} elements without it, of {', '.join(members)}",
                code="K080",
            )
        for name, parameter in members.items():
            part = _cut(runs, starts[name], starts[name] + sizes[name])
            self._put(f"{MODEL}{name}", part, Entry(tuple(parameter.shape), told.dtype))

    def _put(self, name: str, where: Sequence[Run] | Whole, entry: Entry) -> None:
        self.where[name], self.entries[name] = where, entry


def clean(name: str) -> str:
    """A name without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def starts_in(sizes: Mapping[str, int], total: int, itemsize: int, world: int) -> dict[str, int] | None:
    """Where parameters begin in a flat one; None if they cannot be what it is made of.

    Args:
        sizes: elements of each parameter, in order.
        total: elements of the flat one.
        itemsize: bytes of an element.
        world: ranks it is cut for.
    """
    for unit, ranks in ((1, 1), (max(1, ALIGNMENT // itemsize), world)):
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = -(-end // unit) * unit
            end = starts[name] + size
        if total == -(-end // ranks) * ranks:
            return starts
    return None


def _cut(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Elements [start, stop) of what the runs are together."""
    found, at = [], 0
    for run in runs:
        first, last = max(start, at), min(stop, at + run.count)
        if first < last:
            found.append(Run(run.archive, run.stored, run.start + first - at, last - first))
        at += run.count
    return found


def _contiguous(stored: Stored) -> bool:
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
