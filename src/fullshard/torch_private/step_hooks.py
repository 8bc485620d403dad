"""The engine's own steps of an optimizer, without the hooks that programs registered.

Private torch API: `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and the same for all
optimizers in `torch.optim.optimizer`; `hooked`, on a `step` that was wrapped to run them. The public alternative would
be a step with these hooks, which may count it, log it or wait for other ranks. `tests/test_private_api.py` fails when
they are gone.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..readers import wait_for_readers

_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ONE_AT_A_TIME = threading.RLock()  # global hooks belong to the process, and models may be loaded in several threads


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which no hook runs before or after a step of `optimizer`, for one thread at a time."""
    tables: list[Any] = [optimizer.__dict__.get(name) or {} for name in _TABLES]
    tables += [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    with _ONE_AT_A_TIME:
        before = [dict(table) for table in tables]
        try:
            for table in tables:
                table.clear()
            yield
        finally:
            for table, hooks in zip(tables, before, strict=True):
                table.update(hooks)


def step_part(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Step only these parameters, with the optimizer's state, without hooks; its groups and attributes do not change.

    Passes `args` and `kwargs` to the step.

    Any number of threads may, for different parameters. The step is that of a second object with the same attributes.
    Whether all parameters, part by part, then step as in one step: `optim/probe.py`.
    """
    wait_for_readers()
    chosen = {id(parameter) for parameter in parameters}
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in chosen]}
        for group in optimizer.param_groups
    ]
    part = object.__new__(type(optimizer))
    part.__dict__ = {**optimizer.__dict__, "param_groups": groups, **{name: OrderedDict() for name in _TABLES}}
    step: Any = type(optimizer).step
    free = getattr(getattr(inspect.unwrap(step), "__code__", None), "co_freevars", ("__class__",))
    if "__class__" in free:  # it calls `super().step`, which runs hooks too
        with without_step_hooks(part):
            step(part, *args, **kwargs)
    else:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(part, *args, **kwargs)


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer's step computes gradients itself, as that of L-BFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
