"""What one rank of a training program does if its process group is fake: its units, its memory, the bytes it sends."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import ConfigError
from ..events import Event, stream
from ..optim.outer_steps import OuterSteps
from ..optimizers import parameters_of
from ..runtime import all_roots
from ..text import size
from ..torch_private.fake_group import pretended, unwritten
from ..torch_private.root_mesh import ranks_around
from .describe import describe
from .memory import memory_use
from .planner.profile import sent_around

UNSEEN = """One process cannot show results of collectives (they are undefined: a loss of nan means nothing), hangs,
differences between ranks, or the time that communication takes. Tensor-parallel collectives and the exchanges of an
optimizer with owners are not counted above (fullshard plan counts them). fullshard.save, torch.save and
torch.distributed.checkpoint write no files in a dry run; the program's other files are written."""


class Enough(BaseException):
    """Ends a program that has taken all its steps."""


class NotSharded(ConfigError):
    """The program took a step of an optimizer, but sharded no model by Fullshard."""


class Steps:
    """Counts the training steps of a program, and the bytes that it sends in each.

    Several optimizers may take a step, one after the other: it ends when all parameters that train have been stepped,
    or by all optimizers that stepped before; or when one of them steps again.

    Args:
        limit: ends the program, by raising `Enough`, after this step.
        world: number of ranks.

    Attributes:
        taken: number of steps that have ended.
        report: describes the last step; empty before it.
    """

    def __init__(self, limit: int, world: int) -> None:
        self.limit, self.world, self.taken, self.report = limit, world, 0, ""
        self._sent: Counter[tuple[str, str]] = Counter()  # in this step: (verb, "calls" or "bytes") -> number
        self._since: Counter[tuple[str, str]] = Counter()  # since the last optimizer: of this step or of the next one
        self._outer = OuterSteps()
        self._stepped: list[torch.optim.Optimizer] = []  # in this step
        self._known: list[torch.optim.Optimizer] = []  # those that stepped in earlier steps

    def record(self, event: Event) -> None:
        """Count the bytes of an event of the engine."""
        ranks = len(event.ranks)
        if event.verb in ("gather", "reduce", "all_reduce") and ranks > 1:
            self._since[event.verb, "calls"] += 1
            rounds = 2 if event.verb == "all_reduce" else 1
            self._since[event.verb, "bytes"] += sent_around(event.nbytes, ranks, rounds)

    def begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer begins to step; if it already has in this training step, the next one begins."""
        if self._outer.begin() and optimizer in self._stepped:
            self.end()

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        if not self._outer.end():
            return
        self._sent.update(self._since)
        self._since.clear()
        self._stepped.append(optimizer)
        if (self._known and all(each in self._stepped for each in self._known)) or self._all_are_stepped():
            self.end()

    def _all_are_stepped(self) -> bool:
        stepped = set(map(id, parameters_of(self._stepped)))
        models = [model for root in all_roots() for model in root.top.modules]
        return all(id(p) in stepped for model in models for p in model.parameters() if p.requires_grad)

    def end(self) -> None:
        """End a training step, if any optimizer has stepped in it.

        Raises:
            Enough: it was the last one.
        """
        if self.report:  # the program has caught all that it could
            raise Enough
        if self._stepped:
            self.taken += 1
            self._known += [each for each in self._stepped if each not in self._known]
            if self.taken == self.limit:
                self.report = self._describe()
                raise Enough
            self._stepped = []
            self._sent.clear()

    def _describe(self) -> str:
        lines: list[str] = []
        ranks: set[int] = set()  # the ranks of all meshes
        for root in all_roots():
            for model in root.top.modules:
                lines += [describe(model, plans=True), "", str(memory_use(model, self._known)), ""]
            for bucket in [bucket for runner in root.units for bucket in runner.unit.buckets]:
                ranks.update(ranks_around(bucket.axes.mesh))
        if not lines:
            raise self._not_sharded(self._known[0])
        if ranks and len(ranks) < self.world:
            lines.append(f"No model is sharded over more than {len(ranks)} of the {self.world} ranks.\n")
        names = {"gather": "all-gathers", "reduce": "reduce-scatters", "all_reduce": "all-reduces of replicas"}
        lines += [
            f"{name} in a step: {self._sent[verb, 'calls']}, in which this rank sends {size(self._sent[verb, 'bytes'])}"
            for verb, name in names.items()
            if self._sent[verb, "calls"]
        ]
        return "\n".join(lines)

    @staticmethod
    def _not_sharded(optimizer: torch.optim.Optimizer) -> NotSharded:
        others = any(isinstance(parameter, DTensor) for parameter in parameters_of([optimizer]))
        return NotSharded(
            "No model was sharded by Fullshard before the optimizer's step.",
            got="DTensors of another library" if others else "an optimizer of parameters that are whole on each rank",
            remedy="dry-run it with --adopt; or import fully_shard or FullyShardedDataParallel from fullshard, not "
            "from torch.distributed.fsdp"
            if others
            else "shard the model with fullshard.fully_shard before the optimizer is built",
        )


def dry_run(program: Callable[[], object], world: int, steps: int) -> tuple[str, int]:
    """Run a program until it has taken `steps` training steps, or ends.

    Args:
        program: runs as rank 0 of a fake process group, which it initializes itself.
        world: number of ranks in that group.
        steps: at least 1.

    Returns:
        A report on the last step, empty if the program ended before it; and the steps that it took.

    Raises:
        NotSharded: no model was sharded before the step.
        BaseException: any error that the program raises, with a note if checkpoints were not written before it.
    """
    taken = Steps(steps, world)
    with pretended(world), _nothing_saved():
        hooks = register_optimizer_step_pre_hook(taken.begin), register_optimizer_step_post_hook(taken.stepped)
        stream.listeners.append(taken.record)
        try:
            try:
                program()
            except SystemExit as stop:
                if stop.code:
                    raise
            taken.end()
        except Enough:
            gc.collect()
        except BaseException as error:  # torch.distributed.checkpoint raises one that is not an `Exception`
            if unwritten:
                error.add_note(f"In a dry run no checkpoint is written: {', '.join(unwritten[:3])} cannot be read.")
            raise
        finally:
            stream.listeners.remove(taken.record)
            for hook in hooks:
                hook.remove()
    return taken.report, taken.taken


@contextlib.contextmanager
def _nothing_saved() -> Iterator[None]:
    """`torch.save` to a path, and saves of `torch.distributed.checkpoint`, only note the path."""
    write = torch.save

    def save_file(thing: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            unwritten.append(os.fspath(f))
        else:
            write(thing, f, *args, **kwargs)

    def save(state: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any) -> Metadata:
        unwritten.append(str(checkpoint_id or getattr(storage_writer, "path", storage_writer)))
        return Metadata({})

    def save_later(state: Any, **kwargs: Any) -> Future[Metadata]:
        done: Future[Metadata] = Future()
        done.set_result(save(state, **kwargs))
        return done

    places: Any = (
        (torch, "save", save_file),
        *[
            (module, name, function)
            for module in (dcp, state_dict_saver)
            for name, function in (("save", save), ("async_save", save_later))
        ],
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, function in places:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
