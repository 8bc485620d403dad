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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from models import Example
from ways import assert_equal, every_layout, sharded, whole_gradients, whole_parameters

SECONDS = 40  # a hang is this, not a minute
TRAINING = {"lr": 0.05, "eps": 1e-3}


class Fused(nn.Module):
    """A body, a norm and a head. What the head computes is computed by `use`."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5)
        self.extra = nn.Linear(4, 4)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return USES[self.use](self, hidden)


def normed(model: Fused, x: Tensor) -> Tensor:
    return model.project(model.norm(x))


USES: dict[str, Callable[[Fused, Tensor], Tensor]] = {
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


def fused(use: str, group: tuple[str, ...] = ("norm", "head")) -> Example:
    def units(model: nn.Module) -> list:
        return [model.body, model.extra, [model.get_submodule(name) for name in group]]

    return Example(lambda: Fused(use), units, kind="vectors")


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


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
            assert_equal(whole_gradients(model), want, f"gradients of step {step}, batch {number}")
        use = fullshard.memory_use(model)
        assert (use.gathered, use.reducing) == (0, 0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-10)


@every_layout
@pytest.mark.parametrize("use", USES)
def test_a_weight_of_the_unit_used_by_other_code(run_ranks, way, use):
    assert all(run_ranks(used, way, use, ("norm", "head"), timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("use", ["never called", "and called after"])
def test_a_unit_of_three_modules_at_both_ends(run_ranks, way, use):
    """The body runs first, the head's weight is used last, and everything lies between."""
    assert all(run_ranks(used, way, use, ("extra", "norm", "head"), timeout=SECONDS))


def used(way: str, use: str, group: tuple[str, ...]) -> bool:
    example = fused(use, group)
    if len(group) > 2:
        example = replace(example, units=lambda model: [model.body, [model.get_submodule(name) for name in group]])
    for reshard in (None, True, False):
        train(sharded(example, way, reshard_after_forward=reshard), example.make(torch.float64), plain_loss)
    return True


@every_layout
def test_evaluation_uses_the_weight_too(run_ranks, way):
    assert all(run_ranks(evaluating, way, timeout=SECONDS))


def evaluating(way: str) -> bool:
    """And what is gathered is freed, and sharded parameters are shown, once the root's forward has ended."""
    example = fused("never called")
    model, whole = sharded(example, way), example.make(torch.float64)
    held = dict(model.named_parameters())
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(batch(0)), whole(batch(0)), rtol=1e-12, atol=1e-12)
        assert all(p is held[name] for name, p in model.named_parameters())
        if not grad:
            assert fullshard.memory_use(model).gathered == 0
    return True


@every_layout
def test_after_an_error_between_two_modules_of_a_unit(run_ranks, way):
    assert all(run_ranks(broken, way, timeout=SECONDS))


def broken(way: str) -> bool:
    example = fused("never called")
    model, whole = sharded(example, way), example.make(torch.float64)
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
def test_full_tensor_under_grad_reduces(run_ranks, way, loss):
    assert all(run_ranks(full, way, loss, timeout=SECONDS))


@every_layout
@pytest.mark.parametrize("loss", ["alone", "several times, and the model"])
def test_full_tensor_under_grad_reduces_over_replicas_too(run_ranks, way, loss):
    assert all(run_ranks(full, way, loss, True, world=4, timeout=SECONDS))


def full(way: str, loss: str, hybrid: bool = False) -> bool:
    example = fused("called")
    for micro in (1, 2):
        model, whole = sharded(example, way, hybrid=hybrid), example.make(torch.float64)
        train(model, whole, LOSSES[loss], micro=micro)
    return True


@every_layout
def test_full_tensor_of_a_weight_in_the_root_forward(run_ranks, way):
    """What a module does that was told by our error to use `full_tensor()`: inside of the root's forward."""
    assert all(run_ranks(full_within, way, timeout=SECONDS))


