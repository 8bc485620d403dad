"""Waits that end: a gloo collective that never comes is given up when the watcher has found out why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..errors import DivergenceError
from ..mesh import Axis, all_lines
from ..watcher import RANK, SLICE

_SLICE = timedelta(seconds=SLICE)


class Watched:
    """A collective in flight, of which the host waits for the end."""

    __slots__ = ("label", "work")

    def __init__(self, work: Any) -> None:
        self.work, self.label = work, RANK.board.number

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        try:
            self.work.wait(_SLICE)
        except RuntimeError:
            self._go_on()

    def _go_on(self) -> None:
        """It did not come within a slice, or failed."""
        try:
            RANK.wait(self.work, self.label)
        except RuntimeError as failed:
            if isinstance(failed, DivergenceError):
                raise
            raise RANK.explain(failed) from failed


def break_off() -> None:
    """End all collectives that are in flight: nothing comes of them any more."""
    for lines in all_lines():
        lines.cut()


RANK.break_off = break_off


def watched(axis: Axis, work: Any) -> Any:
    """`work`, over an axis; as it is where the host does not wait for it (accelerators' own backends, fakes)."""
    return Watched(work) if axis.backend == "gloo" else work
