"""`step_in_backward`: the numbers of steps after the backward, with the gradients of one unit at a time."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.events import stream
from fullshard.shard import units_of
from fullshard.torch_private.local_tensor import plain_tensors
from simulated import by_nccl, simulated

BLOCKS, WIDTH = 6, 8
CLIPS_SOME = {"Muon": 1e-4, None: 6.2}
"""By optimizer: a norm between those of the six steps. Muon's is that of matrices alone."""


class Net(nn.Module):
    """Blocks with dropout; `skip` leaves the third out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH + 1, WIDTH))
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # in the root's unit, with the norm

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if not (skip and index == 2):
                x = x + block(x)
        return self.norm(x) * self.scale


def sharded(layout: str = "rows", **options: Any) -> Any:
    model = Net()
    for block in model.blocks:
        fullshard.fully_shard(block, layout=layout, **options)
    return fullshard.fully_shard(model, layout=layout, **options)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_of(model: nn.Module, step: int | None, **options: Any) -> torch.Tensor:
    """Of random numbers; from a seed, or those that follow."""
    if step is not None:
        torch.manual_seed(10 * step + dist.get_rank())
    return 3 * model(torch.randn(4, WIDTH), **options).square().mean()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "counts in its groups": lambda params: pytorch_optimizer.AdEMAMix(params, lr=0.01),
    "Muon": lambda params: fullshard.Muon([p for p in params if p.ndim == 2], lr=0.01),
}


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: Any, max_norm: float | None, skips: bool, clip: str
) -> list[float]:
    """Six steps: two micro-batches without sync in one, a block left out on one rank or on all in others."""
    norms = []
    for step in range(6):
        skip = skips and (step == 2 or (step == 3 and dist.get_rank() == 0))

        def backward(step: int = step, skip: bool = skip) -> None:
            for micro in range(2 if step == 4 else 1):
                model.set_requires_gradient_sync(step != 4 or micro == 1)
                loss_of(model, None, skip=skip).backward()

        torch.manual_seed(10 * step + dist.get_rank())
        if steps is not None and max_norm is not None and clip == "two passes":
            with steps.measure():
                backward()
            norms.append(float(steps.norm))
        backward()
        if steps is None and max_norm is not None:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(float(fullshard.clip_grad_norm_(stepped, max_norm)))
        optimizer.step()
        if steps is not None and clip == "redo":
            norms.append(float(steps.norm))
        optimizer.zero_grad()
    return norms


def differences(
    name: str, layout: str, max_norm: float | None, skips: bool, clip: str = "two passes", threads: Any = None
) -> list[str]:
    """Parameters and state that differ in any bit from those of steps after the backward, and norms."""
    pair = []
    for inside in (True, False):
        model = sharded(layout, unused="zeros") if skips else sharded(layout)
        make = OPTIMIZERS.get(name) or (lambda params: Observed(params, lr=0.1, momentum=0.9))
        optimizer = make(list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        steps = fullshard.step_in_backward(optimizer, max_norm=max_norm, clip=clip, threads=threads) if inside else None
        norms = train(model, optimizer, steps, max_norm, skips, clip)
        scheduler.step()
        pair.append((model, optimizer, norms))
    (model, optimizer, norms), (plain, reference, expected) = pair
    wrong = [
        key
        for (key, p), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(whole(p), whole(theirs))
        or any(
            not torch.equal(whole(v).cpu(), whole(reference.state[theirs][k]).cpu())
            for k, v in optimizer.state.get(p, {}).items()
            if isinstance(v, torch.Tensor)
        )
    ]
    for ours, theirs in zip(optimizer.param_groups, reference.param_groups, strict=True):
        wrong += [key for key in ours if key != "params" and ours[key] != theirs[key]]
    if clip == "redo" and max_norm is not None and not (min(expected) < max_norm < max(expected)):
        wrong.append(f"norms {expected}: either all are clipped or none is")
    return wrong + ([f"norms {norms} {expected}"] if norms != pytest.approx(expected, rel=1e-6) else [])


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("processes")
def test_the_numbers_of_steps_after_the_backward(run_ranks, layout, max_norm):
    for name in OPTIMIZERS:
        assert run_ranks(differences, name, layout, max_norm, False, world=2) == [[], []], name


@pytest.mark.gloo("processes")
def test_blocks_that_some_ranks_leave_out(run_ranks):
    for max_norm in (None, 0.5):
        assert run_ranks(differences, "AdamW", "rows", max_norm, True, world=2) == [[], []]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("processes")
def test_steps_that_are_undone(run_ranks, layout, world):
    """Some of six steps are clipped: those are taken twice, and the numbers are those of clipping before the step."""
    for name in OPTIMIZERS:
        max_norm = CLIPS_SOME.get(name, CLIPS_SOME[None])
        problems = run_ranks(differences, name, layout, max_norm, False, "redo", world=world)
        assert problems == [[]] * world, name


@pytest.mark.gloo("processes")
def test_steps_that_are_undone_of_blocks_that_some_ranks_leave_out(run_ranks):
    assert run_ranks(differences, "AdamW", "rows", CLIPS_SOME[None], True, "redo", world=2) == [[], []]


def outside_of_units(clip: str) -> bool:
    """With a parameter in no unit, which `optimizer.step()` steps, and an optimizer whose hooks run twice."""
    results = []
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # whose step, which `Observed` calls, runs hooks from now on
    for inside in (True, False):
        model: Any = Net()
        for unit in (*model.blocks, model):
            fullshard.fully_shard(unit, ignored_params={model.scale})
        optimizer = Observed(model.parameters(), lr=0.1, momentum=0.9)
        steps = fullshard.step_in_backward(optimizer, max_norm=2.0, clip=clip) if inside else None
        train(model, optimizer, steps, 2.0, False, clip)
        results.append(values(model, optimizer))
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("clip", ["two passes", "redo"])
@pytest.mark.gloo("processes")
def test_parameters_outside_of_units_are_clipped_once(run_ranks, clip):
    assert run_ranks(outside_of_units, clip, world=1) == [True]


@pytest.mark.parametrize("way", ["unclipped", "two passes", "redo"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("processes")
def test_steps_beside_the_backward(run_ranks, layout, way):
    clip, max_norm = ("two passes", None) if way == "unclipped" else (way, CLIPS_SOME[None])
    for name in OPTIMIZERS:
        if name != "Muon":
            problems = run_ranks(differences, name, layout, max_norm, False, clip, 1, world=2)
            assert problems == [[], []], name


@pytest.mark.gloo("processes")
def test_steps_beside_the_backward_of_blocks_that_some_ranks_leave_out(run_ranks):
    assert run_ranks(differences, "AdamW", "rows", CLIPS_SOME[None], True, "redo", 2, world=2) == [[], []]


class Observed(torch.optim.SGD):
    """Notes where it steps; raises on parameters that are marked."""

    steps: ClassVar[list[tuple[str, int, set[int]]]] = []
    seconds: ClassVar[float] = 0.0

    def step(self, closure: Any = None) -> Any:
        self.steps.append((threading.current_thread().name, torch.get_num_threads(), os.sched_getaffinity(0)))
        if any("fails" in p.__dict__ for group in self.param_groups for p in group["params"] if p.grad is not None):
            raise ArithmeticError("a step that fails")
        time.sleep(self.seconds)
        return super().step(closure)


def beside() -> list[str]:
    """Threads, processors, hooks, and what waits."""
    problems = []
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # whose step, which `Observed` calls, runs hooks from now on
    processor = max(os.sched_getaffinity(0))
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    for threads, expected in ((2, (2, before[1])), ([processor], (1, {processor}))):
        model, hooks = sharded(), []
        optimizer = Observed(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_, hooks=hooks: hooks.append(1))
        fullshard.step_in_backward(optimizer, threads=threads)
        units = units_of(model)
        most = [0]

        def look(event: Any, units: Any = units, most: list[int] = most) -> None:
            if event.verb == "reduced":
                most[0] = max(most[0], sum(g.held_bytes > 0 for unit in units for g in unit.gradients))

        for step in range(3):
            Observed.steps.clear()
            Observed.seconds = 0.05  # slower than the backward
            stream.listeners.append(look)
            try:
                loss_of(model, step).backward()
            finally:
                stream.listeners.remove(look)
                Observed.seconds = 0.0
            problems += [
                f"a gradient after the backward: {n}" for n, p in model.named_parameters() if p.grad is not None
            ]
            steps = [*Observed.steps]
            if len(steps) != BLOCKS + 1 or any(not s[0].startswith("fullshard-steps") for s in steps):
                problems.append(f"steps {steps}")
            problems += [f"{s}, not {expected}" for s in steps if s[1:] != expected]
            optimizer.step()
            optimizer.zero_grad()
        if len(hooks) != 6:  # three steps; torch runs hooks once more for `super().step`
            problems.append(f"{len(hooks)} hooks")
        if not 0 < most[0] <= 4:  # two that wait, one that is delivered, one whose reduction is in flight
            problems.append(f"gradients of {most[0]} units at once")
        if (torch.get_num_threads(), os.sched_getaffinity(0)) != before:
            problems.append("the caller's threads have changed")
    return problems


@pytest.mark.gloo("processes")
def test_threads_of_steps_beside_the_backward(run_ranks):
    assert run_ranks(beside, world=2) == [[], []]


def raised_beside() -> list[str]:
    """A step that raises does so in the backward, by name; undone, training goes on as if nothing had happened."""
    problems = []
    model, plain = sharded(), sharded()
    optimizer, reference = (Observed(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    steps = fullshard.step_in_backward(optimizer, max_norm=1e-2, clip="redo", threads=1)
    for step, failing in ((0, 5), (1, 2), (2, 0)):
        before = values(model, optimizer)
        marked = next(model.blocks[failing].parameters())
        marked.__dict__["fails"] = True
        try:
            loss_of(model, 7).backward()
        except ArithmeticError as error:
            if f"'blocks.{failing}'" not in "".join(error.__notes__):
                problems.append(f"notes {error.__notes__}")
        else:
            problems.append("nothing was raised")
        del marked.__dict__["fails"]
        steps.undo()
        after = values(model, optimizer)
        if len(after) != len(before) or not all(map(torch.equal, after, before)):
            problems.append(f"step {step}: undo left differences")
        optimizer.zero_grad()
        for one, own in ((model, optimizer), (plain, reference)):
            loss_of(one, step).backward()
            if one is plain:
                fullshard.clip_grad_norm_(plain.parameters(), 1e-2)
            own.step()
            own.zero_grad()
        if not all(map(torch.equal, values(model, optimizer), values(plain, reference))):
            problems.append(f"step {step}: the step after it differs")
    return problems


@pytest.mark.gloo("processes")
def test_a_step_beside_the_backward_that_raises(run_ranks):
    assert run_ranks(raised_beside, world=2) == [[], []]


def values(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of this rank's parameters and state."""
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [part.clone() for tensor in (*model.parameters(), *state) for part in plain_tensors(tensor)]


