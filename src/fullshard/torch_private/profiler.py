"""Named ranges in a profile, which cost nothing while no profiler records.

Private torch API: `torch.autograd._profiler_enabled`. There is no public alternative that tells; entering
`torch.profiler.record_function` unasked costs 2 to 5 us. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

_recording: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

P = ParamSpec("P")
T = TypeVar("T")


def in_range(what: str) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorates a function of a unit: a range "fullshard: <what> <unit>" around its calls, while a profiler records."""

    def decorate(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(function)
        def within(unit: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if not _recording():
                return function(unit, *args, **kwargs)
            with record_function(f"fullshard: {what} {unit.name or '(root)'}"):
                return function(unit, *args, **kwargs)

        return within

    return decorate
