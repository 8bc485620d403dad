"""Clipping and communication hooks of the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm import HookComm
from ..errors import ConfigError, UsageError, message
from ..optim.clip import clip_local_gradients
from ..shard import owner_of


def clip_gradients(root: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """`FullyShardedDataParallel.clip_grad_norm_`, for the root instance."""
    sharded: dict[int, tuple[Any, list[torch.Tensor]]] = {}
    for child in root.fsdp_modules(root):
        axis = child._arguments.axes.shard
        if axis.size > 1 and child._hooks().unit.buckets:
            sharded.setdefault(id(axis.group), (axis, []))
    whole: list[torch.Tensor] = []
    for parameter in root.parameters():
        unit = owner_of(parameter)
        if parameter.grad is None:
            continue
        if unit is not None and unit.buckets[0].axes.shard.size > 1:
            sharded[id(unit.buckets[0].axes.shard.group)][1].append(parameter.grad)
        else:
            whole.append(parameter.grad)
    return clip_local_gradients(list(sharded.values()), whole, max_norm, norm_type, root.compute_device)


def register_hook(root: Any, state: object, hook: Callable[..., Any]) -> None:
    """`FullyShardedDataParallel.register_comm_hook`, for the root instance."""
    if not callable(hook):
        raise ConfigError(f"a communication hook must be callable, got {hook!r}")
    instances = root.fsdp_modules(root)
    for child in instances:
        if isinstance(child._hooks().comm, HookComm):
            raise UsageError("a communication hook is already registered")
        axes = child._arguments.axes
        if axes.shard.size > 1 and axes.replicate is not None:
            raise UsageError(
                message(
                    "Communication hooks do not work with hybrid strategies.",
                    got=child.sharding_strategy.name,
                    remedy="use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
                )
            )
    for child in instances:
        hooks = child._hooks()
        hooks.comm = HookComm(hooks.comm, state, hook)
