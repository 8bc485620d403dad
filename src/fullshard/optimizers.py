"""Optimizers as arguments, one or several, and what their groups hold beside parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, class_and_value

NOT_SETTINGS = frozenset({"params", "param_names"})
"""The keys of a group that are not settings."""
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Settings that torch's schedulers add to groups."""


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def as_list(optimizers: Any) -> list[Any]:
    """An argument that is an optimizer or several, in any iterable but text, mappings and modules, as a list."""
    is_several = isinstance(optimizers, Iterable) and not isinstance(optimizers, (str, Mapping, nn.Module))
    return list(optimizers) if is_several else [optimizers]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an argument that should be an optimizer.

    Raises:
        ConfigError: it is not.
    """
    if not hasattr(optimizer, "param_groups"):
        got = class_and_value(optimizer)
        raise ConfigError("The optimizer is invalid.", expected="a torch.optim.Optimizer", got=got)
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of all groups of these optimizers."""
    return [parameter for each in optimizers for group in groups_of(each) for parameter in group["params"]]
