"""`copy.deepcopy` of sharded models: for averages of weights (EMA), references, and resets."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ...errors import PhaseError
from ...runtime import HOOKS_KEY, UnitHooks, clone_hooks, clone_prefetches, hooks_of
from ...shard import Unit, clone_unit, place_clone
from .module import FORWARD_METHODS_KEY, FSDPModule, register_fsdp_forward_method

_COPYING = "fullshard: units being copied"


def deepcopy_module(module: FSDPModule | nn.Module, memo: dict[Any, Any]) -> Any:
    """A copy of `module`, with units and shards of its own on the same mesh. No communication.

    Values, gradients, settings and hooks of the module are copied; what is gathered is not: the copy starts sharded.
    Modules under `module` are copied with it; a model is copied whole by copying its root.

    Raises:
        PhaseError: a forward or backward through the unit is running; gradients wait to be reduced; a parameter is
            tied to a module outside of what is copied.
    """
    assert isinstance(module, nn.Module)
    if _COPYING in memo:  # a unit within one that is being copied
        return _copy_plain(module, memo)
    hooks = _hooks_under(module)
    for one in hooks:
        _check_idle(one, module)
    units = {id(one): clone_unit(one.unit, memo) for one in hooks}
    memo[_COPYING] = True
    try:
        new = _copy_plain(module, memo)
    finally:
        del memo[_COPYING]
    _set_up(hooks, units, memo)
    return new


def _hooks_under(module: nn.Module) -> list[UnitHooks]:
    found = {id(hooks): hooks for child in module.modules() if (hooks := hooks_of(child)) is not None}
    return list(found.values())


def _check_idle(hooks: UnitHooks, module: nn.Module) -> None:
    root = hooks.root
    if root is not None and (root.pass_top is not None or root.in_backward):
        raise PhaseError(
            f"{type(module).__name__} was deep-copied while a forward or backward through it runs.",
            remedy="copy it between steps; after an exception, call reset_iter_state() on the root first",
        )


def _copy_plain(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """As `copy.deepcopy` copies any module, without its unit and the methods that refer to it."""
    ours = {HOOKS_KEY, FORWARD_METHODS_KEY, *module.__dict__.get(FORWARD_METHODS_KEY, ())}
    state: Any = module.__reduce_ex__(4)[2]  # what its __getstate__ gives, or its __dict__
    new: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = new
    new.__setstate__({name: copy.deepcopy(value, memo) for name, value in state.items() if name not in ours})
    return new


def _set_up(hooks: list[UnitHooks], units: dict[int, Unit], memo: dict[Any, Any]) -> None:
    """Give the copied modules their units and hooks."""
    copies: dict[int, UnitHooks] = {}
    registries: dict[int, nn.Module] = {}
    for old in hooks:
        for module in old.modules:
            for child in module.modules():
                if id(child) in memo:
                    registries[id(child._parameters)] = registries[id(child.__dict__)] = memo[id(child)]
    for old in hooks:
        modules = old.modules
        missing = [module for module in modules if id(module) not in memo]
        if missing:
            raise PhaseError(
                f"{type(missing[0]).__name__} forms one unit with a module that was deep-copied without it.",
                remedy="deep-copy a module that contains all modules of the unit",
            )
        unit = units[id(old)]
        place_clone(unit, old.unit, registries)
        new = copies[id(old)] = clone_hooks(old, unit, [memo[id(module)] for module in modules])
        for module in modules:
            copied = memo[id(module)]
            copied.__dict__[HOOKS_KEY] = new
            for name, method in module.__dict__.get(FORWARD_METHODS_KEY, {}).items():
                object.__setattr__(copied, name, copy.deepcopy(method, memo))  # bound to the copy
                register_fsdp_forward_method(copied, name)
    for old in hooks:
        clone_prefetches(old, copies[id(old)], copies)