def undone() -> list[str]:
    """A backward that raises, before state exists and after: `undo` restores everything, and training goes on."""
    problems = []
    model, plain = sharded(), sharded()
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    steps = fullshard.step_in_backward(optimizer, max_norm=1e-3, clip="redo")

    def fail(module: nn.Module, grads: Any) -> None:
        raise ArithmeticError("in mid-backward")

    for step in range(3):
        before = values(model, optimizer)
        handle = model.blocks[2].register_full_backward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(model, 7).backward()
        handle.remove()
        assert steps.host_bytes > 0
        changed = values(model, optimizer)
        if len(changed) == len(before) and all(map(torch.equal, changed, before)):
            problems.append(f"step {step}: no unit had stepped when the backward raised")
        with pytest.raises(fullshard.PhaseError, match="may still be undone"):
            loss_of(model, 7).backward()
        steps.undo()
        after = values(model, optimizer)
        if len(after) != len(before) or not all(map(torch.equal, after, before)):
            problems.append(f"step {step}: undo left differences")
        optimizer.zero_grad()
        for one, own in ((model, optimizer), (plain, reference)):
            loss_of(one, step).backward()
            if one is plain:
                fullshard.clip_grad_norm_(plain.parameters(), 1e-3)
            own.step()
            own.zero_grad()
        if not all(map(torch.equal, values(model, optimizer), values(plain, reference))):
            problems.append(f"step {step}: the step after it differs")
    memory = steps.host_bytes
    loss_of(model, 8).backward()
    optimizer.step()
    return problems + ([] if steps.host_bytes == memory else ["host memory grew"])


