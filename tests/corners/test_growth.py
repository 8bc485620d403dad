"""Nothing grows with steps: tensors alive, memory, process groups, threads and descriptors, whatever a step does.

One rank of a group that moves no data: what is held is held by this process.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import fully_shard
from models import blocks_of
from ways import LAYOUTS, WIDE, Block, alone, inner, named, shard, some_ways, without_sync

Step = Callable[[Any, Tensor], object]
Run = Callable[[nn.Module, Tensor], Tensor]


def selectively(block: nn.Module, x: Tensor) -> Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


RUNS: dict[str, Run] = {
    "without reentry": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "with reentry": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "selectively": selectively,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.run: Run = lambda block, x: block(x)

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        x = self.first(x[0] if isinstance(x, list) else x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


# What a step may be.


def ordinary(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


@contextlib.contextmanager
def running(model: Any, how: str) -> Iterator[None]:
    net = inner(model)
    plainly, net.run = net.run, RUNS[how]
    yield
    net.run = plainly


def recomputing(how: str) -> Step:
    def step(model: Any, x: Tensor) -> None:
        with running(model, how):
            ordinary(model, x)

    return step


def fail(*_: Any) -> None:
    raise KeyError("as planted")


@contextlib.contextmanager
def raising(model: Any, error: Exception) -> Iterator[None]:
    """The third block raises within its forward."""

    def give(*_: Any) -> None:
        raise error

    handle = inner(inner(model).blocks[2]).down.register_forward_pre_hook(give)
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        handle.remove()
        error.__traceback__ = None  # which holds the frames of the forward


def out_of_memory(model: Any, x: Tensor) -> None:
    """Caught, and tried again with a smaller batch."""
    with raising(model, torch.OutOfMemoryError("as planted")):
        model(x)
    ordinary(model, x[:2])


def raising_in_hooks(model: Any, x: Tensor) -> None:
    """Before a block's forward, after it, and in its backward."""
    in_backward = lambda module, args, output: output.register_hook(fail) and None  # noqa: E731
    for name, hook in (("forward_pre", fail), ("forward", fail), ("forward", in_backward)):
        handle = getattr(inner(model).blocks[2], f"register_{name}_hook")(hook)
        with pytest.raises(KeyError):
            model(x).sum().backward()
        handle.remove()
    model.zero_grad()


def raising_in_recomputation(model: Any, x: Tensor) -> None:
    for how in ("without reentry", "with reentry"):
        with running(model, how):
            loss = model(x.clone().requires_grad_()).sum()
            with raising(model, KeyError("as planted")):
                loss.backward()
    model.zero_grad()


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
    **{f"checkpoints {how}": recomputing(how) for how in RUNS},
    "hooks raise": raising_in_hooks,
    "out of memory": out_of_memory,
    "recomputation raises": raising_in_recomputation,
    "no backward": lambda model, x: model(x),
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
    x = torch.randn(5, WIDE)
    for way in ("rows", "wrapper", "originals"):
        model = shard(Net(), way, blocks_of)
        ordinary(model, x)
        for name, step in STEPS.items():
            counts = []
            for times in (3, 7):
                for _ in range(times):
                    step(model, x)
                counts.append(alive())
            if counts[1] > counts[0]:
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
    """Each of a step's activations is 96 KiB: those of a single kind of step, were they kept, are 30 MiB."""
    fake_world(2)
    x = torch.randn(4096, WIDE)
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


# A model that is deleted is freed at once: modules are let go when the last reference to the root goes.


class Careful(nn.Linear):
    """Overrides `__setattr__`."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDE, WIDE),
    "LSTM": lambda: nn.LSTM(WIDE, WIDE),
    "GRU": lambda: nn.GRU(WIDE, WIDE, num_layers=2, bidirectional=True),
    "__setattr__": Careful,
    "LSTM below": lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.LSTM(WIDE, WIDE)),
    "__setattr__ below": lambda: nn.Sequential(nn.Linear(WIDE, WIDE), Careful()),
}


def test_classes_of_deleted_models_are_let_go(fake_world):
    """Programs make classes while they run (parametrizations, adapters): none stays because it was sharded."""
    fake_world(2)
    made = type("Made", (nn.Linear,), {})
    model = nn.Sequential(*(fully_shard(made(WIDE, WIDE)) for _ in range(2)))
    assert type(model[0]) is type(model[1])
    fully_shard(model)(torch.ones(1, WIDE)).sum().backward()
    kind = weakref.ref(made)
    del made, model
    gc.collect()  # the class that a unit of it had
    gc.collect()  # its own
    assert kind() is None


def watched(way: str, kind: str, how: str) -> dict[str, weakref.ref]:
    """What a model consists of, after the last other reference to it is gone."""
    below = kind.endswith("below") and way in LAYOUTS
    model: Any = shard(MODELS[kind](), way, named("1") if below else alone)
    if how != "never run":
        outputs = model(torch.ones(2, 3, WIDE))
        outputs: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        if how == "trained":
            outputs.sum().backward()
    if how == "copied":
        model = copy.deepcopy(model)
        model(torch.ones(2, 3, WIDE))
    return {name: weakref.ref(each) for name, each in [*model.named_modules(), *model.named_parameters()]}


@some_ways
@pytest.mark.parametrize("how", ["never run", "evaluated", "trained", "copied"])
def test_a_deleted_model_is_freed(fake_world, way, how):
    fake_world(2)
    refs = {kind: watched(way, kind, how) for kind in MODELS}
    gc.collect()
    alive = [(kind, name) for kind, of_model in refs.items() for name, ref in of_model.items() if ref() is not None]
    assert not alive
