"""What one rank of a training program does if its process group is fake: its units, its memory, the bytes it sends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import ConfigError
from ..events import Event, stream
from ..names import size
from ..runtime import all_roots
from ..torch_private.fake_group import pretended
from ..torch_private.root_mesh import ranks_around
from .describe import describe
from .memory import memory_use

UNSEEN = """One process cannot show results of collectives (they are undefined: a loss of nan means nothing), hangs,
differences between ranks, or the time that communication takes. Tensor-parallel collectives are not counted above
(fullshard plan counts them), and checkpoints are not written."""


class Enough(BaseException):
    """Ends a program that has taken all its steps."""


class NotSharded(ConfigError):
    """The program took a step of an optimizer, but sharded no model by Fullshard."""


class Steps:
    """Counts the optimizer steps of a program, and the bytes that it sends in each.

    Args:
        limit: ends the program, by raising `Enough`, after this step.
        world: number of ranks.

    Attributes:
        report: describes the last step; empty before it.
    """

    def __init__(self, limit: int, world: int) -> None:
        self.limit, self.world, self.taken, self.report = limit, world, 0, ""
        self._sent: dict[str, list[int]] = {}  # verb -> calls, bytes

    def record(self, event: Event) -> None:
        """Count the bytes of an event of the engine."""
        ranks = len(event.ranks)
        if event.verb in ("gather", "reduce", "all_reduce") and ranks > 1:
            count = self._sent.setdefault(event.verb, [0, 0])
            count[0] += 1
            count[1] += event.nbytes * (ranks - 1) // ranks * (2 if event.verb == "all_reduce" else 1)

    def end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step of any optimizer."""
        self.taken += 1
        if self.taken == self.limit:
            self.report = self._describe(optimizer)
            raise Enough
        self._sent.clear()

    def _describe(self, optimizer: torch.optim.Optimizer) -> str:
        lines: list[str] = []
        ranks: set[int] = set()  # of all meshes
        for root in all_roots():
            for model in root.top.modules:
                lines += [describe(model, plans=True), "", str(memory_use(model, optimizer)), ""]
            for bucket in [bucket for runner in root.units for bucket in runner.unit.buckets]:
                ranks.update(ranks_around(bucket.axes.mesh))
        if not lines:
            raise self._not_sharded(optimizer)
        if ranks and len(ranks) < self.world:
            lines.append(f"No model is sharded over more than {len(ranks)} of the {self.world} ranks.\n")
        names = {"gather": "all-gathers", "reduce": "reduce-scatters", "all_reduce": "all-reduces of replicas"}
        lines += [
            f"{names[verb]} in a step: {count}, in which this rank sends {size(nbytes)}"
            for verb, (count, nbytes) in self._sent.items()
        ]
        return "\n".join(lines)

    @staticmethod
    def _not_sharded(optimizer: torch.optim.Optimizer) -> NotSharded:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = any(isinstance(parameter, DTensor) for parameter in parameters)
        return NotSharded(
            "No model was sharded by Fullshard before the optimizer's step.",
            got="DTensors of another library" if others else "an optimizer of parameters that are whole on each rank",
            remedy="import fully_shard or FullyShardedDataParallel from fullshard, not from torch.distributed.fsdp; or "
            "call fullshard.adopt() before the program does"
            if others
            else "shard the model with fullshard.fully_shard before the optimizer is built",
        )


def dry_run(program: Callable[[], object], world: int, steps: int) -> str:
    """Run a program until it has taken `steps` optimizer steps, or ends.

    Args:
        program: runs as rank 0 of a fake process group, which it initializes itself.
        world: number of ranks in that group.
        steps: at least 1.

    Returns:
        A report on the last step; empty if the program ended before it.

    Raises:
        NotSharded: no model was sharded before the step.
        Exception: any error that the program raises.
    """
    taken = Steps(steps, world)
    with pretended(world):
        hook = register_optimizer_step_post_hook(taken.end_step)
        stream.listeners.append(taken.record)
        try:
            program()
        except Enough:
            gc.collect()
        finally:
            stream.listeners.remove(taken.record)
            hook.remove()
    return taken.report
