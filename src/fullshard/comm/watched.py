"""Waits that end: abandon a gloo collective that never completes once the watcher knows why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..errors import DivergenceError
from ..mesh import Axis, cut_all_lines
from ..watcher import RANK, SLICE

_SLICE = timedelta(seconds=SLICE)


class Watched:
    """A collective in flight that the host waits for."""

    __slots__ = ("label", "work")

    def __init__(self, work: Any) -> None:
        self.work, self.label = work, RANK.log[-1]

    def wait(self) -> None:
        try:
            self.work.wait(_SLICE)
        except RuntimeError:  # it did not complete within a slice, or failed
            pass
        else:
            return
        wait_explained(self.work, self.label)


def wait_explained(work: Any, label: int) -> None:
    """Wait for a collective that did not complete within a slice. On failure raises one error, not a chain of them.

    Raises:
        DivergenceError: says why it failed, or why it will never complete.
        RuntimeError: the backend's own error, if there is no watcher.
    """
    try:
        RANK.wait(work, label)
    except DivergenceError:
        raise
    except RuntimeError as error:
        failed = error
    else:
        return
    raise RANK.explain(failed) from None


RANK.break_off = cut_all_lines


def watched(axis: Axis, work: Any) -> Any:
    """Wrap `work` over an axis in `Watched`, unless the host does not wait for it (accelerator backends, fakes)."""
    return Watched(work) if axis.backend == "gloo" else work


def watched_calls(axis: Axis, call: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `call` so that each work it returns is `watched`."""
    return (lambda: Watched(call())) if axis.backend == "gloo" else call
