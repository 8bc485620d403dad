"""The current backward: whether one runs, and a callback at its end.

Private torch API: `torch.autograd.Variable._execution_engine.queue_callback` and `torch._C._current_graph_task_id`.
Neither has a public equivalent, except that users would have to call the engine themselves after `loss.backward()`.
`tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident

import torch

_task_id: Callable[[], int] = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


def inside_backward() -> bool:
    """Whether this thread is running part of a backward."""
    return _task_id() != -1


class BackwardEnd:
    """Calls `done` once, when the backward that runs at construction ends without an exception.

    Autograd holds the only strong reference to the callback, and drops it with the backward: on the caller's thread or
    the device's, some time after the caller received the exception.

    Args:
        done: called by autograd, on any thread.
        caller: the thread that called `backward()`; hooks may run on a different thread.

    Attributes:
        alive: a call that returns None once that backward is over. For hooks, which always run in some backward.
    """

    __slots__ = ("_caller", "alive")

    def __init__(self, done: Callable[[], None], caller: int) -> None:
        callback = _Callback(done)
        _queue_callback(callback)
        self.alive: Callable[[], object] = weakref.ref(callback)
        self._caller = caller

    def running(self) -> bool:
        """Whether that backward is still running, and this thread is part of one."""
        return self.alive() is not None and inside_backward()

    def ended_here(self) -> bool:
        """Whether that backward was called from this thread and is no longer running."""
        return get_ident() == self._caller and not inside_backward()

    def is_over(self) -> bool:
        """Whether that backward is no longer running; threads other than the caller's may not know it yet."""
        return self.alive() is None or self.ended_here()


class _Callback:
    __slots__ = ("__weakref__", "done")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done

    def __call__(self) -> None:
        self.done()
