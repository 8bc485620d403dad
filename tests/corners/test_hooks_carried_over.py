"""Hooks on parameters that are carried over: a unit rebuilt, a cast, another front-end, an error in between."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_parameter_hooks import (
    NET,
    SECONDS,
    WEIGHT,
    backward,
    batch,
    both_times,
    compare,
    hooked,
    parameter_of,
    reference,
)
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from ways import LAYOUTS, assert_equal, every_layout, every_parameter, every_way, sharded, whole_parameters


class Tied(nn.Module):
    """A weight used twice, in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@every_layout
@both_times
def test_hooks_of_a_unit_that_gave_a_tied_weight_to_another(run_ranks, way, when):
    assert all(run_ranks(tied, way, when, timeout=SECONDS))


def tied(way: str, when: str) -> bool:
    """`after`: between the two calls of `fully_shard`, of which the later one takes the shared weight away."""
    layout = LAYOUTS[way]
    torch.manual_seed(0)
    whole = Tied().double()
    torch.manual_seed(0)
    model = Tied().double()

    def register(m: nn.Module) -> None:
        for p, factor in ((m.first.weight, 2), (m.first.bias, 3), (m.second.bias, 5)):
            p.register_hook(lambda grad, factor=factor: factor * grad)

    if when == "before":
        register(model)
    fully_shard(model.first, layout=layout)
    fully_shard(model.second, layout=layout)
    if when == "after":
        register(model)
    fully_shard(model, layout=layout)
    register(whole)
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        model(batch(dist.get_rank())).square().mean().backward()
        loss = sum(whole(batch(rank)).square().mean() for rank in range(2)) / 2
        loss.backward()
        compare(model, whole, "tied")
    return True


@every_parameter
@both_times
def test_hooks_stay_when_the_model_is_cast(run_ranks, way, when):
    assert all(run_ranks(cast, way, when, timeout=SECONDS))


def cast(way: str, when: str) -> bool:
    model = hooked(way, when, lambda m: parameter_of(m, WEIGHT).register_hook(lambda grad: 2 * grad))
    backward(model)
    model.zero_grad()
    model.float()
    model.double()
    whole = reference().float().double()
    backward(model)
    backward(whole, ranks=(0, 1))
    whole.get_parameter(WEIGHT).grad *= 2
    compare(model, whole, "after float() and double()")
    return True


@every_layout
def test_a_hook_may_not_return_another_shape(run_ranks, way):
    assert all(run_ranks(other_shape, way, timeout=SECONDS))


def other_shape(way: str) -> bool:
    """On every rank, by name; and the model trains on once the hook is gone."""
    model, whole = sharded(NET, way), reference()
    handle = model.second.weight.register_hook(lambda grad: torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(fullshard.FullshardError, match=WEIGHT.replace(".", r"\.")):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    backward(whole, ranks=(0, 1))
    compare(model, whole, "after the error")
    return True


# The wrapper with one FlatParameter per instance.


def flat_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("_flat_param")]


def test_hooks_on_flat_parameters(run_ranks):
    assert all(run_ranks(on_flat, timeout=SECONDS))


def on_flat() -> bool:
    """After wrapping: `register_hook` gets the reduced gradient [its part], and the other one comes after it."""
    model, whole = sharded(NET, "wrapper"), reference()
    order: list[tuple[str, tuple[int, ...]]] = []

    def double(grad: Tensor) -> Tensor:
        order.append(("hook", tuple(grad.shape)))
        return 2 * grad

    for flat in flat_parameters(model):
        flat.register_hook(double)
        flat.register_post_accumulate_grad_hook(lambda p: order.append(("after", tuple(p.grad.shape))))
    for _ in range(2):
        order.clear()
        model.zero_grad()
        backward(model)
        whole.zero_grad()
        backward(whole, ranks=(0, 1))
        for p in whole.parameters():
            p.grad *= 2
        compare(model, whole, "on flat parameters")
        shapes = [tuple(flat.shape) for flat in flat_parameters(model)]
        assert sorted(order) == sorted((name, shape) for shape in shapes for name in ("hook", "after"))
    return True


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_from_before_a_flat_parameter_are_honoured_or_refused(run_ranks, name):
    """The objects are gone after that: their hooks run on their parts, or wrapping says which cannot."""
    assert all(run_ranks(before_flat, name, timeout=SECONDS))


def before_flat(name: str) -> bool:
    model, whole, calls = reference(), reference(), []
    parameter = model.get_parameter(WEIGHT)
    if name == "register_hook":
        parameter.register_hook(lambda grad: calls.append(grad) or 2 * grad)
    else:
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p) or p.grad.mul_(2))
    try:
        wrapped = FullyShardedDataParallel(model)
    except fullshard.ConfigError as error:
        assert WEIGHT in str(error)
        return True
    backward(wrapped)
    backward(whole, ranks=(0, 1))
    whole.get_parameter(WEIGHT).grad *= 2
    compare(wrapped, whole, "a hook from before wrapping")
    return True


@every_way
def test_a_step_in_post_accumulate_hooks(run_ranks, way):
    """An optimizer in backward, on whatever `whole_parameters()` gives."""
    assert all(run_ranks(stepping, way, timeout=SECONDS))


def stepping(way: str) -> bool:
    model, whole = sharded(NET, way), reference()
    each = {p: torch.optim.AdamW([p], lr=1e-2, eps=1e-3) for p in model.parameters()}
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)

    def now(p: nn.Parameter) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(now)
    for number in range(3):
        backward(model, number)
        assert all(p.grad is None for p in each)
        backward(whole, number, ranks=(0, 1))
        theirs.step()
        theirs.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters")
    return True