@pytest.mark.gloo("processes")
def test_a_backward_that_raises_is_undone(run_ranks):
    assert run_ranks(undone, world=2) == [[], []]


def not_finite() -> bool:
    """A gradient of NaN makes everything NaN, as clipping does."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = fullshard.step_in_backward(optimizer, max_norm=1.0, clip="redo")
    (loss_of(model, 0) * float("nan")).backward()
    optimizer.step()
    return bool(steps.norm.isnan()) and all(bool(part.isnan().all()) for part in values(model, optimizer))


@pytest.mark.gloo("processes")
def test_a_norm_that_is_not_a_number(run_ranks):
    assert run_ranks(not_finite, world=2) == [True, True]


def on_a_device() -> list[str]:
    """On a simulated device, where copies arrive when the host waits for them."""
    results = []
    for clip in (None, "redo"):
        with by_nccl(), simulated():
            model = sharded()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            steps = fullshard.step_in_backward(optimizer, max_norm=6.2, clip=clip) if clip else None
            for step in range(4):
                loss_of(model, step).backward()
                if steps is None:
                    fullshard.clip_grad_norm_(model.parameters(), 6.2)
                optimizer.step()
                optimizer.zero_grad()
            assert steps is None or steps._undos[0].memory.is_pinned()
        results.append(values(model, optimizer))
    return [str(index) for index, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]


@pytest.mark.gloo("processes")
def test_steps_that_are_undone_on_a_simulated_device(run_ranks):
    assert run_ranks(on_a_device, world=2) == [[], []]


def highest_in_backward(inside: bool) -> list[int]:
    """Bytes of reduced gradients whenever a unit's were delivered, in the second step."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if inside:
        fullshard.step_in_backward(optimizer)
    units = units_of(model)
    held: list[int] = []

    def look(event: Any) -> None:
        if event.verb == "reduced":
            held.append(sum(gradients.held_bytes for unit in units for gradients in unit.gradients))

    for step in range(2):
        held.clear()
        stream.listeners.append(look)
        try:
            loss_of(model, step).backward()
        finally:
            stream.listeners.remove(look)
        optimizer.step()
        optimizer.zero_grad()
    return held


