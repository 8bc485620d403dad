"""Copying a unit's hooks: the same settings, for a copied unit on copied modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..shard import Unit
from .hooks import UnitHooks

SETTINGS = (
    "reshard_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "unshard_in_backward",
    "divide_factor",
    "force_sum",
    "is_last_backward",
    "max_reducing",
    "all_reduce_hook",
    "uses_group_memory",
    "find_root",
    "backward_depth",
    "prefetches_late",
)
"""Attributes of `UnitHooks` that a copy takes over as they are, besides the arguments of its constructor."""


def clone_hooks(hooks: UnitHooks, unit: Unit, modules: Sequence[nn.Module]) -> UnitHooks:
    """Hooks of `unit`, a copy of `hooks`' unit, on `modules`, with `hooks`' settings and no state of any step."""
    new = UnitHooks(unit, modules, hooks.comm, hooks.policy, hooks.reshard_after_forward, hooks.prefetch_depth)
    for name in SETTINGS:
        setattr(new, name, getattr(hooks, name))
    return new


def clone_prefetches(old: UnitHooks, new: UnitHooks, copies: dict[int, UnitHooks]) -> None:
    """Point the prefetches that the user set at the copies; those that point outside of what was copied are dropped.

    Args:
        copies: by id of an old unit's hooks, the new ones.
    """
    for name in ("forward_prefetch", "backward_prefetch"):
        wanted = getattr(old, name)
        if wanted is not None and all(id(hooks) in copies for hooks in wanted):
            setattr(new, name, tuple(copies[id(hooks)] for hooks in wanted))
