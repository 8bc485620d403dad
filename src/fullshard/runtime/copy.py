"""`copy.deepcopy` of sharded models: for averages of weights (EMA), references, and resets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import PhaseError
from ..names import plain_class
from ..shard import Unit, clone_unit, place_clone
from .messages import copied_in_part, copied_while_it_runs, pickled
from .runner import Runner
from .step import FORWARD_METHODS_KEY, run_method
from .units import RUNNER_KEY, runners_in, take_over_replaced

_COPYING = "fullshard: units being copied"


def deepcopy_module(module: Any, memo: dict[Any, Any]) -> Any:
    """Return a copy of `module` with its own units and shards on the same mesh. No communication.

    Copies values, settings and hooks, but not gradients (PyTorch's own parameters do not copy theirs either) and not
    gathered buffers: the copy starts sharded. Modules below `module` are copied with it; copy the root to copy a model.

    Raises:
        PhaseError: a forward or backward through the unit is running; gradients wait to be reduced; a parameter is
            tied to a module outside the copied ones.
    """
    if _COPYING in memo:  # a unit inside one that is being copied
        return _copy_plain(module, memo)
    runners = runners_in(module)
    for runner in runners:
        if runner.root is not None:
            runner.root.recover_if_broken()
        if runner.is_running:
            raise copied_while_it_runs(plain_class(module).__name__)
    take_over_replaced(module)
    units = {id(runner): clone_unit(runner.unit, memo) for runner in runners}
    memo[_COPYING] = True
    try:
        new = _copy_plain(module, memo)
    finally:
        del memo[_COPYING]
    _set_up(runners, units, memo)
    return new


def copy_module(module: Any) -> Any:
    """Copy a module as `copy.copy` does: the copy has the same parameters, submodules and unit."""
    new = object.__new__(type(module))
    new.__setstate__(object.__reduce_ex__(module, 4)[2])
    return new


def pickling_error(module: Any) -> PhaseError:
    """The error for pickling a sharded module, for instance with `torch.save(model)`."""
    return pickled(plain_class(module).__name__)


def _copy_plain(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """Copy a module as `copy.deepcopy` does, except its unit and the methods that refer to it."""
    ours = {RUNNER_KEY, FORWARD_METHODS_KEY, *module.__dict__.get(FORWARD_METHODS_KEY, ())}
    state: Any = object.__reduce_ex__(module, 4)[2]  # from its __getstate__, or its __dict__
    new: nn.Module = object.__new__(type(module))
    memo[id(module)] = new
    new.__setstate__({name: copy.deepcopy(value, memo) for name, value in state.items() if name not in ours})
    return new


def _set_up(runners: Sequence[Runner], units: dict[int, Unit], memo: dict[Any, Any]) -> None:
    """Give the copied modules their units and runners."""
    copies: dict[int, Runner] = {}
    for old in runners:
        modules = old.modules
        missing = [module for module in modules if id(module) not in memo]
        if missing:
            raise copied_in_part(plain_class(missing[0]).__name__)
        unit = units[id(old)]
        below = {id(child): memo[id(child)] for module in modules for child in module.modules() if id(child) in memo}
        place_clone(unit, old.unit, below)
        copied = [memo[id(module)] for module in modules]
        new = copies[id(old)] = Runner(unit, copied, old.settings, old.find_root)
        new.set(ignored=old.settings.ignored.copied(memo), reduce_tokens=None)
        for module, new_module in zip(modules, copied, strict=True):
            new_module.__dict__[RUNNER_KEY] = new
            for name, method in module.__dict__.get(FORWARD_METHODS_KEY, {}).items():
                object.__setattr__(new_module, name, copy.deepcopy(method, memo))  # bound to the copy
                run_method(new_module, new, name)
    for new in copies.values():
        for name in ("forward_units", "backward_units"):
            chosen = getattr(new.settings.prefetch, name)
            if chosen is not None:  # dropped if any unit was not copied
                inside = all(id(runner) in copies for runner in chosen)
                new.set(**{f"prefetch_{name}": tuple(copies[id(r)] for r in chosen) if inside else None})