@pytest.mark.gloo("processes")
def test_gradients_of_few_units_are_alive(run_ranks):
    inside, after = run_ranks(highest_in_backward, True, world=2)[0], run_ranks(highest_in_backward, False, world=2)[0]
    assert len(inside) == len(after) == BLOCKS + 1
    assert after[-1] > 6 * max(after[0], 1) / 2
    # a unit's slice, and that of the unit whose reduction is in flight
    assert max(inside) <= 0.4 * after[-1], (inside, after)


def resumed(folder: str, save: bool) -> list[str]:
    """Saved after three steps in backward, loaded by another optimizer, on as many ranks or others."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = fullshard.step_in_backward(optimizer)
    if save:
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
        fullshard.save(folder, model, optimizer)
    else:
        fullshard.load(folder, model, optimizer)
        assert all(int(state["step"]) == 3 for state in optimizer.state.values())
        steps.remove()
        loss_of(model, 9).backward()
        assert all(p.grad is not None for p in model.parameters())
        fullshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert all(int(state["step"]) == 4 for state in optimizer.state.values())
    return [name for name, p in model.named_parameters() if p.grad is not None and save]


@pytest.mark.gloo("processes")
def test_its_state_is_saved_and_loaded(run_ranks, tmp_path: Path):
    assert run_ranks(resumed, str(tmp_path / "saved"), True, world=2) == [[], []]
    assert run_ranks(resumed, str(tmp_path / "saved"), False, world=3) == [[]] * 3


def freed() -> bool:
    """Whether a model and its optimizer go when they are dropped."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fullshard.step_in_backward(optimizer, threads=1)
    loss_of(model, 0).backward()
    optimizer.step()
    alive = weakref.ref(optimizer), weakref.ref(model)
    (worker,) = [thread for thread in threading.enumerate() if thread.name.startswith("fullshard-steps")]
    del optimizer, model
    gc.collect()
    worker.join(10)
    return all(one() is None for one in alive) and not worker.is_alive()


@pytest.mark.gloo("processes")
def test_models_and_optimizers_are_freed(run_ranks):
    assert run_ranks(freed, world=2) == [True, True]


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = fullshard.ShardedGradScaler("cpu")
    scaler.scale(loss_of(model, 0).detach())
    scaler.step(optimizer)


