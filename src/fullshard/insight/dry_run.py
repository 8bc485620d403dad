"""What a rank of a training program does in a world that does not exist: its units, its memory, what it sends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..events import Event, stream
from ..names import size
from ..runtime import all_roots
from ..torch_private.fake_group import pretended
from .describe import describe
from .memory import memory_use

UNSEEN = """One process cannot show values after a collective (they are undefined: a loss of nan means nothing), ranks
that differ, hangs, and how long communication takes."""


class Enough(BaseException):
    """Ends a program that has taken its steps."""


class DryRun:
    """Follows the optimizer's steps of a program.

    Args:
        steps: after so many of them the program is ended.

    Attributes:
        taken: the steps so far.
        report: what was found in the last step; empty before that.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.taken, self.report = steps, 0, ""
        self._sent: dict[str, list[int]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count the steps of all optimizers; `Enough` is raised after the last one."""
        hook = register_optimizer_step_post_hook(self._after)
        stream.listeners.append(self._event)
        try:
            yield
        finally:
            stream.listeners.remove(self._event)
            hook.remove()

    def _event(self, event: Event) -> None:
        if event.verb in ("gather", "reduce", "all_reduce"):
            count = self._sent.setdefault(event.verb, [0, 0])
            count[0] += 1
            count[1] += event.nbytes

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.taken += 1
        if self.taken == self.steps:
            self.report = self._described(optimizer)
            raise Enough
        self._sent.clear()

    def _described(self, optimizer: torch.optim.Optimizer) -> str:
        lines = []
        for root in all_roots():
            for model in root.top.modules:
                lines += [describe(model, plans=True), "", str(memory_use(model, optimizer)), ""]
        if not lines:
            return "No model was sharded: neither fully_shard nor FullyShardedDataParallel was used before the step."
        named = {"gather": "all-gathers", "reduce": "reduce-scatters", "all_reduce": "all-reduces of replicas"}
        lines += [
            f"{named[verb]} in a step: {count}, of {size(nbytes)} together"
            for verb, (count, nbytes) in self._sent.items()
        ]
        return "\n".join(lines)


def dry_run(program: Callable[[], object], world: int, steps: int) -> DryRun:
    """Run a program until it has taken `steps` optimizer steps, or ends.

    Args:
        program: runs as rank 0 of a fake group, which it makes itself.
        world: ranks of that group.
        steps: at least 1.

    Returns:
        What was found.

    Raises:
        Exception: whatever the program raises.
    """
    run = DryRun(steps)
    with pretended(world), run.following():
        try:
            program()
        except Enough:
            gc.collect()
    return run
