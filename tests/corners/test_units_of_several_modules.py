"""Units of several modules, whose weights are used by other code than their own forwards; and whole values under grad.

`fully_shard([norm, head])` makes one unit. From the first forward of one of them until the last of them ran, or the
root's forward ended, all of them show whole parameters: a fused loss takes `head.weight` and never calls `head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from every_kind import KINDS, assert_equal, every_layout, gradients, parameters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from models import Example
from training import shard

SECONDS = 40  # a hang is this, not a minute
TRAINING = {"lr": 0.05, "eps": 1e-3}


class Fused(nn.Module):
    """A body, a norm and a head. What the head computes is computed by `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5)
        self.extra = nn.Linear(4, 4)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return WAYS[self.way](self, hidden)


def normed(model: Fused, x: Tensor) -> Tensor:
    return model.project(model.norm(x))


WAYS: dict[str, Callable[[Fused, Tensor], Tensor]] = {
    "called": lambda m, x: m.head(m.norm(x)),
    "never called": normed,
    "and called after": lambda m, x: m.project(m.norm(x)) + m.head(x),
    "a unit between": lambda m, x: m.project(torch.tanh(m.extra(m.norm(x)))),
    "the norm twice": lambda m, x: m.project(m.norm(m.norm(x) + x)),
    "in pieces": lambda m, x: torch.cat([m.project(part) for part in m.norm(x).chunk(3)]),
    "in a checkpoint": lambda m, x: checkpoint(normed, m, x, use_reentrant=False),
    "in a reentrant checkpoint": lambda m, x: checkpoint(normed, m, x, use_reentrant=True),
    "the head first": lambda m, x: m.head(x) + F.layer_norm(x, (4,), m.norm.weight, m.norm.bias).sum(),
}


def fused(way: str, group: tuple[str, ...] = ("norm", "head")) -> Example:
    def units(model: nn.Module) -> list:
        return [model.body, model.extra, [model.get_submodule(name) for name in group]]

    return Example(lambda: Fused(way), units, kind="vectors")


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def make(example: Example, kind: str, **settings: object) -> nn.Module:
    return shard(fullshard, example.make(torch.float64), example, replace(KINDS[kind], **settings))


Loss = Callable[[nn.Module, Tensor], Tensor]


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    model: nn.Module, whole: nn.Module, loss: Loss, steps: int = 3, micro: int = 1, viewed: list | None = None
) -> None:
    """Both for some steps; gradients, what stays gathered, and parameters are compared."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours, theirs = (torch.optim.AdamW(each, **TRAINING) for each in (viewed or model.parameters(), whole.parameters()))
    for step in range(steps):
        for number in range(step * micro, (step + 1) * micro):
            loss(model, batch(rank, number)).backward()
            for other in range(world):
                (loss(whole, batch(other, number)) / world).backward()
            want = {n: p.grad for n, p in whole.named_parameters()}
            assert_equal(gradients(model), want, f"gradients of step {step}, batch {number}")
        use = fullshard.memory_use(model)
        assert (use.gathered, use.reducing) == (0, 0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-10)


@every_layout
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_of_the_unit_used_by_other_code(run_ranks, kind, way):
    assert all(run_ranks(used, kind, way, ("norm", "head"), timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("way", ["never called", "and called after"])
def test_a_unit_of_three_modules_at_both_ends(run_ranks, kind, way):
    """The body runs first, the head's weight is used last, and everything lies between."""
    assert all(run_ranks(used, kind, way, ("extra", "norm", "head"), timeout=SECONDS))


def used(kind: str, way: str, group: tuple[str, ...]) -> bool:
    example = fused(way, group)
    if len(group) > 2:
        example = replace(example, units=lambda model: [model.body, [model.get_submodule(name) for name in group]])
    for reshard in (None, True, False):
        train(make(example, kind, reshard=reshard), example.make(torch.float64), plain_loss)
    return True


@every_layout
def test_evaluation_uses_the_weight_too(run_ranks, kind):
    assert all(run_ranks(evaluating, kind, timeout=SECONDS))


def evaluating(kind: str) -> bool:
    """And what is gathered is freed, and sharded parameters are shown, once the root's forward has ended."""
    example = fused("never called")
    model, whole = make(example, kind), example.make(torch.float64)
    sharded = dict(model.named_parameters())
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(batch(0)), whole(batch(0)), rtol=1e-12, atol=1e-12)
        assert all(p is sharded[name] for name, p in model.named_parameters())
        if not grad:
            assert fullshard.memory_use(model).gathered == 0
    return True


@every_layout
def test_after_an_error_between_two_modules_of_a_unit(run_ranks, kind):
    assert all(run_ranks(broken, kind, timeout=SECONDS))


def broken(kind: str) -> bool:
    example = fused("never called")
    model, whole = make(example, kind), example.make(torch.float64)
    handle = model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("after the norm")))
    with pytest.raises(KeyError):
        model(batch(dist.get_rank()))
    handle.remove()
    train(model, whole, plain_loss)
    return True


# Whole values outside of a forward: `full_tensor()` under grad, which errors name as the remedy.


def with_full(model: nn.Module, name: str) -> Tensor:
    """A parameter's whole value, differentiable; of an unsharded model the parameter."""
    parameter = model.get_parameter(name)
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """The same on every rank: the mean of gradients is each rank's."""
    return model(x).square().mean() + 0.1 * with_full(model, "head.weight").square().sum()


def penalised_first(model: nn.Module, x: Tensor) -> Tensor:
    return 0.1 * with_full(model, "head.weight").square().sum() + model(x).square().mean()


def depending(model: nn.Module, x: Tensor) -> Tensor:
    """Other on each rank, by its batch: gradients must be averaged over ranks."""
    hidden = torch.tanh(x @ with_full(model, "body.weight").T)
    return F.linear(hidden, with_full(model, "head.weight")).square().mean()


def depending_twice(model: nn.Module, x: Tensor) -> Tensor:
    """Beside the model's own use of the same weights."""
    return depending(model, x) + depending(model, 2 * x) + model(x).square().mean()


def root_own(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + (x @ with_full(model, "extra.weight")).sin().mean()


LOSSES: dict[str, Loss] = {
    "the same on all ranks": penalised,
    "before the model": penalised_first,
    "alone": depending,
    "several times, and the model": depending_twice,
    "of a unit that runs not": root_own,
}


@every_layout
@pytest.mark.parametrize("loss", LOSSES)
def test_full_tensor_under_grad_reduces(run_ranks, kind, loss):
    assert all(run_ranks(full, kind, loss, timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("loss", ["alone", "several times, and the model"])
def test_full_tensor_under_grad_reduces_over_replicas_too(run_ranks, kind, loss):
    assert all(run_ranks(full, kind, loss, "hybrid", world=4, timeout=SECONDS))


def full(kind: str, loss: str, mesh: str = "default") -> bool:
    example = fused("called")
    for micro in (1, 2):
        model, whole = make(example, kind, mesh=mesh), example.make(torch.float64)
        train(model, whole, LOSSES[loss], micro=micro)
    return True


@every_layout
def test_full_tensor_of_a_weight_in_the_root_forward(run_ranks, kind):
    """What a module does that was told by our error to use `full_tensor()`: inside of the root's forward."""
    assert all(run_ranks(full_within, kind, timeout=SECONDS))


class Following(nn.Module):
    """The root uses a unit's weight before that unit is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(F.linear(x, with_full(self, "head.weight")))
        return self.head(torch.tanh(self.body(x))) + first


def full_within(kind: str) -> bool:
    example = Example(Following, lambda model: [model.body, model.head], kind="vectors")
    train(make(example, kind), example.make(torch.float64), plain_loss)
    return True


@every_layout
def test_full_tensor_with_gradients_that_are_kept(run_ranks, kind):
    assert all(run_ranks(full_kept, kind, timeout=SECONDS))


def full_kept(kind: str) -> bool:
    """A micro-batch without sync, then one with: one sum, reduced."""
    example = fused("called")
    model, whole = make(example, kind), example.make(torch.float64)
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        depending_twice(model, batch(dist.get_rank(), number)).backward()
        for other in range(2):
            (depending_twice(whole, batch(other, number)) / 2).backward()
    assert_equal(gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients")
    return True


@every_layout
@pytest.mark.parametrize("loss", ["before the model", "several times, and the model"])
def test_full_tensor_beside_an_optimizer_view(run_ranks, kind, loss):
    assert all(run_ranks(full_viewed, kind, loss, timeout=SECONDS))


def full_viewed(kind: str, loss: str) -> bool:
    """The gradients reach the parameters themselves while their view, which shares them, has none yet."""
    example = fused("called")
    model, whole = make(example, kind), example.make(torch.float64)
    train(model, whole, LOSSES[loss], micro=2, viewed=fullshard.optimizer_view(model))
    return True


class Partly(nn.Module):
    """Rank 1 uses one of the head's weights in its forward only; of the other it has a penalty, as all have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(4, 4), Pair(), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.head(torch.tanh(self.body(x)), other)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x @ self.weight + (x @ self.other if other else 0)


@every_layout
def test_full_tensor_of_a_weight_that_one_rank_uses_besides(run_ranks, kind):
    assert all(run_ranks(full_partly, kind, timeout=SECONDS))


def full_partly(kind: str) -> bool:
    """What comes from the penalty reaches the parameter after its unit's reduction has been delivered."""

    def loss(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        return with_full(model, "head.other").square().sum() + model(x, rank == 0).square().mean()

    example = Example(Partly, lambda model: [model.body, model.head], kind="vectors")
    model, whole = make(example, kind), example.make(torch.float64)
    for number in range(2):
        loss(model, batch(dist.get_rank(), number), dist.get_rank()).backward()
        for other in range(2):
            (loss(whole, batch(other, number), other) / 2).backward()
        assert_equal(gradients(model), {n: p.grad for n, p in whole.named_parameters()}, f"gradients {number}")
    return True


@every_layout
def test_full_tensor_without_grad_and_of_frozen_parameters_is_plain(run_ranks, kind):
    assert all(run_ranks(full_plain, kind, timeout=SECONDS))


def full_plain(kind: str) -> bool:
    example = fused("never called")
    model, whole = make(example, kind), example.make(torch.float64)
    weight = model.head.weight
    with torch.no_grad():
        assert not weight.full_tensor().requires_grad
    assert not weight.detach().full_tensor().requires_grad
    weight.requires_grad_(False)
    assert torch.equal(weight.full_tensor(), whole.head.weight)
    assert not weight.full_tensor().requires_grad
    return True


@every_layout
def test_a_penalty_on_sharded_parameters(run_ranks, kind):
    """Element-wise on the parts and summed over all: nobody reduces that again. Right, or refused by name."""
    assert all(run_ranks(penalty, kind, timeout=SECONDS))


def penalty(kind: str) -> bool:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = model.head.weight.square().sum()
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        return model(x).square().mean() + 0.1 * total

    example = fused("called")
    model, whole = make(example, kind), example.make(torch.float64)
    try:
        train(model, whole, loss)
    except fullshard.FullshardError as error:
        assert "head.weight" in str(error), error
    return True
