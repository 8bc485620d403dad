"""Random models, units and uses against one process: what nobody thought of writing a test for.

A seed makes a tree of modules (nested, called twice, skipped in some steps, checkpointed in either way, with parameters
that nothing uses, tied or frozen), chooses units in it, and what happens between steps: accumulation, clipping, errors
in the middle of a forward or backward, evaluation, unshard, loading what was saved, a copy. In fp64, so that equal
means equal but for rounding. A failure names its seed; `check(seed, front)` on two ranks repeats it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy

INPUTS = 4
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
FRONTS = ("rows", "flat", fullshard.Blocks("row"), "owner", "wrapper orig", "wrapper flat")


class Around(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class Recomputed(Around):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__(inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Sometimes(Around):
    """Runs what it holds while `number` is odd, on every rank alike."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.number % 2 else x * 2


class Pair(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module, cut: bool) -> None:
        super().__init__()
        self.left, self.right, self.cut = left, right, cut

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * 0.5 + torch.tanh(self.right(x.detach() if self.cut else x))


class WithOwn(Around):
    """With parameters beside the module: one of a single element, one of an odd shape, perhaps one that is not used."""

    def __init__(self, inner: nn.Module, width: int, odd: int, unused: bool) -> None:
        super().__init__(inner)
        self.scale = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(width, odd))
        if unused:
            self.unused = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + (x @ self.odd).sum(-1, keepdim=True) * 0.1


def tree(draw: random.Random, width: int, depth: int) -> nn.Module:
    """Modules within modules, [n, width] to [n, width]."""
    if depth == 0:
        kinds = [nn.Linear(width, width, bias=draw.random() < 0.7), nn.LayerNorm(width)]
        return draw.choice([*kinds, nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width))])
    inner = tree(draw, width, depth - 1)
    match draw.choice(["sequence", "sequence", "residual", "twice", "pair", "recomputed", "sometimes", "own"]):
        case "sequence":
            return nn.Sequential(inner, *(tree(draw, width, depth - 1) for _ in range(draw.randint(0, 2))))
        case "residual":
            return Residual(inner)
        case "twice":
            return Twice(inner)
        case "pair":
            return Pair(inner, tree(draw, width, depth - 1), cut=draw.random() < 0.3)
        case "recomputed":
            return Recomputed(inner, reentrant=draw.random() < 0.5)
        case "sometimes":
            return Sometimes(inner)
        case _:
            return WithOwn(inner, width, draw.choice([1, 3, 7]), unused=draw.random() < 0.3)


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([2, 3, 5, 8, 13])
        self.first, self.last = nn.Linear(INPUTS, width), nn.Linear(width, 1)
        self.body = tree(draw, width, draw.randint(1, 4))
        linears = [module for module in self.body.modules() if isinstance(module, nn.Linear)]
        same = [module for module in linears if module.weight.shape == (width, width)]
        if len(same) > 1 and draw.random() < 0.3:
            same[-1].weight = same[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(torch.tanh(self.first(x)))))


# What happens in a run.

POSSIBLE = (
    *("two losses", "no sync", "view", "clip", "errors", "evaluate", "unshard", "load", "copy", "keep"),
    *("toggle", "look first", "input", "penalty", "two backwards", "interleaved"),
)


@dataclass
class Plan:
    """The settings and events that a seed stands for."""

    draw: random.Random
    units: list[str]
    flat_parameters: bool
    micro_batches: int = field(init=False)
    chosen: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.micro_batches = self.draw.choice([1, 1, 2])
        self.chosen = {name for name in POSSIBLE if self.draw.random() < 0.3}

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Momentum and decay where a parameter without a gradient is passed over, as it is in one process."""
        if self.flat_parameters or "view" in self.chosen:
            return torch.optim.SGD(params, lr=0.05)
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss + model(x * 0.5).mean() if "two losses" in self.chosen else loss

    def backward(self, model: nn.Module, x: Tensor, share: float) -> Tensor:
        """Forward and backward as chosen; returns the loss, of which `share` was differentiated."""
        if "look first" in self.chosen:
            with torch.no_grad():
                model(x)
        x.requires_grad_("input" in self.chosen or "penalty" in self.chosen)
        loss = self.loss(model, x)
        if "penalty" in self.chosen and not any(getattr(module, "reentrant", False) for module in model.modules()):
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        if "two backwards" in self.chosen:
            (share * 0.25 * loss).backward(retain_graph=True)
            (share * 0.75 * loss).backward()
        elif "interleaved" in self.chosen:
            other = self.loss(model, x * 2)
            (share * loss).backward()
            (share * other).backward()
        else:
            (share * loss).backward()
        return loss.detach()

    def toggle(self, *models: nn.Module) -> None:
        """Freeze some of the body's parameters and train others, in all models alike."""
        if (
            "toggle" in self.chosen
            and "view" not in self.chosen
            and not isinstance(models[0], FullyShardedDataParallel)
        ):
            for parameters in zip(*(model.body.parameters() for model in models), strict=True):
                trains = self.draw.random() < 0.6
                for parameter in parameters:
                    parameter.requires_grad_(trains)


