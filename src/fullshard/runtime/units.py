"""Where a module keeps the unit that it is (one of) the modules of."""

from __future__ import annotations

from torch import nn

from ..shard import Unit
from .hooks import UnitHooks

HOOKS_KEY = "_fullshard_hooks"
"""Where a unit's module keeps its hooks, in its `__dict__`."""


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks of the unit that `module` is (one of) the modules of; None if it is no unit."""
    found: UnitHooks | None = module.__dict__.get(HOOKS_KEY)
    return found


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `module`."""
    return HOOKS_KEY in module.__dict__


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` is (one of) the modules of; None if it is no unit."""
    hooks = hooks_of(module)
    return hooks.unit if hooks is not None else None
