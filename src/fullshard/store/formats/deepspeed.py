"""Folders that DeepSpeed's ZeRO-3 writes. Read only.

    FOLDER/latest                                                   "global_step100"
    FOLDER/global_step100/zero_pp_rank_R_mp_rank_00_model_states.pt
    FOLDER/global_step100/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      one of each for every rank

    model states     module            {name: tensor}, of which only buffers have elements
                     buffer_names      which those are
                     param_shapes      [{name: shape}], one dict a group of the optimizer
                     frozen_param_shapes, frozen_param_fragments       {name: shape}, {name: this rank's elements}
                     shared_params     {name: name}
    optimizer states optimizer_state_dict
                         fp32_flat_groups       one flat tensor a group: this rank's part of every parameter, in order
                         optimizer_state_dict   {"state": {group: {"exp_avg": flat tensor, "step": 0-d, ...}},
                                                 "param_groups": [...]}

A parameter of n elements is cut into `world` parts of ceil(n / world) elements; the last ones are padded. Weights are
read in the precision that the optimizer keeps, float32. Source of all this: DeepSpeed's documentation of ZeRO
checkpoints, and what version 0.19.8 wrote on three ranks (the fixture of the tests).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..source import MODEL, OPTIMIZER, Entry, checked_shape
from .archive import Archive
from .built import Call, Stored
from .pieced import PiecedSource, Run
from .state import State

FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
READ = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
}  # fmt: skip
"""Keys of the model states that have a meaning here, or none elsewhere; the others are kept among the values."""


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is one that DeepSpeed wrote: with `latest`, or one step's."""
    return path.is_dir() and (_has_states(path) or _latest(path) is not None)


def _has_states(path: Path) -> bool:
    return any(one.name.endswith(("_model_states.pt", "_optim_states.pt")) for one in path.iterdir())


def _latest(path: Path) -> Path | None:
    """The folder that `latest` names; None where there is none of DeepSpeed's.

    Raises:
        CheckpointError: it names something else than a folder beside it.
    """
    latest = path / "latest"
    if not latest.is_file() or latest.stat().st_size > 1000:
        return None
    name = latest.read_text(errors="replace").strip()
    if not name or Path(name).name != name or name == "..":
        raise CheckpointError(f"{latest} does not name a folder beside it.", got=repr(name))
    step = path / name
    return step if step.is_dir() and _has_states(step) else None