class CountsInPlace(torch.optim.SGD):
    """SGD with a learning rate that falls with a count of each group, a tensor, which parts of a step share."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad * (group["lr"] / float(group["count"])))


class NeedsGradients(torch.optim.Optimizer):
    """Does not skip parameters without gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def refused() -> dict[str, str]:
    model, other = sharded(), sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fullshard.step_in_backward(optimizer, max_norm=1.0)
    redone = sharded()
    redoes = fullshard.step_in_backward(torch.optim.SGD(redone.parameters()), max_norm=1.0, clip="redo")
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    wrapped = fullshard.FullyShardedDataParallel(
        nn.Linear(2, 2), sharding_strategy=fullshard.ShardingStrategy.NO_SHARD, use_orig_params=True
    )
    fullshard.step_in_backward(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    prodigy = pytorch_optimizer.AvaGrad(other.parameters())
    tries: dict[str, Callable[[], Any]] = {
        "twice": lambda: fullshard.step_in_backward(optimizer),
        "clip": lambda: fullshard.clip_grad_norm_(model.parameters(), 1.0),
        "the wrapper's clip": lambda: wrapped.clip_grad_norm_(1.0),
        "unmeasured": lambda: loss_of(model, 0).backward(),
        "plain": lambda: fullshard.step_in_backward(plain),
        "together": lambda: fullshard.step_in_backward(prodigy),
        "counts": lambda: fullshard.step_in_backward(CountsInPlace(other.parameters(), lr=0.1)),
        "view": lambda: fullshard.step_in_backward(torch.optim.SGD(fullshard.optimizer_view(other))),
        "owners": lambda: fullshard.step_in_backward(
            fullshard.OwnerOptimizer(other.parameters(), torch.optim.Adafactor)
        ),
        "threads": lambda: fullshard.step_in_backward(torch.optim.SGD(other.parameters()), threads=0),
        "processors": lambda: fullshard.step_in_backward(torch.optim.SGD(other.parameters()), threads=[4096]),
        "matrices": lambda: fullshard.step_in_backward(
            fullshard.Muon([p for p in other.parameters() if p.ndim == 2]), threads=1
        ),
        "norm": lambda: fullshard.step_in_backward(torch.optim.SGD(other.parameters()), max_norm=-1.0),
        "a bool": lambda: fullshard.step_in_backward(torch.optim.SGD(other.parameters()), max_norm=True),
        "closure": lambda: fullshard.step_in_backward(torch.optim.LBFGS(other.parameters())),
        "model": lambda: fullshard.step_in_backward(other),
        "scaler": lambda: scaled(model, optimizer),
        "clip's value": lambda: fullshard.step_in_backward(
            torch.optim.SGD(other.parameters()), max_norm=1.0, clip="undo"
        ),
        "measured": lambda: redoes.measure().__enter__(),
        "no gradient": lambda: fullshard.step_in_backward(NeedsGradients(other.parameters(), lr=0.1)),
    }
    errors = {}
    for name, attempt in tries.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt()
        except fullshard.FullshardError as error:
            errors[name] = str(error)
    return errors


@pytest.mark.gloo("processes")
def test_what_it_refuses(run_ranks):
    for errors in run_ranks(refused, world=2):
        assert "counts steps in place" in errors["counts"]
        assert "already step in backward" in errors["twice"] and "remove()" in errors["twice"]
        assert "needs an optimizer" in errors["model"] and "computes gradients" in errors["closure"]
        assert "step_in_backward(max_norm=) is invalid" in errors["a bool"]
        for clip in ("clip", "the wrapper's clip"):
            assert "gradient is already gone" in errors[clip] and "max_norm" in errors[clip]
        assert "no backward has measured" in errors["unmeasured"] and "measure()" in errors["unmeasured"]
        assert "no sharded parameters" in errors["plain"]
        assert "depends on others" in errors["together"]
        assert "or fails if another has no gradient" in errors["no gradient"]
        assert "runs of elements" in errors["view"]
        assert "exchanges all parameters at once" in errors["owners"]
        assert "step_in_backward(max_norm=) is invalid" in errors["norm"]
        assert "A gradient scaler cannot be used" in errors["scaler"]
        assert all("step_in_backward(threads=) is invalid" in errors[name] for name in ("threads", "processors"))
        assert "threads is for element-wise optimizers" in errors["matrices"]
        assert "step_in_backward(clip=) is invalid" in errors["clip's value"]
        assert "'two passes' or 'redo'" in errors["clip's value"]
        assert "in two passes" in errors["measured"] and "clip='redo'" in errors["measured"]


def clipped_differently(freezes: bool) -> str:
    model = sharded()
    next(model.parameters()).requires_grad_(not freezes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = fullshard.step_in_backward(optimizer, max_norm=1.0 + dist.get_rank())
    try:
        for number in range(3):
            with steps.measure():
                loss_of(model, number).backward()
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    except fullshard.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("freezes", [False, True])
def test_ranks_that_clip_differently(run_ranks, freezes):
    for error in run_ranks(clipped_differently, freezes, world=2):
        assert "optimizers stepped differently" in error and "max_norm=1.0, clip='two passes'" in error, error
        assert "max_norm=2.0" in error


def test_frozen_parameters_and_groups_that_come_late(fake_world):
    """Frozen ones of the optimizer are left alone; a group that clipping does not know is refused, by name."""
    fake_world(1)
    model = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(fullshard.ConfigError, match="needs a max_norm"):
        fullshard.step_in_backward(optimizer, clip="redo")
    steps = fullshard.step_in_backward(optimizer, max_norm=0.5, clip="redo")
    before = model[0].weight.to_local().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight.to_local(), before)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fullshard.ConfigError, match="added to an optimizer that clips"):
        optimizer.step()
    steps.undo()