def shard(plan: Plan, model: nn.Module, front: Any) -> nn.Module:
    """`model` with its units made, innermost first."""
    draw = plan.draw
    if front not in ("wrapper orig", "wrapper flat"):
        options = {"layout": front, "prefetch": draw.choice([0, 1, 2])}
        for name in plan.units:
            kept = draw.choice([True, False, None])
            fullshard.fully_shard(model.get_submodule(name), reshard_after_forward=kept, **options)
        fullshard.fully_shard(model, **options)
        model.set_reshard_after_backward("keep" not in plan.chosen)
        return model
    options = {"use_orig_params": front == "wrapper orig", "sharding_strategy": draw.choice(STRATEGIES)}
    for name in plan.units:
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, leaf, FullyShardedDataParallel(holder.get_submodule(leaf), **options))
    return FullyShardedDataParallel(model, **options)


def batch(seed: int, step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(((seed * 31 + step) * 7 + number) * 13 + rank)
    return torch.randn(3, INPUTS, generator=generator, dtype=torch.float64)


def use_sometimes(model: nn.Module, number: int) -> None:
    for module in model.modules():
        if isinstance(module, Sometimes):
            module.number = number


@contextlib.contextmanager
def failing(module: nn.Module, in_backward: bool) -> Iterator[None]:
    """`module` raises KeyError in its forward, or when its output's gradient comes."""

    def fail(*_: object) -> None:
        raise KeyError("of the user")

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not in_backward:
            fail()
        if output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(hook)
    with contextlib.suppress(KeyError):
        yield
    handle.remove()


def between_steps(plan: Plan, model: nn.Module, seed: int, step: int) -> None:
    """What must leave no trace in the training."""
    if "errors" in plan.chosen and step == 0:
        victim = plan.draw.choice([module for module in model.modules() if isinstance(module, nn.Linear)])
        for in_backward in (False, True):
            with failing(victim, in_backward):
                plan.loss(model, batch(seed, 7, 0, 0)).backward()
            model.zero_grad()
    if "unshard" in plan.chosen:
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, writeback=step == 0):
                [p.sum() for p in model.parameters()]
        else:
            units = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
            plan.draw.choice(units).unshard()
    if "copy" in plan.chosen and step == 1 and not plan.flat_parameters:
        x = batch(seed, 3, 0, 0)
        assert copy.deepcopy(model)(x).equal(model(x))
    if "load" in plan.chosen and step == 1:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(saved)
    if "evaluate" in plan.chosen:
        with torch.no_grad():
            model.eval()(batch(seed, 5, 0, 0))
        model.train()


def clipped(plan: Plan, model: nn.Module) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(0.1)
    if "view" in plan.chosen:
        return fullshard.clip_grad_norm_(model.parameters(), 0.1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def check(seed: int, front: Any) -> None:
    """Three steps of the seed's model, sharded by `front`, against one process that sees every rank's batches."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(draw).double()
    if draw.random() < 0.3 and front != "wrapper flat":  # which wants all of an instance's parameters to train
        for p in model.body.parameters():
            p.requires_grad_(draw.random() < 0.6)
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    units = sorted((name for name in names if draw.random() < 0.45), key=lambda name: -name.count("."))
    plan = Plan(draw, units, front == "wrapper flat")
    reference = copy.deepcopy(model)
    model = shard(plan, model, front)
    optimizer = plan.optimizer(fullshard.optimizer_view(model) if "view" in plan.chosen else list(model.parameters()))
    optimizer_there = plan.optimizer(list(reference.parameters()))

    for step in range(3):
        losses = sharded_step(plan, model, seed, step)
        for rank in range(dist.get_world_size()):
            for number in range(plan.micro_batches):
                use_sometimes(reference, step + number)
                loss = plan.backward(reference, batch(seed, step, number, rank), 1 / dist.get_world_size())
                if rank == dist.get_rank():
                    torch.testing.assert_close(losses[number], loss, rtol=1e-9, atol=1e-12)
        if "clip" in plan.chosen:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            got = clipped(plan, model)  # float32 on a rank of the wrapper that holds no gradient
            rtol = 1e-8 if got.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(got.double(), norm, rtol=rtol, atol=1e-12)
        for each in (optimizer, optimizer_there):
            each.step()
            each.zero_grad()
        between_steps(plan, model, seed, step)
        plan.toggle(model, reference)

    got, want = model.state_dict(), reference.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        whole = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        torch.testing.assert_close(whole, value, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def sharded_step(plan: Plan, model: nn.Module, seed: int, step: int) -> list[Tensor]:
    """Forward and backward of this rank's micro-batches; their losses."""
    losses = []
    for number in range(plan.micro_batches):
        use_sometimes(model, step + number)
        syncs = number == plan.micro_batches - 1 or "no sync" not in plan.chosen
        context: Any = contextlib.nullcontext()
        if not isinstance(model, FullyShardedDataParallel):
            model.set_requires_gradient_sync(syncs)
        elif not syncs:
            context = model.no_sync()
        with context:
            losses.append(plan.backward(model, batch(seed, step, number, dist.get_rank()), 1.0))
    return losses


def check_all(seeds: range, front: Any) -> None:
    for seed in seeds:
        try:
            check(seed, front)
        except Exception as error:
            error.add_note(f"seed {seed}, {front}")
            raise


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize(
    "seeds", [range(2000, 2012), range(2012, 2024), range(2040, 2050)], ids=lambda seeds: f"{seeds.start}"
)
def test_as_one_process(run_ranks, seeds, front):
    run_ranks(check_all, seeds, front)
