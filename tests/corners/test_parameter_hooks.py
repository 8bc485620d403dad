"""Hooks that users put on parameters, before sharding or after it: they see the reduced gradient, and may replace it.

What is right is plain PyTorch in one process: `register_hook` sees the gradient of one backward before it is added to
`.grad` and may return another or change it in place; `register_post_accumulate_grad_hook` runs once `.grad` is so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import Example
from ways import assert_equal, batch, example_of, on_ranks, sharded, whole_gradients, without_sync


class Net(nn.Module):
    """Two units and a root with parameters of its own; the second unit can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.out(x if skip else hidden)


NET = example_of(Net, "first", "second")
WEIGHT = "second.weight"
Hook = Callable[[Tensor], Tensor | None]
per_parameter = pytest.mark.parametrize("way", ["rows", "flat", "originals"])
both_times = pytest.mark.parametrize("when", ["before", "after"])


def backward(model: nn.Module, number: int = 0, all_ranks: bool = False, skip: tuple[int, ...] = ()) -> None:
    """One backward: of this rank's batch, or of the mean over ranks; those in `skip` leave out a unit."""
    ranks = range(dist.get_world_size()) if all_ranks else [dist.get_rank()]
    for rank in ranks:
        (model(batch(number, rank, 4), rank in skip).square().mean() / len(ranks)).backward()


def hooked(way: str, when: str, register: Callable[[nn.Module], object]) -> tuple[nn.Module, nn.Module]:
    """The model sharded, its parameters hooked before or after that by `register(model)`; and an unsharded one."""

    def build() -> nn.Module:
        model = NET.build().double()  # at once, so that the objects with the hooks are the ones that are sharded
        if when == "before":
            register(model)
        return model

    model = sharded(Example(build, NET.units, kind="vectors"), way)
    if when == "after":
        register(model)
    return model, NET.make(torch.float64)


def compare(model: nn.Module, whole: nn.Module, what: str) -> None:
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, what)


def zero(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()


def weight_of(model: nn.Module) -> nn.Parameter:
    """The parameter of that name in the unwrapped model."""
    return next(p for n, p in model.named_parameters() if n.replace("_fsdp_wrapped_module.", "") == WEIGHT)


def in_place(grad: Tensor) -> None:
    grad.mul_(2)


HOOKS: dict[str, Hook] = {
    "another": lambda grad: 2 * grad,
    "in place": in_place,
    "clipped": lambda grad: grad.clamp(-0.01, 0.01),  # of the mean over ranks, not of each rank's own
}


@per_parameter
@both_times
@pytest.mark.parametrize("what", HOOKS)
@on_ranks
def test_a_hook_sees_the_reduced_gradient_and_may_replace_it(way: str, when: str, what: str) -> None:
    """Over two steps, the first of two reduced backwards: what a hook gives is added to what is there."""
    calls: list[str] = []

    def hook(grad: Tensor) -> Tensor | None:
        calls.append(type(grad).__name__)
        return HOOKS[what](grad)

    model, whole = hooked(way, when, lambda model: weight_of(model).register_hook(hook))
    calls.clear()
    for step in range(2):
        zero(model, whole)
        for number in range(2 - step):
            backward(model, number)
            fresh = NET.make(torch.float64)
            backward(fresh, number, all_ranks=True)
            grad = fresh.get_parameter(WEIGHT).grad
            given = HOOKS[what](grad)
            fresh.get_parameter(WEIGHT).grad = grad if given is None else given
            for mine, theirs in zip(whole.parameters(), fresh.parameters(), strict=True):
                mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
        compare(model, whole, f"step {step}")
    assert len(calls) == 3 or not weight_of(model).numel(), calls


@per_parameter
@both_times
@on_ranks
def test_a_hook_runs_once_for_what_was_kept_without_sync(way: str, when: str) -> None:
    shapes: list[tuple[int, ...]] = []

    def hook(grad: Tensor) -> Tensor:
        shapes.append(tuple(grad.shape))
        return 3 * grad

    model, whole = hooked(way, when, lambda model: weight_of(model).register_hook(hook))
    with without_sync(model):
        backward(model, 0)
    assert not shapes
    backward(model, 1)
    for number in range(2):
        backward(whole, number, all_ranks=True)
    whole.get_parameter(WEIGHT).grad *= 3
    compare(model, whole, "kept and reduced")
    assert shapes == [tuple(weight_of(model).shape)]  # of the gradient that users see


@per_parameter
@both_times
@on_ranks
def test_post_accumulate_hooks_see_the_complete_gradient(way: str, when: str) -> None:
    """Each hook gets the parameter that the optimizer has; together they see every gradient of every backward."""
    seen: list[tuple[int, Tensor]] = []

    def register(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), local(p.grad).detach().clone())))

    model, whole = hooked(way, when, register)
    for number in range(2):  # accumulated
        seen.clear()
        backward(model, number)
        backward(whole, number, all_ranks=True)
        compare(model, whole, f"backward {number}")
        for p in model.parameters():
            found = [grad for i, grad in seen if i == id(p)]
            assert not p.numel() or (len(found) == 1 and torch.equal(found[0], local(p.grad)))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@per_parameter
@on_ranks
def test_several_hooks_run_in_order_and_the_last_before_the_post_accumulate_ones(way: str) -> None:
    order: list[str] = []

    def noted(name: str, result: Hook) -> Hook:
        return lambda grad: (order.append(name), result(grad))[1]  # type: ignore[func-returns-value]

    def register(model: nn.Module) -> None:
        weight_of(model).register_hook(noted("plus", lambda grad: grad + 1))
        weight_of(model).register_hook(noted("times", lambda grad: grad * 2))
        weight_of(model).register_post_accumulate_grad_hook(lambda p: order.append("after"))

    model, whole = hooked(way, "after", register)
    backward(model)
    backward(whole, all_ranks=True)
    grad = whole.get_parameter(WEIGHT).grad
    grad.copy_((grad + 1) * 2)
    compare(model, whole, "two hooks")
    assert order == ["plus", "times", "after"] or not weight_of(model).numel()


@per_parameter
@both_times
@on_ranks
def test_a_removed_hook_is_gone(way: str, when: str) -> None:
    """Its handle works over sharding too, and so does one that is removed between two steps."""
    handles = []

    def register(model: nn.Module) -> None:
        handles.append(weight_of(model).register_hook(lambda grad: 2 * grad))
        handles.append(weight_of(model).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(5)))

    model, whole = hooked(way, when, register)
    for factor in (10, 1):
        zero(model, whole)
        backward(model)
        backward(whole, all_ranks=True)
        whole.get_parameter(WEIGHT).grad *= factor
        compare(model, whole, f"factor {factor}")
        for handle in handles:
            handle.remove()


@per_parameter
@both_times
@on_ranks
def test_hooks_run_where_any_rank_used_the_parameter(way: str, when: str) -> None:
    """A hook that talks to the other ranks must run on all of them, or on none."""
    calls: list[int] = []

    def hook(grad: Tensor) -> Tensor:
        calls.append(1)
        return 2 * grad

    model, whole = hooked(way, when, lambda model: weight_of(model).register_hook(hook))
    for skip in ((0,), (0, 1)):
        zero(model, whole)
        before = len(calls)
        backward(model, skip=skip)
        backward(whole, all_ranks=True, skip=skip)
        if len(skip) == 1:
            whole.get_parameter(WEIGHT).grad *= 2
        compare(model, whole, f"left out by {skip}")
    assert len(calls) == before
