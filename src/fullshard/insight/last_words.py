"""After an out-of-memory error that ends the program, print how much memory each possible change would have freed."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType


@cache
def install() -> None:
    """Print a plan after an out-of-memory error that ends the program. For programs that may shard a model.

    The error itself is printed first: planning takes seconds, in which another rank, and with it the job, may end. If
    there is a watcher, its hook calls `_say`: it is installed after the process group, whose own hook holds back the
    output of earlier hooks.
    """
    from ..watcher import RANK  # `import fullshard` alone imports no torch

    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not RANK.records_its_end:
            _say(error)

    sys.excepthook = hook
    RANK.last_words.append(_say)


_ROOM = 64 * 2**20


def _say(error: BaseException) -> None:
    try:
        bytearray(_ROOM)  # a host without memory cannot plan: torch would end in a segmentation fault
    except MemoryError:
        if "memory" in f"{type(error).__name__} {error}".lower():
            print("Fullshard: no plan of a step follows: the host has less than 64 MiB left.", file=sys.stderr)
        return
    import torch.distributed as dist

    try:
        from .memory import explained_at_the_end  # not before: it imports what plans need

        words = explained_at_the_end(error)
    except KeyboardInterrupt:
        words = "a plan of the step was interrupted."
    except Exception as second:
        words = f"What holds memory could not be explained: {second!r}"
    if words is not None:
        rank = f", rank {dist.get_rank()}" if dist.is_initialized() else ""
        print(f"Fullshard{rank}: {words}", file=sys.stderr, flush=True)
