"""Hooks of parameters that only some ranks use: over added gradients, in low precision, offloaded, on flat parameters.

What is right is plain PyTorch in one process: a hook sees the gradient of one backward, whichever rank it came from,
and no hook runs for a parameter that the backward did not reach.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_parameter_hooks import NET, SECONDS, WEIGHT, backward, batch, compare, parameter_of, reference
from torch import Tensor, nn

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, optimizer_view
from ways import WAYS, assert_equal, every_layout, every_parameter, sharded, whole_gradients


def add_backward(whole: nn.Module, number: int, skip: tuple[int, ...], factor: float) -> None:
    """One backward of both ranks' batches, whose gradient of `WEIGHT` a hook multiplies."""
    fresh = reference()
    backward(fresh, number, ranks=(0, 1), skip=skip)
    for name, p in fresh.named_parameters():
        if p.grad is not None:
            mine = whole.get_parameter(name)
            grad = p.grad * factor if name == WEIGHT else p.grad
            mine.grad = grad if mine.grad is None else mine.grad + grad


@every_parameter
def test_a_gradient_of_another_rank_is_hooked_before_it_is_added(run_ranks, way):
    assert all(run_ranks(accumulated, way, timeout=SECONDS))


def accumulated(way: str) -> bool:
    """By turns all ranks, one, the other and none use the parameter, whose gradients are added up."""
    model, whole, calls = sharded(NET, way), reference(), []
    parameter = parameter_of(model, WEIGHT)
    parameter.register_hook(lambda grad: calls.append("hook") or 3 * grad)
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    for number, skip in enumerate([(0,), (1,), (), (0, 1), (0,), (0, 1)]):
        calls.clear()
        backward(model, number, skip=skip)
        add_backward(whole, number, skip, 3)
        compare(model, whole, f"backward {number}, left out by {skip}")
        assert calls == ([] if skip == (0, 1) else ["hook", "after"]), (number, calls)
    return True


@every_parameter
def test_a_post_accumulate_hook_takes_the_gradient_away(run_ranks, way):
    assert all(run_ranks(taken_away, way, timeout=SECONDS))


def taken_away(way: str) -> bool:
    """As an optimizer in backward does; on a rank that did not use the parameter it is called at the end."""
    model, total = sharded(NET, way), 0
    parameter = parameter_of(model, WEIGHT)

    def take(p: nn.Parameter) -> None:
        nonlocal total
        total = total + p.grad.detach().clone()
        p.grad = None

    parameter.register_hook(lambda grad: 3 * grad)
    parameter.register_post_accumulate_grad_hook(take)
    whole = reference()
    for number, skip in enumerate([(0,), (), (1,), (0, 1)]):
        backward(model, number, skip=skip)
        add_backward(whole, number, skip, 3)
        assert parameter.grad is None
    parameter.grad = total
    assert_equal(
        {WEIGHT: whole_gradients(model)[WEIGHT]}, {WEIGHT: whole.get_parameter(WEIGHT).grad}, "what the hook took away"
    )
    return True


def test_flat_parameters_that_one_rank_uses(run_ranks):
    assert all(run_ranks(flat_of_one, timeout=SECONDS))


def flat_of_one() -> bool:
    model, whole, calls = sharded(NET, "wrapper"), reference(), []
    for name, flat in model.named_parameters():
        if "second" in name:
            flat.register_hook(lambda grad: calls.append("hook") or 3 * grad)
            flat.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    for number, skip in enumerate([(0,), (1,), (), (0, 1), (0,)]):
        calls.clear()
        backward(model, number, skip=skip)
        fresh = reference()
        backward(fresh, number, ranks=(0, 1), skip=skip)
        for name, p in fresh.named_parameters():
            if p.grad is not None:
                mine, grad = whole.get_parameter(name), p.grad * (3 if name.startswith("second") else 1)
                mine.grad = grad if mine.grad is None else mine.grad + grad
        compare(model, whole, f"backward {number}, left out by {skip}")
        assert calls == ([] if skip == (0, 1) else ["hook", "after"]), (number, calls)
    return True


@every_layout
@pytest.mark.parametrize("how", ["bfloat16 reductions", "offloaded", "a view"])
def test_in_place_and_by_result(run_ranks, way, how):
    assert all(run_ranks(in_settings, way, how, timeout=SECONDS))


def in_settings(way: str, how: str) -> bool:
    """A hook that changes its gradient in place does so whatever the dtype that was reduced in, and where it lies."""
    given = dict(WAYS[way])
    if how == "bfloat16 reductions":
        given["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if how == "offloaded":
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model, plain = reference(), reference()
    for each in (model, plain):
        for child in (each.first, each.second, each):
            fully_shard(child, **given)
    views = optimizer_view(model) if how == "a view" else []
    calls: list[str] = []
    for view in views:
        view.register_post_accumulate_grad_hook(lambda p: calls.append("view"))
    model.second.weight.register_hook(_in_place)
    model.second.bias.register_hook(lambda grad: -grad)
    for number, skip in enumerate([(0,), (), (1,)]):
        for each in (model, plain):
            each.zero_grad()
            each(batch(dist.get_rank(), number), dist.get_rank() in skip).square().mean().backward()
        want = dict(whole_gradients(plain))
        want[WEIGHT], want["second.bias"] = 3 * want[WEIGHT], -want["second.bias"]
        got = whole_gradients(model)
        assert_equal(got, want, f"step {number}", 1e-2 if how == "bfloat16 reductions" else 1e-12)
    assert len(calls) == 3 * len(views)
    return True


def _in_place(grad: Tensor) -> None:
    grad.mul_(3)
