"""Every optimizer's step is noticed: one built too early is refused, and units know that their parameters changed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import ConfigError
from ..shard import note_change

_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_installed: list[Any] = []


def install() -> None:
    """Check every optimizer of this process at its first step, and again when it gains parameters. Once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = optimizer.param_groups
    count = sum([len(group["params"]) for group in groups])
    if _checked.get(optimizer) != count:
        _check_parameters(optimizer)
        _checked[optimizer] = count
    note_change([p for group in groups for p in group["params"] if isinstance(p, torch.Tensor) and p.grad is not None])


def _check_parameters(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.Tensor) and "_fullshard_successor" in parameter.__dict__:
                raise ConfigError(
                    f"This {type(optimizer).__name__} was built before its model was sharded: it holds "
                    "parameters that were replaced since, and would train nothing.",
                    parameter=parameter.__dict__.get("_fullshard_name", "?"),
                    expected="an optimizer built from model.parameters() once the model is sharded",
                    remedy="build the optimizer after fully_shard (or wrapping), from model.parameters(); or wrap "
                    "the model with use_orig_params=True, which keeps Parameter objects",
                )
