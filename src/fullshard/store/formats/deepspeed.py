"""Folders of DeepSpeed ZeRO-3. Read only.

    FOLDER/latest                                                   "global_step100"
    FOLDER/global_step100/zero_pp_rank_R_mp_rank_00_model_states.pt
    FOLDER/global_step100/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      one of each per rank

    model states     module            {name: tensor}; only buffers have elements
                     buffer_names      names of the buffers
                     param_shapes      [{name: shape}], one dict per optimizer group
                     frozen_param_shapes, frozen_param_fragments       {name: shape}, {name: this rank's elements}
                     shared_params     {name: name}
    optimizer states optimizer_state_dict
                         fp32_flat_groups       one flat tensor per group: this rank's part of every parameter, in order
                         optimizer_state_dict   {"state": {group: {"exp_avg": flat tensor, "step": 0-d, ...}},
                                                 "param_groups": [...]}

A parameter of n elements is split into `world` parts of ceil(n / world) elements; the last ones are padded. Weights are
read from the optimizer's float32 copies. Sources: DeepSpeed's documentation of ZeRO checkpoints, and the files that
version 0.19.8 wrote on three ranks (the fixture of the tests).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...layout import rectangles
from ..names import MODEL, OPTIMIZER, TensorEntry, checked_shape
from ..pickles import PickledCall, PickledTensor
from ..storage import Stored
from .archive import Archive, ArchiveSource
from .state import StateContents

FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
STATES = ("_model_states.pt", "_optim_states.pt")
READ = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
}  # fmt: skip
"""Keys of the model states that are interpreted here or dropped; all others become values."""


def is_deepspeed(path: Path) -> bool:
    """Whether DeepSpeed wrote a folder: that of a step, or the folder with `latest`."""
    return _has_states(path) or _latest(path) is not None


def _has_states(path: Path) -> bool:
    return any(file.name.endswith(STATES) for file in path.iterdir())


def _latest(path: Path) -> Path | None:
    """The DeepSpeed folder that `latest` names; None if there is none.

    Raises:
        CheckpointError: it does not name a folder beside it.
    """
    latest = path / "latest"
    if not latest.is_file() or latest.stat().st_size > 1000:
        return None
    name = latest.read_text(errors="replace").strip()
    if not name or Path(name).name != name or name == "..":
        raise CheckpointError(f"{latest} does not name a folder beside it.", got=repr(name))
    step = path / name
    return step if step.is_dir() and _has_states(step) else None


class DeepSpeedSource(ArchiveSource):
    """A folder of DeepSpeed ZeRO-3. Nothing in it is executed.

    Args:
        path: the folder with `latest`, or the folder of a step.

    Raises:
        CheckpointError: files are missing or damaged, or not of ZeRO-3.
    """

    def _open(self) -> None:
        step = self._path if _has_states(self._path) else _latest(self._path)
        if step is None:
            raise CheckpointError(f"{self._path} is not a DeepSpeed checkpoint.")
        self._path = step
        archives = [self._archive(file) for file in _files(step)]
        self._models, self._optimizers = archives[::2], archives[1::2]
        self._world = len(self._models)
        self._state = StateContents(str(step), self._models[0].mapped)
        self.values = self._state.values
        try:
            model = self._models[0].root
            groups = [{str(n): checked_shape(str(n), s) for n, s in group.items()} for group in model["param_shapes"]]
            optimizers = [archive.root["optimizer_state_dict"] for archive in self._optimizers]
            for rank, optimizer in enumerate(optimizers):
                self._check(rank, optimizer)
            self._read_parameters(groups, [optimizer["fp32_flat_groups"] for optimizer in optimizers])
            self._read_frozen(model)
            self._read_module(model)
            self._read_optimizer(groups, [optimizer["optimizer_state_dict"] for optimizer in optimizers])
            for key, value in model.items():
                if key not in READ and value is not None:
                    self._state.add_other(str(key), value)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self._path} does not have the structure of ZeRO-3 ({reason}).") from error

    def _check(self, rank: int, optimizer: Mapping[str, Any]) -> None:
        stage, parts = optimizer.get("zero_stage"), optimizer.get("partition_count")
        stage = stage.arguments[0] if isinstance(stage, PickledCall) and stage.arguments else stage
        if stage != 3:
            got = stage if isinstance(stage, int) else type(stage).__name__
            raise CheckpointError(f"{self._path} was not written by ZeRO-3.", rank=rank, expected="stage 3", got=got)
        if isinstance(parts, int) and parts != self._world:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                expected=f"{parts} ranks",
                got=f"{self._world} ranks",
            )

    def _read_parameters(self, groups: list[dict[str, tuple[int, ...]]], flat_groups: list[Any]) -> None:
        for index, group in enumerate(groups):
            self._read_group(MODEL, "", group, [flat[index] for flat in flat_groups])
        if any(len(flat) != len(groups) for flat in flat_groups):
            raise CheckpointError(f"{self._path} has different numbers of parameter groups and flat groups.")

    def _read_group(self, prefix: str, suffix: str, group: Mapping[str, tuple[int, ...]], flat: Sequence[Any]) -> None:
        """Add the parameters of a group; `flat` has a tensor for each rank."""
        numel = sum(self._part(shape) for shape in group.values())
        parts = [
            _checked(archive, f"group of rank {rank}", stored, numel)
            for rank, (archive, stored) in enumerate(zip(self._optimizers, flat, strict=True))
        ]
        start = 0
        for name, shape in group.items():
            self._add_partitioned(prefix + name + suffix, shape, parts, start)
            start += self._part(shape)

    def _add_partitioned(self, name: str, shape: tuple[int, ...], parts: Sequence[_Flat], start: int) -> None:
        """Add a tensor whose elements begin at `start` in the ranks' flat tensors."""
        stored, done, dtype = [], 0, parts[0][1].dtype
        for archive, flat in parts:
            if flat.dtype != dtype:
                raise ValueError(f"ranks have {name} in {dtype} and {flat.dtype}")
            count, size = min(self._part(shape), math.prod(shape) - done), flat.dtype.itemsize
            for block in rectangles(shape, done, done + count):
                begin, nbytes = archive.begin(flat) + (start + block.start) * size, math.prod(block.sizes) * size
                stored.append(Stored(name, block.offsets, block.sizes, archive.path.name, begin, nbytes))
            done += count
        self._add(name, TensorEntry(shape, dtype), stored)

    def _part(self, shape: tuple[int, ...]) -> int:
        return -(-math.prod(shape) // self._world)

    def _read_frozen(self, model: Mapping[str, Any]) -> None:
        """Add the parameters without gradients, whose partitions are in the model states."""
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            shape = checked_shape(str(name), shape)
            parts = [
                _checked(archive, name, archive.root["frozen_param_fragments"][name], self._part(shape))
                for archive in self._models
            ]
            self._add_partitioned(f"{MODEL}{name}", shape, parts, 0)

    def _read_module(self, model: Mapping[str, Any]) -> None:
        """Add buffers, which are whole on every rank, other values of modules, and ties."""
        buffers, by_record = set(model["buffer_names"]), {}
        for name, stored in model["module"].items():
            full = f"{MODEL}{name}"
            if name in buffers:
                self._add_whole(full, self._models[0], stored)
            elif full in self.entries and isinstance(stored, PickledTensor):
                by_record[stored.key] = full
            elif not isinstance(stored, PickledTensor):
                self._state.add_model({name: stored})
        for name, stored in model["module"].items():
            full = f"{MODEL}{name}"
            if full not in self.entries and isinstance(stored, PickledTensor):
                if stored.key not in by_record:
                    raise CheckpointError(f"{self._path} has no elements of a parameter.", parameter=name)
                self.ties[full] = by_record[stored.key]
        for name, twin in (model.get("shared_params") or {}).items():
            if f"{MODEL}{name}" not in self.entries:
                self.ties[f"{MODEL}{name}"] = self.ties.get(f"{MODEL}{twin}", f"{MODEL}{twin}")

    def _read_optimizer(self, groups: list[dict[str, tuple[int, ...]]], states: list[Mapping[str, Any]]) -> None:
        values = self._state.values.setdefault("optimizer", {})
        for index, group in enumerate(groups):
            for key, value in states[0]["state"].get(index, {}).items():
                parts = [state["state"][index][key] for state in states]
                if isinstance(value, PickledTensor) and value.shape:
                    self._read_group(OPTIMIZER, f".{key}", group, parts)
                    continue
                for name in group:
                    if isinstance(value, PickledTensor):
                        self._add_whole(f"{OPTIMIZER}{name}.{key}", self._optimizers[0], value)
                    else:
                        plain = self._state.plain(value, f"{OPTIMIZER}{name}.{key}")
                        values.setdefault("scalars", {}).setdefault(name, {})[key] = plain
        values["param_groups"] = [
            {**self._state.plain(settings, "optimizer.param_groups"), "params": list(group)}
            for settings, group in zip(states[0]["param_groups"], groups, strict=True)
        ]


_Flat = tuple[Archive, PickledTensor]  # a rank's part of a group or parameter, one-dimensional and without gaps


def _checked(archive: Archive, name: str, stored: Any, numel: int) -> _Flat:
    """One rank's part of a group or parameter."""
    if not isinstance(stored, PickledTensor) or stored.shape != (numel,) or stored.stride != (1,):
        got = stored.shape if isinstance(stored, PickledTensor) else type(stored).__name__
        raise CheckpointError(
            f"{archive.path}: a partition has the wrong size.", parameter=name, expected=(numel,), got=got
        )
    archive.check(name, stored)
    return archive, stored


def _files(step: Path) -> list[Path]:
    """The files of model states and of optimizer states of every rank, in turn."""
    by_kind: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for file in sorted(step.iterdir()):
        matched = FILE.fullmatch(file.name)
        if matched is None:
            if file.name.endswith(STATES):
                raise CheckpointError(
                    f"{step} was not written by ZeRO-3: it has {file.name}.",
                    remedy="convert checkpoints of stages 1 and 2 to a state dict with DeepSpeed's zero_to_fp32.py",
                )
            continue
        rank, part, kind = int(matched[1]), int(matched[2]), matched[3]
        if part:
            raise CheckpointError(f"{step} was written with tensor or pipeline parallelism ({file.name}).")
        by_kind[kind][rank] = file
    world = 1 + max([rank for files in by_kind.values() for rank in files], default=0)
    for kind, files in by_kind.items():
        if missing := sorted(set(range(world)) - files.keys()):
            raise CheckpointError(
                f"{step} is an incomplete checkpoint: {kind}_states.pt files are missing.", rank=missing[0]
            )
    return [files[rank] for rank in range(world) for files in by_kind.values()]
