"""The backward that is running now: which it is, and a call at its end.

Private torch API: `torch.autograd.Variable._execution_engine.queue_callback` and `torch._C._current_graph_task_id`.
Neither has a public equivalent; a user's own call after `loss.backward()` would be one, and is what this saves them.
`tests/test_private_api.py` says when they go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)


def inside_backward() -> bool:
    """Whether this thread is running part of a backward (true wherever torch cannot tell)."""
    return _task_id() != -1


class BackwardEnd:
    """Calls `done` once, when the backward that was running at construction ends without an exception.

    If it ends with one, `broken` is called in its place, as soon as autograd lets go of it; only on the thread that
    made this, so that it does not run beside the user's code. Autograd holds the only strong reference to the
    callback, and drops it with the backward.
    """

    __slots__ = ("_callback",)

    def __init__(self, done: Callable[[], None], broken: Callable[[], None]) -> None:
        callback = _Callback(done, broken)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    def running(self) -> bool:
        """Whether that backward is still running, and this thread is part of one."""
        return self._callback() is not None and inside_backward()

    def is_over(self) -> bool:
        """Whether that backward runs no more; not known to threads other than the one that began it while it may."""
        callback = self._callback()
        return callback is None or (callback.thread == threading.get_ident() and not inside_backward())


class _Callback:
    __slots__ = ("__weakref__", "broken", "called", "done", "thread")

    def __init__(self, done: Callable[[], None], broken: Callable[[], None]) -> None:
        self.done, self.broken = done, broken
        self.called, self.thread = False, threading.get_ident()

    def __call__(self) -> None:
        self.called = True
        self.done()

    def __del__(self) -> None:
        if not self.called and threading.get_ident() == self.thread:
            self.broken()
