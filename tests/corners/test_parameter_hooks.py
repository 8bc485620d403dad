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
from ways import assert_equal, every_parameter, example_of, sharded, whole_gradients, without_sync

SECONDS = 40  # a hang is this, not a minute


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


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def backward(model: nn.Module, number: int = 0, ranks: tuple[int, ...] = (), skip: tuple[int, ...] = ()) -> None:
    """One backward: of this rank's batch, or of the mean over `ranks`, of which those in `skip` leave out a unit."""
    for rank in ranks or (dist.get_rank(),):
        loss = model(batch(rank, number), rank in skip).square().mean()
        (loss / max(len(ranks), 1)).backward()


def hooked(way: str, when: str, register: Callable[[nn.Module], object], example: Example = NET) -> nn.Module:
    """The example sharded, its parameters hooked before or after that by `register(model)`."""
    if when == "before":
        build = example.build

        def build_hooked() -> nn.Module:
            model = build().double()  # at once, so that the objects with the hooks are the ones that are sharded
            register(model)
            return model

        return sharded(Example(build_hooked, example.units, kind="vectors"), way)
    model = sharded(example, way)
    register(model)
    return model


def reference() -> nn.Module:
    return NET.make(torch.float64)


def compare(model: nn.Module, whole: nn.Module, what: str) -> None:
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, what)


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name in the unwrapped model."""
    return next(p for n, p in model.named_parameters() if n.replace("_fsdp_wrapped_module.", "") == name)


def in_place(grad: Tensor) -> None:
    grad.mul_(2)


HOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "another": lambda grad: 2 * grad,
    "in place": in_place,
    "clipped": lambda grad: grad.clamp(-0.01, 0.01),  # of the mean over ranks, not of each rank's own
    "nothing": lambda grad: None,
}

both_times = pytest.mark.parametrize("when", ["before", "after"])


@every_parameter
@both_times
@pytest.mark.parametrize("what", HOOKS)
def test_a_hook_sees_the_reduced_gradient_and_may_replace_it(run_ranks, way, when, what):
    assert all(run_ranks(replacing, way, when, what, timeout=SECONDS))


def replacing(way: str, when: str, what: str) -> bool:
    """Over two steps, the first of two reduced backwards: what a hook gives is added to what is there."""
    calls: list[str] = []

    def register(model: nn.Module) -> None:
        def hook(grad: Tensor) -> Tensor | None:
            calls.append(type(grad).__name__)
            return HOOKS[what](grad)

        parameter_of(model, WEIGHT).register_hook(hook)

    model, whole = hooked(way, when, register), reference()
    calls.clear()
    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        for number in range(2 - step):
            backward(model, number)
            fresh = reference()
            backward(fresh, number, ranks=(0, 1))
            grad = fresh.get_parameter(WEIGHT).grad
            given = HOOKS[what](grad)
            fresh.get_parameter(WEIGHT).grad = grad if given is None else given
            for mine, theirs in zip(whole.parameters(), fresh.parameters(), strict=True):
                mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
        compare(model, whole, f"step {step}")
    if parameter_of(model, WEIGHT).numel():
        assert len(calls) == 3, calls
    return True


@every_parameter
@both_times
def test_a_hook_runs_once_for_what_was_kept_without_sync(run_ranks, way, when):
    assert all(run_ranks(kept, way, when, timeout=SECONDS))


def kept(way: str, when: str) -> bool:
    shapes: list[tuple[int, ...]] = []

    def register(model: nn.Module) -> None:
        def hook(grad: Tensor) -> Tensor:
            shapes.append(tuple(grad.shape))
            return 3 * grad

        parameter_of(model, WEIGHT).register_hook(hook)

    model, whole = hooked(way, when, register), reference()
    with without_sync(model):
        backward(model, 0)
    assert not shapes
    backward(model, 1)
    for number in range(2):
        backward(whole, number, ranks=(0, 1))
    whole.get_parameter(WEIGHT).grad *= 3
    compare(model, whole, "kept and reduced")
    parameter = parameter_of(model, WEIGHT)
    assert shapes == [tuple(parameter.shape)]  # of the gradient that users see
    return True


@every_parameter
@both_times
def test_post_accumulate_hooks_see_the_complete_gradient(run_ranks, way, when):
    assert all(run_ranks(post_accumulate, way, when, timeout=SECONDS))


def post_accumulate(way: str, when: str) -> bool:
    """Each hook gets the parameter that the optimizer has; together they see every gradient of every backward."""
    seen: list[tuple[int, Tensor]] = []

    def register(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), p.grad.detach().clone())))

    model, whole = hooked(way, when, register), reference()
    for number in range(2):  # accumulated
        seen.clear()
        backward(model, number)
        backward(whole, number, ranks=(0, 1))
        compare(model, whole, f"backward {number}")
        held = [p for p in model.parameters() if p.numel()]
        assert sorted(i for i, _ in seen if i in {id(p) for p in held}) == sorted(id(p) for p in held)
        for p in held:
            (found,) = (grad for i, grad in seen if i == id(p))
            assert torch.equal(local(found), local(p.grad))
    return True


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@every_parameter
def test_several_hooks_run_in_order_and_the_last_before_the_post_accumulate_ones(run_ranks, way):
    assert all(run_ranks(several, way, timeout=SECONDS))


def several(way: str) -> bool:
    order: list[str] = []

    def register(model: nn.Module) -> None:
        p = parameter_of(model, WEIGHT)

        def noted(name: str, result: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
            def hook(grad: Tensor) -> Tensor | None:
                order.append(name)
                return result(grad)

            return hook

        p.register_hook(noted("plus", lambda grad: grad + 1))
        p.register_hook(noted("times", lambda grad: grad * 2))
        p.register_post_accumulate_grad_hook(lambda p: order.append("after"))

    model, whole = hooked(way, "after", register), reference()
    backward(model)
    backward(whole, ranks=(0, 1))
    grad = whole.get_parameter(WEIGHT).grad
    grad.copy_((grad + 1) * 2)
    compare(model, whole, "two hooks")
    if parameter_of(model, WEIGHT).numel():
        assert order == ["plus", "times", "after"]
    return True


@every_parameter
@both_times
def test_a_removed_hook_is_gone(run_ranks, way, when):
    """Its handle works over sharding too, and so does one that is removed between two steps."""
    assert all(run_ranks(removed, way, when, timeout=SECONDS))


def removed(way: str, when: str) -> bool:
    handles = []

    def register(model: nn.Module) -> None:
        p = parameter_of(model, WEIGHT)
        handles.append(p.register_hook(lambda grad: 2 * grad))
        handles.append(p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(5)))

    model, whole = hooked(way, when, register), reference()
    for factor in (10, 1):
        model.zero_grad()
        whole.zero_grad()
        backward(model)
        backward(whole, ranks=(0, 1))
        whole.get_parameter(WEIGHT).grad *= factor
        compare(model, whole, f"factor {factor}")
        for handle in handles:
            handle.remove()
    return True


@every_parameter
@both_times
def test_hooks_run_where_any_rank_used_the_parameter(run_ranks, way, when):
    assert all(run_ranks(used_by_one, way, when, timeout=SECONDS))


def used_by_one(way: str, when: str) -> bool:
    """A hook that talks to the other ranks must run on all of them, or on none."""
    calls: list[int] = []

    def register(model: nn.Module) -> None:
        def hook(grad: Tensor) -> Tensor:
            calls.append(1)
            return 2 * grad

        parameter_of(model, WEIGHT).register_hook(hook)

    model, whole = hooked(way, when, register), reference()
    backward(model, skip=(0,))
    backward(whole, ranks=(0, 1), skip=(0,))
    whole.get_parameter(WEIGHT).grad *= 2
    compare(model, whole, "left out by rank 0")
    model.zero_grad()
    whole.zero_grad()
    count = len(calls)
    backward(model, skip=(0, 1))
    backward(whole, ranks=(0, 1), skip=(0, 1))
    compare(model, whole, "left out by both")
    assert len(calls) == count
    return True
