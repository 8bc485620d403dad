"""Units of several modules, whose weights are used by other code than their own forwards; and whole values under grad.

`fully_shard([norm, head])` makes one unit. From the first forward of one of them until the last of them ran, or the
root's forward ended, all of them show whole parameters: a fused loss takes `head.weight` and never calls `head`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from models import Example
from ways import assert_equal, batch, mean_square, on_ranks, sharded, whole_gradients, whole_parameters

two_ways = pytest.mark.parametrize("way", ["rows", "flat"])


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
        return USES[self.use](self, torch.tanh(self.body(x)))


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


def fused(use: str, *group: str) -> Example:
    def units(model: nn.Module) -> list:
        alone = [model.body] if "extra" in group else [model.body, model.extra]
        return [*alone, [model.get_submodule(name) for name in group or ("norm", "head")]]

    return Example(lambda: Fused(use), units, kind="vectors")


def both(example: Example, way: str, **settings: Any) -> tuple[Any, nn.Module]:
    return sharded(example, way, **settings), example.make(torch.float64)


def compare_gradients(model: nn.Module, whole: nn.Module, what: str) -> None:
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, what)


def backward(model: nn.Module, whole: nn.Module, loss: Callable, number: int) -> None:
    world = dist.get_world_size()
    loss(model, batch(number, dist.get_rank(), 4)).backward()
    for other in range(world):
        (loss(whole, batch(number, other, 4)) / world).backward()


def train(model: nn.Module, whole: nn.Module, loss: Callable = mean_square, micro: int = 1, viewed: Any = None) -> None:
    """Both for two steps; gradients, what stays gathered, and parameters are compared."""
    chosen = (viewed or model.parameters(), whole.parameters())
    optimizers = [torch.optim.AdamW(each, lr=0.05, eps=1e-3) for each in chosen]
    for step in range(2):
        for number in range(step * micro, (step + 1) * micro):
            backward(model, whole, loss, number)
            compare_gradients(model, whole, f"gradients of step {step}, batch {number}")
        use = fullshard.memory_use(model)
        assert (use.gathered, use.reducing) == (0, 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters", 1e-10)


@two_ways
@pytest.mark.parametrize("use", USES)
@on_ranks
def test_a_weight_of_the_unit_used_by_other_code(way: str, use: str) -> None:
    for reshard in (True, False):
        train(*both(fused(use), way, reshard_after_forward=reshard))
    if way == "rows" and use in ("never called", "and called after"):  # of three, at both ends of the model
        train(*both(fused(use, "extra", "norm", "head"), "rows"))


@on_ranks
def test_evaluation_uses_the_weight_too() -> None:
    """And what is gathered is freed, and sharded parameters are shown, once the root's forward has ended."""
    model, whole = both(fused("never called"), "rows")
    held = dict(model.named_parameters())
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(batch(0, 0, 4)), whole(batch(0, 0, 4)), rtol=1e-12, atol=1e-12)
        assert all(p is held[name] for name, p in model.named_parameters())
        assert grad or fullshard.memory_use(model).gathered == 0


# Whole values outside of a forward: `full_tensor()` under grad, which errors name as the remedy.


def with_full(model: nn.Module, name: str) -> Tensor:
    """A parameter's whole value, differentiable; of an unsharded model the parameter."""
    parameter = model.get_parameter(name)
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def penalised_first(model: nn.Module, x: Tensor) -> Tensor:
    """The same on every rank: the mean of gradients is each rank's."""
    return 0.1 * with_full(model, "head.weight").square().sum() + mean_square(model, x)


def depending(model: nn.Module, x: Tensor) -> Tensor:
    """Other on each rank, by its batch: gradients must be averaged over ranks."""
    hidden = torch.tanh(x @ with_full(model, "body.weight").T)
    return F.linear(hidden, with_full(model, "head.weight")).square().mean()


