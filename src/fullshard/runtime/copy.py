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
    """A copy of `module`, with units and shards of its own on the same mesh. No communication.

    Values, settings and hooks of the module are copied. Gradients are not, as torch's own parameters do not copy them;
    what is gathered is not: the copy starts sharded.
    Modules under `module` are copied with it; a model is copied whole by copying its root.

    Raises:
        PhaseError: a forward or backward through the unit is running; gradients wait to be reduced; a parameter is
            tied to a module outside of what is copied.
    """
    if _COPYING in memo:  # a unit within one that is being copied
        return _copy_plain(module, memo)
    runners = runners_in(module)
    for one in runners:
        root = one.root
        if root is not None:
            root.recover_if_broken()
            if root.pass_top is not None or root.in_backward:
                raise copied_while_it_runs(plain_class(module).__name__)
    take_over_replaced(module)
    units = {id(one): clone_unit(one.unit, memo) for one in runners}
    memo[_COPYING] = True
    try:
        new = _copy_plain(module, memo)
    finally:
        del memo[_COPYING]
    _set_up(runners, units, memo)
    return new


def copy_module(module: Any) -> Any:
    """As `copy.copy` copies any module: the same parameters, submodules and unit."""
    new = object.__new__(type(module))
    new.__setstate__(object.__reduce_ex__(module, 4)[2])
    return new


def pickling_error(module: Any) -> PhaseError:
    """The error for pickling a sharded module, by `torch.save(model)` for instance."""
    return pickled(plain_class(module).__name__)


def _copy_plain(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """As `copy.deepcopy` copies any module, without its unit and the methods that refer to it."""
    ours = {RUNNER_KEY, FORWARD_METHODS_KEY, *module.__dict__.get(FORWARD_METHODS_KEY, ())}
    state: Any = object.__reduce_ex__(module, 4)[2]  # what its __getstate__ gives, or its __dict__
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
        for module, one in zip(modules, copied, strict=True):
            one.__dict__[RUNNER_KEY] = new
            for name, method in module.__dict__.get(FORWARD_METHODS_KEY, {}).items():
                object.__setattr__(one, name, copy.deepcopy(method, memo))  # bound to the copy
                run_method(one, new, name)
    for new in copies.values():
        for name in ("forward_units", "backward_units"):
            wanted = getattr(new.settings.prefetch, name)
            if wanted is not None:  # those that point outside of what was copied are dropped
                inside = all(id(runner) in copies for runner in wanted)
                new.set(**{f"prefetch_{name}": tuple(copies[id(r)] for r in wanted) if inside else None})