def used_too_early(folder: str) -> tuple[dict[str, str], bool]:
    """What is refused while steps may be undone, and whether nothing of it changed the step."""
    model, plain = sharded(), sharded()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    steps = fullshard.step_in_backward(optimizers[0], max_norm=1e-3, clip="redo")
    fullshard.save(folder, model, optimizers[0])
    for number in range(2):
        loss_of(model, number).backward()
        tries: dict[str, Callable[[], Any]] = {
            "save": lambda: fullshard.save(f"{folder}-2", model, optimizers[0]),
            "load": lambda: fullshard.load(folder, model, optimizers[0]),
            "state_dict": model.state_dict,
            "load_state_dict": lambda: model.load_state_dict({}, strict=False),
            "park": lambda: fullshard.park(model, optimizers[0]),
            "forward": lambda: loss_of(model, 1),
            "remove": steps.remove,
        }
        errors = {}
        for name, attempt in tries.items():
            try:
                attempt()
            except fullshard.PhaseError as error:
                errors[name] = str(error)
        optimizers[0].step()
        optimizers[0].zero_grad()
        loss_of(plain, number).backward()
        fullshard.clip_grad_norm_(plain.parameters(), 1e-3)
        optimizers[1].step()
        optimizers[1].zero_grad()
    same = all(
        torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    model.state_dict()
    steps.remove()
    return errors, same


@pytest.mark.gloo("processes")
def test_steps_that_may_be_undone_are_not_used(run_ranks, tmp_path):
    for errors, same in run_ranks(used_too_early, str(tmp_path / "saved"), world=2):
        assert errors.keys() == {"save", "load", "state_dict", "load_state_dict", "park", "forward", "remove"}
        assert all("may still be undone" in error and "optimizer.step() first" in error for error in errors.values())
        assert same


def test_a_pass_that_is_measured_and_never_taken(fake_world):
    fake_world(1)
    model = fullshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = fullshard.step_in_backward(optimizer, max_norm=0.5)
    with steps.measure():
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fullshard.PhaseError, match=r"after measure\(\) alone"):
        optimizer.step()
    with steps.measure():
        pass  # no gradient was measured: there is nothing to take
    optimizer.step()
    before = model.weight.to_local().clone()
    with steps.measure():
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.to_local(), before)


def test_a_second_backward_before_the_step(fake_world):
    fake_world(1)
    model = fullshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = fullshard.step_in_backward(optimizer, max_norm=0.5, clip="redo")
    first, second = (model(torch.ones(2, 4)).sum() for _ in range(2))
    first.backward()
    with pytest.raises(fullshard.PhaseError, match="second backward"):
        second.backward()
    steps.undo()