def depending_twice(model: nn.Module, x: Tensor) -> Tensor:
    """Beside the model's own use of the same weights."""
    return depending(model, x) + depending(model, 2 * x) + mean_square(model, x)


def root_own(model: nn.Module, x: Tensor) -> Tensor:
    """Of a unit that does not run."""
    return mean_square(model, x) + (x @ with_full(model, "extra.weight")).sin().mean()


@two_ways
@pytest.mark.parametrize("loss", [penalised_first, depending, depending_twice, root_own])
@on_ranks
def test_full_tensor_under_grad_reduces(way: str, loss: Callable) -> None:
    """Beside an optimizer's view, too, which shares the gradient and has none yet; and over what was kept."""
    for micro in (1, 2):
        train(*both(fused("called"), way), loss, micro)
    if loss is depending_twice:
        model, whole = both(fused("called"), way)
        train(model, whole, loss, 2, fullshard.optimizer_view(model))
    model, whole = both(fused("called"), way)
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        backward(model, whole, loss, number)
    compare_gradients(model, whole, "gradients")


@two_ways
@on_ranks(world=4)
def test_full_tensor_under_grad_reduces_over_replicas_too(way: str) -> None:
    train(*both(fused("called"), way, hybrid=True), depending_twice)


class Following(nn.Module):
    """The root uses a unit's weight before that unit is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(F.linear(x, with_full(self, "head.weight")))
        return self.head(torch.tanh(self.body(x))) + first


@two_ways
@on_ranks
def test_full_tensor_of_a_weight_in_the_root_forward(way: str) -> None:
    """What a module does that was told by our error to use `full_tensor()`."""
    train(*both(Example(Following, lambda model: [model.body, model.head], kind="vectors"), way))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return x @ self.weight + (x @ self.other if other else 0)


class Partly(nn.Module):
    """Rank 1 uses one of the head's weights in its forward only; of the other it has a penalty, as all have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(4, 4), Pair(), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.head(torch.tanh(self.body(x)), other)


@two_ways
@on_ranks
def test_full_tensor_of_a_weight_that_one_rank_uses_besides(way: str) -> None:
    """What comes from the penalty reaches the parameter after its unit's reduction has been delivered."""

    def loss(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        return with_full(model, "head.other").square().sum() + model(x, rank == 0).square().mean()

    model, whole = both(Example(Partly, lambda model: [model.body, model.head], kind="vectors"), way)
    for number in range(2):
        loss(model, batch(number, dist.get_rank(), 4), dist.get_rank()).backward()
        for other in range(2):
            (loss(whole, batch(number, other, 4), other) / 2).backward()
        compare_gradients(model, whole, f"gradients {number}")


@two_ways
@on_ranks
def test_full_tensor_without_grad_and_of_frozen_parameters_is_plain(way: str) -> None:
    model, whole = both(fused("never called"), way)
    weight = model.head.weight
    with torch.no_grad():
        assert not weight.full_tensor().requires_grad and not weight.detach().full_tensor().requires_grad
    weight.requires_grad_(False)
    assert torch.equal(weight.full_tensor(), whole.head.weight) and not weight.full_tensor().requires_grad


@two_ways
@on_ranks
def test_a_penalty_on_sharded_parameters(way: str) -> None:
    """Element-wise on the parts and summed over all: nobody reduces that again. Right, or refused by name."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = model.head.weight.square().sum()
        return mean_square(model, x) + 0.1 * (total.full_tensor() if hasattr(total, "full_tensor") else total)

    try:
        train(*both(fused("called"), way), loss)
    except fullshard.FullshardError as error:
        assert "head.weight" in str(error), error


def test_a_module_listed_twice_is_refused_whole(fake_world):
    fake_world(2)
    layer, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    with pytest.raises(fullshard.ConfigError, match="apply it once to each module"):
        fullshard.fully_shard([layer, norm, layer])
    assert [type(layer), type(norm), type(layer.weight)] == [nn.Linear, nn.LayerNorm, nn.Parameter]
    fullshard.fully_shard([layer, norm])
