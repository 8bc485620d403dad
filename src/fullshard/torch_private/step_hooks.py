"""The engine's own steps of an optimizer, without the hooks that programs registered; and its hooks inside of theirs.

Private torch API: `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and the same for all
optimizers in `torch.optim.optimizer`; `hooked`, on a `step` that was wrapped to run them. The public alternative would
be a step with these hooks, which may count it, log it or wait for other ranks, and hooks in the order of their
registration. `tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..readers import wait_for_readers

TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ONE_AT_A_TIME = threading.RLock()  # global hooks belong to the process, and models may be loaded in several threads


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which no hook runs before or after a step of `optimizer`, for one thread at a time."""
    tables: list[Any] = [optimizer.__dict__.get(name) or {} for name in TABLES]
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


def second_object(optimizer: torch.optim.Optimizer, **attributes: Any) -> torch.optim.Optimizer:
    """An object with the attributes of `optimizer`, but for these, and without its hooks."""
    second = object.__new__(type(optimizer))
    second.__dict__ = {**optimizer.__dict__, **{name: OrderedDict() for name in TABLES}, **attributes}
    return second


def step_part(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Step only these parameters, with the optimizer's state, without hooks; its groups and attributes do not change.

    Passes `args` and `kwargs` to the step.

    Any number of threads may, for different parameters. The step is that of a second object with the same attributes.
    Whether all parameters, part by part, then step as in one step: `optim/probe.py`.
    """
    step_without_hooks(part_of(optimizer, parameters), *args, **kwargs)


def part_of(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """A second object with the optimizer's state, and groups of only these parameters."""
    wait_for_readers()
    chosen = {id(parameter) for parameter in parameters}
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in chosen]}
        for group in optimizer.param_groups
    ]
    return second_object(optimizer, param_groups=groups)


def step_without_hooks(part: Any, *args: Any, **kwargs: Any) -> None:
    """Step a `second_object`, without hooks of all optimizers."""
    step: Any = type(part).step
    free = getattr(getattr(inspect.unwrap(step), "__code__", None), "co_freevars", ("__class__",))
    if "__class__" in free:  # it calls `super().step`, which runs hooks too
        with without_step_hooks(part):
            step(part, *args, **kwargs)
    else:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(part, *args, **kwargs)


Hook = Callable[..., Any]


def hook_closely(optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> Callable[[], None]:
    """Register a hook that runs after all others before a step, and one that runs before all others after it.

    Returns:
        A function that removes both.
    """
    reference = weakref.ref(optimizer)
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    tables: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    tables[1].move_to_end(handles[1].id, last=False)

    def register(hook: Hook) -> Any:
        own: Any = reference()
        handle = type(own).register_step_pre_hook(own, hook)
        tables[0].move_to_end(handles[0].id)
        return handle

    def remove() -> None:
        for handle in handles:
            handle.remove()
        own = reference()
        if own is not None and own.__dict__.get("register_step_pre_hook") is register:
            del own.__dict__["register_step_pre_hook"]

    optimizer.register_step_pre_hook = register  # type: ignore[method-assign]  # keeps ours the last
    return remove


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure among the arguments of a step, as its hooks get them; None without one."""
    return kwargs.get("closure") or (args[1] if len(args) > 1 else None)


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any] | None) -> tuple[Any, Any]:
    """These arguments with a different closure in place of `closure_of`."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer's step computes gradients itself, as that of L-BFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_AROUND_ALL: list[int] = []  # ids of our own global hooks: before, after


def hook_around_all(before: Hook, after: Hook) -> None:
    """Register hooks of all optimizers: `before` the step, after all hooks so far, and `after` it."""
    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    _AROUND_ALL[:] = [handle.id for handle in handles]


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook that others registered runs after the first of `hook_around_all`: of the optimizer, or of all."""
    own: Any = optimizer.__dict__
    if not _AROUND_ALL or own.get("_optimizer_step_pre_hooks") or own.get("_optimizer_step_post_hooks"):
        return True
    before, after = _AROUND_ALL
    return next(reversed(_global_optimizer_pre_hooks), None) != before or [*_global_optimizer_post_hooks] != [after]