class DeepSpeedSource(PiecedSource):
    """A folder of DeepSpeed's ZeRO-3. Nothing in it is executed.

    Args:
        path: of the folder with `latest`, or of one step's.

    Raises:
        CheckpointError: ranks are missing, files are damaged, or it is not of ZeRO-3.
    """

    def _open(self) -> None:
        step = self._path if _has_states(self._path) else _latest(self._path)
        if step is None:
            raise CheckpointError(f"{self._path} is no folder that DeepSpeed wrote.")
        self._path = step
        for file in _files(step):
            self._archives.append(Archive(file))
        self._models, self._optimizers = self._archives[::2], self._archives[1::2]
        self._world = len(self._models)
        self._state = State(str(step), self._models[0].mapped)
        self.values = self._state.values
        try:
            model = self._models[0].root
            groups = [{str(n): checked_shape(str(n), s) for n, s in group.items()} for group in model["param_shapes"]]
            flat = [one.root["optimizer_state_dict"] for one in self._optimizers]
            for rank, one in enumerate(flat):
                self._check(rank, one)
            self._read_parameters(groups, [one["fp32_flat_groups"] for one in flat])
            self._read_frozen(model)
            self._read_module(model)
            self._read_optimizer(groups, [one["optimizer_state_dict"] for one in flat])
            for key, value in model.items():
                if key not in READ and value is not None:
                    self._state.add_other(str(key), value)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self._path} is not built as ZeRO-3's checkpoints are ({what}).") from error

    def _check(self, rank: int, flat: Mapping[str, Any]) -> None:
        stage, parts = flat.get("zero_stage"), flat.get("partition_count")
        stage = stage.arguments[0] if isinstance(stage, Call) and stage.arguments else stage
        if stage != 3:
            raise CheckpointError(f"{self._path} was not written by ZeRO-3.", rank=rank, expected="stage 3", got=stage)
        if isinstance(parts, int) and parts != self._world:
            raise CheckpointError(
                f"{self._path} is an incomplete checkpoint: files of ranks are missing.",
                expected=f"{parts} ranks",
                got=f"{self._world} ranks",
            )

    def _read_parameters(self, groups: list[dict[str, tuple[int, ...]]], flat: list[Any]) -> None:
        for index, group in enumerate(groups):
            self._read_group(MODEL, "", group, [one[index] for one in flat])
        if any(len(one) != len(groups) for one in flat):
            raise CheckpointError(f"{self._path} has other groups of weights than of parameters.")

    def _read_group(self, before: str, after: str, group: Mapping[str, tuple[int, ...]], flat: Sequence[Any]) -> None:
        """The parameters of one group, of which `flat` has one tensor a rank."""
        for rank, stored in enumerate(flat):
            expected = sum(self._part(shape) for shape in group.values())
            if not isinstance(stored, Stored) or stored.shape != (expected,):
                got = stored.shape if isinstance(stored, Stored) else type(stored).__name__
                raise CheckpointError(
                    f"{self._path}: a flat group has another size.", rank=rank, expected=(expected,), got=got
                )
            self._optimizers[rank].check(f"group of rank {rank}", stored)
        at = 0
        for name, shape in group.items():
            part, left = self._part(shape), math.prod(shape)
            runs = []
            for archive, stored in zip(self._optimizers, flat, strict=True):
                runs.append(Run(archive, stored, at, min(part, left)))
                left -= runs[-1].count
            self._add(before + name + after, runs, Entry(shape, flat[0].dtype))
            at += part

    def _part(self, shape: tuple[int, ...]) -> int:
        return -(-math.prod(shape) // self._world)

    def _read_frozen(self, model: Mapping[str, Any]) -> None:
        """Parameters without gradients: as parts of their own in the model states."""
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            shape = checked_shape(str(name), shape)
            runs, left = [], math.prod(shape)
            for archive in self._models:
                stored = archive.root["frozen_param_fragments"][name]
                archive.check(name, stored)
                if stored.shape != (self._part(shape),):
                    raise CheckpointError(
                        f"{archive.path}: a part of a frozen parameter has another size.", parameter=name
                    )
                runs.append(Run(archive, stored, 0, min(stored.shape[0], left)))
                left -= runs[-1].count
            self._add(f"{MODEL}{name}", runs, Entry(shape, runs[0].stored.dtype))

    def _read_module(self, model: Mapping[str, Any]) -> None:
        """Buffers, which every rank has, and names of parameters that are tied."""
        buffers, first = set(model["buffer_names"]), {}
        for name, stored in model["module"].items():
            full = f"{MODEL}{name}"
            if name in buffers:
                self._add_whole(full, self._models[0], stored)
            elif full in self.entries and isinstance(stored, Stored):
                first[stored.key] = full
            elif not isinstance(stored, Stored):
                self._state.add_model({name: stored})
        for name, stored in model["module"].items():
            full = f"{MODEL}{name}"
            if full not in self.entries and isinstance(stored, Stored):
                if stored.key not in first:
                    raise CheckpointError(f"{self._path} does not say what a parameter is.", parameter=name)
                self.ties[full] = first[stored.key]
        for name, twin in (model.get("shared_params") or {}).items():
            if f"{MODEL}{name}" not in self.entries:
                self.ties[f"{MODEL}{name}"] = self.ties.get(f"{MODEL}{twin}", f"{MODEL}{twin}")

    def _read_optimizer(self, groups: list[dict[str, tuple[int, ...]]], flat: list[Mapping[str, Any]]) -> None:
        values = self._state.values.setdefault("optimizer", {})
        for index, group in enumerate(groups):
            for key, value in flat[0]["state"].get(index, {}).items():
                parts = [one["state"][index][key] for one in flat]
                if isinstance(value, Stored) and value.shape:
                    self._read_group(OPTIMIZER, f".{key}", group, parts)
                    continue
                for name in group:
                    if isinstance(value, Stored):
                        self._add_whole(f"{OPTIMIZER}{name}.{key}", self._optimizers[0], value)
                    else:
                        plain = self._state.plain(value, f"{OPTIMIZER}{name}.{key}")
                        values.setdefault("scalars", {}).setdefault(name, {})[key] = plain
        values["param_groups"] = [
            {**self._state.plain(settings, "optimizer.param_groups"), "params": list(group)}
            for settings, group in zip(flat[0]["param_groups"], groups, strict=True)
        ]


def _files(step: Path) -> list[Path]:
    """Of every rank, in order, the file of model states and that of optimizer states."""
    by_kind: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for file in sorted(step.iterdir()):
        matched = FILE.fullmatch(file.name)
        if matched is None:
            if file.name.endswith(("_model_states.pt", "_optim_states.pt")):
                raise CheckpointError(
                    f"{step} was not written by ZeRO-3: it has {file.name}.",
                    remedy="DeepSpeed's zero_to_fp32.py makes a state dict of checkpoints of stages 1 and 2",
                )
            continue
        rank, part, kind = int(matched[1]), int(matched[2]), matched[3]
        if part:
            raise CheckpointError(f"{step} was written with tensor or pipeline parallelism ({file.name}).")
        by_kind[kind][rank] = file
    world = 1 + max([rank for files in by_kind.values() for rank in files], default=0)
    for kind, files in by_kind.items():
        if missing := sorted(set(range(world)) - files.keys()):
            raise CheckpointError(f"{step} is an incomplete checkpoint: {kind}_states.pt are missing.", rank=missing[0])
    return [files[rank] for rank in range(world) for files in by_kind.values()]
