"""An error of memory that ends the program is explained by a plan before it is printed."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType


@cache
def install() -> None:
    """Install an exception hook, which calls the one that is installed now. For programs that may shard a model."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            from .memory import explain_at_the_end  # not before: it imports what plans need

            explain_at_the_end(error)
        except Exception as second:
            error.add_note(f"Fullshard could not explain what holds memory: {second!r}")
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook
