"""State dicts of sharded modules: checked as a whole before anything is loaded, and whole tensors cut on the way in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import CheckpointError
from ...runtime import runner_of
from ...shard import FlatShard, RowShard


def before_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """State-dict pre-hook: what is saved is the sharded parameters, whatever the phase."""
    runner = runner_of(module)
    if runner is not None:
        runner.unit.show_sharded()


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load pre-hook: refuse wrong shapes before the first parameter changes, and cut whole tensors.

    A state dict of an unsharded model loads into a sharded one: each rank takes its part of every tensor. No
    communication, unless the state dict holds tensors of another layout.

    Raises:
        CheckpointError: a tensor's shape is not the parameter's.
    """
    runner = runner_of(module)
    if runner is not None:
        runner.unit.show_sharded()
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        value = state_dict.get(prefix + name)
        if isinstance(parameter, (RowShard, FlatShard)) and isinstance(value, torch.Tensor):
            if tuple(value.shape) != tuple(parameter.shape):
                raise shape_error(prefix + name, parameter.shape, value.shape)
    for name, parameter in named:
        value = state_dict.get(prefix + name)
        if isinstance(parameter, (RowShard, FlatShard)) and isinstance(value, torch.Tensor):
            state_dict[prefix + name] = _cut_for(parameter, value)


def shape_error(name: str, expected: Iterable[int], got: Iterable[int]) -> CheckpointError:
    """What to raise for a state dict whose value for a parameter has another shape."""
    return CheckpointError(
        "A state dict does not fit the model; nothing was loaded.",
        parameter=name,
        expected=f"shape {tuple(expected)}",
        got=f"shape {tuple(got)}",
        remedy="load it into the model it was saved from, or fix the model's configuration",
    )


def _cut_for(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """`value` in the form of `parameter`: same kind and placement."""
    if isinstance(parameter, FlatShard):
        if isinstance(value, FlatShard) and value._run.same_as(parameter._run):
            return value
        whole = value.full_tensor() if isinstance(value, (DTensor, FlatShard)) else value
        return FlatShard(parameter._run.cut(whole.detach()), parameter._run)
    if isinstance(value, DTensor):
        return value
    whole = value.full_tensor() if isinstance(value, FlatShard) else value
    # src_data_rank=None: every rank has the whole tensor and takes its own part, without communication.
    return distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
