"""Nothing grows with steps: tensors alive, memory, process groups, threads and descriptors, whatever a step does.

One rank of a group that moves no data: what is held is held by this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models import blocks_of
from ways import SOME_WAYS, inner, shard, without_sync

WIDTH, SAMPLES = 8, 5
Step = Callable[[Any, Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.raises: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.raises is not None:
            raise self.raises
        return x + self.down(hidden)


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def without_reentry(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def with_reentry(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def selectively(block: nn.Module, x: Tensor) -> Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.run_block: Callable[[nn.Module, Tensor], Tensor] = plainly

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        x = self.first(x[0] if isinstance(x, list) else x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return x


# What a step may be.


def ordinary(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


def recomputing(run: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    def step(model: Any, x: Tensor) -> None:
        inner(model).run_block = run
        ordinary(model, x)
        inner(model).run_block = plainly

    return step


@contextlib.contextmanager
def raising(model: Any, error: Exception) -> Iterator[None]:
    """The third block raises within its forward."""
    block = inner(inner(model).blocks[2])
    block.raises = error
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        block.raises = None
        error.__traceback__ = None  # which holds the frames of the forward


def raising_in_forward(model: Any, x: Tensor) -> None:
    with raising(model, KeyError("as planted")):
        model(x)


def out_of_memory(model: Any, x: Tensor) -> None:
    """Caught, and tried again with a smaller batch."""
    with raising(model, torch.OutOfMemoryError("as planted")):
        model(x)
    ordinary(model, x[:2])


def raising_in_a_hook(model: Any, x: Tensor) -> None:
    def hook(*args: Any) -> None:
        raise KeyError("as planted")

    for register in ("register_forward_pre_hook", "register_forward_hook"):
        handle = getattr(inner(model).blocks[2], register)(hook)
        with pytest.raises(KeyError):
            model(x)
        handle.remove()


def raising_in_recomputation(model: Any, x: Tensor) -> None:
    for run in (without_reentry, with_reentry):
        inner(model).run_block = run
        loss = model(x.clone().requires_grad_()).sum()
        with raising(model, KeyError("as planted")):
            loss.backward()
        inner(model).run_block = plainly
    model.zero_grad()


def raising_in_backward(model: Any, x: Tensor) -> None:
    def hook(gradient: Tensor) -> None:
        raise KeyError("as planted")

    handle = (
        inner(model).blocks[2].register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)
    )
    with pytest.raises(KeyError):
        model(x).sum().backward()
    handle.remove()
    model.zero_grad()


def without_backward(model: Any, x: Tensor) -> None:
    model(x)


def accumulating(model: Any, x: Tensor) -> None:
    with without_sync(model):
        model(x).sum().backward()
    ordinary(model, x)


def evaluating(model: Any, x: Tensor) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(x)


def differentiating_twice(model: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    model.zero_grad()


def with_long_lived_inputs(model: Any, x: Tensor) -> None:
    """A tensor with a graph, in a list, that outlives every forward that it is passed to."""
    if not hasattr(inner(model), "long_lived"):
        inner(model).long_lived = [x.clone().requires_grad_() * 2]
    hidden = inner(model).long_lived
    for _ in range(2):
        model(hidden)
    assert len(hidden[0]._backward_hooks or ()) < 3, "hooks of forwards that are gone"


STEPS: dict[str, Step] = {
    "ordinary": ordinary,
    "checkpoints without reentry": recomputing(without_reentry),
    "checkpoints with reentry": recomputing(with_reentry),
    "selective checkpoints": recomputing(selectively),
    "forward raises": raising_in_forward,
    "hook raises": raising_in_a_hook,
    "out of memory": out_of_memory,
    "recomputation raises": raising_in_recomputation,
    "backward raises": raising_in_backward,
    "no backward": without_backward,
    "accumulation": accumulating,
    "evaluation": evaluating,
    "second derivatives": differentiating_twice,
    "long-lived inputs": with_long_lived_inputs,
}


def alive() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


@pytest.fixture
def collected() -> Iterator[None]:
    """Collecting garbage costs little: what was there before the test is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_as_many_tensors_live_after_any_number_of_steps(fake_world, collected):
    """Each kind of step ten times, in every way to shard; what the first three make may stay."""
    fake_world(2)
    grown = {}
    x = torch.randn(SAMPLES, WIDTH)
    for way in SOME_WAYS:
        model = shard(Net(), way, blocks_of)
        ordinary(model, x)
        for name, step in STEPS.items():
            counts = []
            for _ in range(10):
                step(model, x)
                counts.append(alive())
            if counts[-1] > counts[2]:
                grown[way, name] = counts
    assert not grown, grown


def held_by_the_process() -> dict[str, int]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "tensors": alive(),
        "objects": len(gc.get_objects()),
        "KiB": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what the process holds from /proc")
def test_a_process_holds_the_same_after_two_hundred_steps(fake_world, collected):
    """Each of a step's activations is 128 KiB: those of a single kind of step, were they kept, are 40 MiB."""
    fake_world(2)
    x = torch.randn(4096, WIDTH)
    model = shard(Net(), "rows", blocks_of)
    kinds = [*STEPS.values()]
    for step in range(6 * len(kinds)):  # 64 passes without a backward are remembered
        kinds[step % len(kinds)](model, x)
    before = held_by_the_process()
    for step in range(200):
        kinds[step % len(kinds)](model, x)
    after = held_by_the_process()
    allowed = {"tensors": 0, "objects": 500, "KiB": 12 * 1024, "threads": 0, "descriptors": 0, "groups": 0}
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name] + allowed[name]}
    assert not grown, grown