class Following(nn.Module):
    """The root uses a unit's weight before that unit is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(F.linear(x, with_full(self, "head.weight")))
        return self.head(torch.tanh(self.body(x))) + first


def full_within(way: str) -> bool:
    example = Example(Following, lambda model: [model.body, model.head], kind="vectors")
    train(sharded(example, way), example.make(torch.float64), plain_loss)
    return True


@every_layout
def test_full_tensor_with_gradients_that_are_kept(run_ranks, way):
    assert all(run_ranks(full_kept, way, timeout=SECONDS))


def full_kept(way: str) -> bool:
    """A micro-batch without sync, then one with: one sum, reduced."""
    example = fused("called")
    model, whole = sharded(example, way), example.make(torch.float64)
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        depending_twice(model, batch(dist.get_rank(), number)).backward()
        for other in range(2):
            (depending_twice(whole, batch(other, number)) / 2).backward()
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "gradients")
    return True


@every_layout
@pytest.mark.parametrize("loss", ["before the model", "several times, and the model"])
def test_full_tensor_beside_an_optimizer_view(run_ranks, way, loss):
    assert all(run_ranks(full_viewed, way, loss, timeout=SECONDS))


def full_viewed(way: str, loss: str) -> bool:
    """The gradients reach the parameters themselves while their view, which shares them, has none yet."""
    example = fused("called")
    model, whole = sharded(example, way), example.make(torch.float64)
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
def test_full_tensor_of_a_weight_that_one_rank_uses_besides(run_ranks, way):
    assert all(run_ranks(full_partly, way, timeout=SECONDS))


def full_partly(way: str) -> bool:
    """What comes from the penalty reaches the parameter after its unit's reduction has been delivered."""

    def loss(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        return with_full(model, "head.other").square().sum() + model(x, rank == 0).square().mean()

    example = Example(Partly, lambda model: [model.body, model.head], kind="vectors")
    model, whole = sharded(example, way), example.make(torch.float64)
    for number in range(2):
        loss(model, batch(dist.get_rank(), number), dist.get_rank()).backward()
        for other in range(2):
            (loss(whole, batch(other, number), other) / 2).backward()
        assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, f"gradients {number}")
    return True


@every_layout
def test_full_tensor_without_grad_and_of_frozen_parameters_is_plain(run_ranks, way):
    assert all(run_ranks(full_plain, way, timeout=SECONDS))


def full_plain(way: str) -> bool:
    example = fused("never called")
    model, whole = sharded(example, way), example.make(torch.float64)
    weight = model.head.weight
    with torch.no_grad():
        assert not weight.full_tensor().requires_grad
    assert not weight.detach().full_tensor().requires_grad
    weight.requires_grad_(False)
    assert torch.equal(weight.full_tensor(), whole.head.weight)
    assert not weight.full_tensor().requires_grad
    return True


@every_layout
def test_a_penalty_on_sharded_parameters(run_ranks, way):
    """Element-wise on the parts and summed over all: nobody reduces that again. Right, or refused by name."""
    assert all(run_ranks(penalty, way, timeout=SECONDS))


def penalty(way: str) -> bool:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = model.head.weight.square().sum()
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        return model(x).square().mean() + 0.1 * total

    example = fused("called")
    model, whole = sharded(example, way), example.make(torch.float64)
    try:
        train(model, whole, loss)
    except fullshard.FullshardError as error:
        assert "head.weight" in str(error), error
    return True


# A module that is listed twice.


def test_a_module_listed_twice_is_refused_whole(fake_world):
    """The error came as Python's own, about an MRO, and left the module a unit."""
    fake_world(2)
    layer, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    kinds = [type(layer), type(norm), type(layer.weight)]
    with pytest.raises(fullshard.ConfigError, match="apply it once to each module"):
        fullshard.fully_shard([layer, norm, layer])
    assert [type(layer), type(norm), type(layer.weight)] == kinds
    fullshard.fully_shard([layer, norm])
