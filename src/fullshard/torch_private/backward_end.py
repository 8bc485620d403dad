"""A call at the end of the backward that is running now.

Private torch API: `torch.autograd.Variable._execution_engine.queue_callback`, which has no public equivalent; a user's
own call after `loss.backward()` would be one, and is what this saves them. `tests/test_private_api.py` says when it
goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class BackwardEnd:
    """Calls `fn` once, when the backward that was running at construction ends without an exception.

    `alive()` is true from then until that backward is over, however it ends: autograd holds the only strong
    reference to the callback, and drops it with the backward that raised.
    """

    __slots__ = ("_callback",)

    def __init__(self, fn: Callable[[], None]) -> None:
        callback = _Callback(fn)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    def alive(self) -> bool:
        """Whether that backward is still running."""
        return self._callback() is not None


class _Callback:
    __slots__ = ("__weakref__", "fn")

    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn = fn

    def __call__(self) -> None:
        self.fn()
