"""Hooks of parameters where more happens: ranks that do not use them, low precision, a cast, a tie, flat parameters.

What is right is plain PyTorch in one process: a hook sees the gradient of one backward, whichever rank it came from,
and no hook runs for a parameter that the backward did not reach.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parameter_hooks import NET, WEIGHT, backward, both_times, compare, hooked, weight_of
from torch import Tensor, nn

import fullshard
from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, optimizer_view
from ways import WAYS, assert_equal, batch, children, shard, sharded, some_ways, whole_gradients, whole_parameters

reference = partial(NET.make, torch.float64)
rows_and_flat = pytest.mark.parametrize("way", ["rows", "flat"])


@some_ways
@pytest.mark.parametrize("takes", [False, True], ids=["kept", "taken away"])
def test_hooks_of_a_parameter_that_some_ranks_use(run_ranks, way, takes):
    """By turns all ranks, one, the other and none; gradients are added up, or an optimizer's hook takes them away."""
    run_ranks(of_some, way, takes)


def of_some(way: str, takes: bool) -> None:
    model, whole, calls = sharded(NET, way), reference(), []
    hooked_names = [WEIGHT, "second.bias"] if way == "wrapper" else [WEIGHT]  # which are one flat parameter
    parameter = next(p for n, p in model.named_parameters() if "second" in n and "bias" not in n)
    total: Any = 0

    def after(p: nn.Parameter) -> None:
        nonlocal total
        calls.append("after")
        if takes:
            total = total + p.grad.detach().clone()
            p.grad = None

    parameter.register_hook(lambda grad: calls.append("hook") or 3 * grad)
    parameter.register_post_accumulate_grad_hook(after)
    for number, skip in enumerate([(0,), (1,), (), (0, 1), (0,), (0, 1)]):
        calls.clear()
        backward(model, number, skip=skip)
        fresh = reference()
        backward(fresh, number, all_ranks=True, skip=skip)
        for own, p in fresh.named_parameters():
            if p.grad is not None:
                mine, grad = whole.get_parameter(own), p.grad * (3 if own in hooked_names else 1)
                mine.grad = grad if mine.grad is None else mine.grad + grad
        if not takes:
            compare(model, whole, f"backward {number}, left out by {skip}")
        assert calls == ([] if skip == (0, 1) else ["hook", "after"]), (number, calls)
    if takes:
        assert parameter.grad is None
        parameter.grad = total
        compare(model, whole, "what the hook took away")


@rows_and_flat
@pytest.mark.parametrize("how", ["bfloat16 reductions", "offloaded", "a view"])
def test_in_place_and_by_result(run_ranks, way, how):
    """A hook that changes its gradient in place does so whatever the dtype that was reduced in, and where it lies."""
    run_ranks(in_settings, way, how)


def in_settings(way: str, how: str) -> None:
    given: dict[str, Any] = {
        "bfloat16 reductions": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "a view": {},
    }[how]
    model, plain = (shard(reference(), way, children, **given) for _ in range(2))
    views, calls = optimizer_view(model) if how == "a view" else [], []
    for view in views:
        view.register_post_accumulate_grad_hook(lambda p: calls.append("view"))
    model.second.weight.register_hook(in_place)
    model.second.bias.register_hook(lambda grad: -grad)
    for number, skip in enumerate([(0,), (), (1,)]):
        for each in (model, plain):
            each.zero_grad()
            backward(each, number, skip=skip)
        want = dict(whole_gradients(plain))
        want[WEIGHT], want["second.bias"] = 3 * want[WEIGHT], -want["second.bias"]
        tolerance = 1e-2 if how == "bfloat16 reductions" else 1e-12
        assert_equal(whole_gradients(model), want, f"step {number}", tolerance)
    assert len(calls) == 3 * len(views)


def in_place(grad: Tensor) -> None:
    grad.mul_(3)


class Tied(nn.Module):
    """A weight used twice, in two units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@rows_and_flat
@both_times
def test_hooks_of_a_unit_that_gave_a_tied_weight_to_another(run_ranks, way, when):
    """`after`: between the two calls of `fully_shard`, of which the later one takes the shared weight away."""
    run_ranks(tied, way, when)


def tied(way: str, when: str) -> None:
    model, whole = Tied(), Tied()

    def register(m: nn.Module) -> None:
        for p, factor in ((m.first.weight, 2), (m.first.bias, 3), (m.second.bias, 5)):
            p.register_hook(lambda grad, factor=factor: factor * grad)

    if when == "before":
        register(model)
    for unit in (model.first, model.second):
        fully_shard(unit, **WAYS[way])
    if when == "after":
        register(model)
    fully_shard(model, **WAYS[way])
    register(whole)
    model(batch(0, dist.get_rank(), 4)).square().mean().backward()
    (sum(whole(batch(0, rank, 4)).square().mean() for rank in range(2)) / 2).backward()
    compare(model, whole, "tied")


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@both_times
def test_hooks_stay_when_the_model_is_cast(run_ranks, way, when):
    run_ranks(cast, way, when)


def cast(way: str, when: str) -> None:
    model, _ = hooked(way, when, lambda m: weight_of(m).register_hook(lambda grad: 2 * grad))
    backward(model)
    model.zero_grad()
    model.float()
    model.double()
    whole = reference().float().double()
    backward(model)
    backward(whole, all_ranks=True)
    whole.get_parameter(WEIGHT).grad *= 2
    compare(model, whole, "after float() and double()")


@rows_and_flat
def test_a_hook_may_not_return_another_shape(run_ranks, way):
    """On every rank, by name; and the model trains on once the hook is gone."""
    run_ranks(other_shape, way)


def other_shape(way: str) -> None:
    model, whole = sharded(NET, way), reference()
    handle = model.second.weight.register_hook(lambda grad: torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(fullshard.FullshardError, match=WEIGHT.replace(".", r"\.")):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    backward(whole, all_ranks=True)
    compare(model, whole, "after the error")


# The wrapper with one FlatParameter per instance.


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_from_before_a_flat_parameter_are_honoured(run_ranks, name):
    """The objects are gone after that: their hooks run on their parts."""
    run_ranks(before_flat, name)


def before_flat(name: str) -> None:
    model, whole = reference(), reference()
    hook = (lambda grad: 2 * grad) if name == "register_hook" else (lambda p: p.grad.mul_(2))
    getattr(model.get_parameter(WEIGHT), name)(hook)
    wrapped = FullyShardedDataParallel(model)
    backward(wrapped)
    backward(whole, all_ranks=True)
    whole.get_parameter(WEIGHT).grad *= 2
    compare(wrapped, whole, "a hook from before wrapping")


@some_ways
def test_a_step_in_post_accumulate_hooks(run_ranks, way):
    """An optimizer in backward, on whatever `parameters()` gives."""
    run_ranks(stepping, way)


def stepping(way: str) -> None:
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
        backward(whole, number, all_ranks=True)
        theirs.step()
        theirs.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters")
