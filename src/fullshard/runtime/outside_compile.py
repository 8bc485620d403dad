"""Keeping Dynamo out of the engine, at no cost where nothing is compiled.

Private torch API: `torch._C._dynamo.eval_frame.get_eval_frame_callback`, which tells whether Dynamo looks at the frames
of this thread now. The public alternative is `torch.compiler.disable` alone, 8 us for each call, twice per unit and
forward; it is what is used where Dynamo is active, and where the function is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _callback

    HAS_CALLBACK = _callback() in (None, False)
except ImportError:
    HAS_CALLBACK = False

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_compile(function: FunctionT) -> FunctionT:
    """`function`, kept from Dynamo: a compiled block is one graph between the engine's hooks."""
    disabled: FunctionT = torch.compiler.disable(function)
    if not HAS_CALLBACK:
        return disabled

    @wraps(function)
    def guarded(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _callback():
            return disabled(*args)
        return function(*args)

    return guarded  # type: ignore[return-value]
