"""The engine's own steps of an optimizer, without the hooks that programs registered.

Private torch API: `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and the same for all
optimizers in `torch.optim.optimizer`. The public alternative would be a step with these hooks, which may count it, log
it or wait for other ranks. `tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_ONE_AT_A_TIME = threading.Lock()  # global hooks belong to the process, and models may be loaded in several threads


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which no hook runs before or after a step of `optimizer`, for one thread at a time."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    tables: list[Any] = [optimizer.__dict__.get(name) or {} for name in names]
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
