"""After an exception in a forward or a backward the next step is right, and ranks that differ are still told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from training import assert_same, full
from ways import (
    WIDTH,
    batch,
    error_of,
    every_way,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named,
    named_error,
    shard,
    value_problems,
    whole_parameters,
    without_sync,
)


class Failure(Exception):
    """What the user's own code raises here."""


class Fails(nn.Module):
    """Passes its input on; raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.raises == "forward":
            raise Failure
        if self.raises == "backward" and x.requires_grad:
            x.register_hook(self.fail)
        return x * 1.0

    def fail(self, gradient: Tensor) -> None:
        raise Failure


class Turned(nn.Sequential):
    """Runs its first two children in the other order on rank 1, when told to; may fail between them."""

    turned = False

    def forward(self, x: Tensor) -> Tensor:
        left, right, fails, last = self
        first, second = (right, left) if self.turned and dist.get_rank() == 1 else (left, right)
        return last(second(fails(first(x))))


def failing(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """As `layers()`, with a `Fails` between the two units."""
    left, right, last = layers()
    return kind(left, right, Fails(), last) if kind is not nn.Sequential else kind(left, Fails(), right, last)


def shard_failing(way: str, kind: type[nn.Sequential] = nn.Sequential, **settings: object) -> nn.Module:
    units = lambda model: [child for child in model if isinstance(child, nn.Sequential)]  # noqa: E731
    return shard(failing(kind), way, units, **settings)


def fails_of(model: nn.Module) -> Fails:
    return next(module for module in model.modules() if isinstance(module, Fails))


def fail_once(model: nn.Module, where: str, inputs: Tensor, grad: bool = True) -> None:
    """One pass in which user code raises, on every rank."""
    fails_of(model).raises = where
    with pytest.raises(Failure), torch.set_grad_enabled(grad):
        loss_of(model, inputs).backward()
    fails_of(model).raises = None


# The order of units, which ranks compare along the first pass.


@every_way
@pytest.mark.parametrize("first", ["forward fails", "evaluation fails", "its input is refused"])
def test_another_order_is_still_noticed_after_a_failed_pass(run_ranks, first, way):
    """All units are of one size: gathers that pair up wrongly would say nothing."""
    assert_same(run_ranks(order_after_failure, first, way, timeout=20))


def order_after_failure(first: str, way: str) -> list[str]:
    model = shard_failing(way, Turned)
    grad = first != "evaluation fails"
    if first == "its input is refused":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(mine(0)[:, :2])
    else:
        fail_once(model, "forward", mine(0), grad)
    inner(model).turned = True
    with torch.set_grad_enabled(grad):
        error = error_of(lambda: model(mine(1)))
    return named_error(error, "order", kinds=fullshard.DivergenceError)


@every_way
def test_another_order_is_noticed_after_a_caught_exception(run_ranks, way):
    """The model's own forward catches what a unit of it raised, and goes on, in another order on another rank."""
    assert_same(run_ranks(order_after_caught, way, timeout=20))


class Careful(nn.Module):
    """Tries a unit that fails, then runs two others; which first, depends on the rank if told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tried = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()).double()
        self.left, self.right = (nn.Sequential(nn.Linear(WIDTH, WIDTH)).double() for _ in range(2))
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.tried(x)
        except Failure:
            x = x + 1
        if self.turned and dist.get_rank() == 1:
            return self.left(self.right(x))
        return self.right(self.left(x))


def careful(way: str) -> tuple[nn.Module, Careful]:
    model = Careful()
    return shard(model, way, named("tried", "left", "right")), model


def order_after_caught(way: str) -> list[str]:
    model, seen = careful(way)
    fails_of(model).raises = "forward"
    seen.turned = True
    error = error_of(lambda: model(mine(0)))
    return named_error(error, kinds=fullshard.DivergenceError)


@every_way
def test_a_caught_exception_changes_nothing_else(run_ranks, way):
    """With one order on all ranks the model trains on, with the failing unit left out and with it."""
    assert_same(run_ranks(trained_around_failures, way, timeout=20))


def trained_around_failures(way: str) -> list[str]:
    model, reference = careful(way)[0], Careful()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step, raises in enumerate(["forward", None, "forward", None, None]):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            fails_of(each).raises = raises
            loss_of(each, mine(step) if each is model else batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return value_problems("after five steps", model, reference)


# Gradients and weights after a failed backward.


def by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def by_model_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def by_children(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.grad = None


CLEARS = {f.__name__: f for f in (by_model, by_model_to_zero, by_optimizer, by_children)}


@every_way
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "unsynced"])
@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_cleared_after_a_failed_backward_are_gone(run_ranks, clear, synced, way):
    """Those from before it, too: the next step is the next batch's."""
    assert_same(run_ranks(cleared_after_failure, clear, synced, way, timeout=20))


def cleared_after_failure(clear: str, synced: bool, way: str) -> list[str]:
    problems: list[str] = []
    for before in (0, 1):  # batches accumulated before the failed one
        model, reference = shard_failing(way), failing()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            if before:
                accumulate(each, batch(1) if each is reference else mine(1), synced)
            fail_once(each, "backward", batch(2) if each is reference else mine(2))
            CLEARS[clear](each, optimizer)
            loss_of(each, batch(3) if each is reference else mine(3)).backward()
        problems += gradient_problems(f"{before} before", model, reference)[:2]
        for optimizer in optimizers:
            optimizer.step()
        problems += value_problems(f"{before} before, stepped", model, reference)[:2]
    return problems


def accumulate(model: nn.Module, inputs: Tensor, synced: bool) -> None:
    """One backward more."""
    with contextlib.nullcontext() if synced else without_sync(model):
        loss_of(model, inputs).backward()


@every_way
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_users_see_sharded_parameters(run_ranks, where, way):
    """Names, objects, shapes and values are those that the optimizer has, in every way of asking."""
    assert_same(run_ranks(seen_after_failure, where, way, timeout=20))


def seen_after_failure(where: str, way: str) -> list[str]:
    model = shard_failing(way)
    loss_of(model, mine(0)).backward()
    model.zero_grad()
    before = dict(model.named_parameters())
    values = {name: full(value) for name, value in model.state_dict().items()}
    fail_once(model, where, mine(1))
    problems = []
    asked: dict[str, Callable[[], dict[str, Tensor]]] = {
        "named_parameters": lambda: dict(model.named_parameters()),
        "parameters of children": lambda: {
            f"{prefix}.{name}".strip("."): parameter
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        },
        "attributes": lambda: {name: model.get_parameter(name) for name in before},
    }
    for how, ask in asked.items():
        seen = ask()
        problems += [f"{how}: {n}" for n in before.keys() | seen.keys() if seen.get(n) is not before.get(n)][:1]
        if problems:
            return problems
    after = whole_parameters(model)
    problems += [f"the value of {name} changed" for name in values if not torch.equal(values[name], after[name])]
    state = model.state_dict()
    return problems + [f"the state dict's keys: {sorted(state)}"] * (state.keys() != values.keys())


@every_way
@pytest.mark.parametrize("change", ["in place", "optimizer made anew", "load", "frozen"])
def test_what_is_done_after_a_failed_backward_counts(run_ranks, change, way):
    assert_same(run_ranks(done_after_failure, change, way, timeout=20))


def done_after_failure(change: str, way: str) -> list[str]:
    """What a program does between catching the exception and its next batch."""
    model, reference = shard_failing(way), failing()
    for each in (model, reference):
        loss_of(each, batch(0) if each is reference else mine(0)).backward()
        each.zero_grad()
        fail_once(each, "backward", batch(1) if each is reference else mine(1))
        if change == "in place":
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.5)
        elif change == "load":
            each.load_state_dict({name: value * 0.5 for name, value in each.state_dict().items()})
        elif change == "frozen":
            if way == "wrapper":
                each.requires_grad_(True)  # all or nothing is frozen there
            else:
                inner(each)[0].requires_grad_(False)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.zero_grad()
        loss_of(each, batch(2) if each is reference else mine(2)).backward()
        optimizer.step()
        each.zero_grad()
    return value_problems(change, model, reference)


@every_way
def test_exceptions_at_every_other_step(run_ranks, way):
    """Forward, backward, evaluation: each fails once between good steps, with an optimizer that has momentum."""
    assert_same(run_ranks(failing_training, way, timeout=20))


def failing_training(way: str) -> list[str]:
    model, reference = shard_failing(way), failing()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, reference)]
    for step, (where, grad) in enumerate(
        [("forward", True), ("backward", True), ("forward", False), ("backward", True)]
    ):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            fail_once(each, where, batch(step) if each is reference else mine(step), grad)
            optimizer.zero_grad()
            loss_of(each, batch(10 + step) if each is reference else mine(10 + step)).backward()
            optimizer.step()
            each.zero_grad()
    return value_problems("after four good steps", model, reference, 1e-10)


@every_way
def test_nothing_stays_gathered_after_a_failed_backward(run_ranks, way):
    """Memory comes back with the next step at the latest."""
    assert_same(run_ranks(memory_after_failure, way, timeout=20))


def memory_after_failure(way: str) -> list[str]:
    model = shard_failing(way)
    uses = []
    for fails in (False, True):
        if fails:
            fail_once(model, "backward", mine(1))
            model.zero_grad()
        loss_of(model, mine(2)).backward()
        use = fullshard.memory_use(model)
        uses.append((use.gathered, use.reducing))
        model.zero_grad()
    return [] if uses[0] == uses[1] == (0, 0) else [f"gathered and reducing: {uses}"]


# One rank raises alone, after its last gather; all ranks agree to leave the step out.


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_steps_left_out_since_one_rank_failed(run_ranks, keep, way):
    assert_same(run_ranks(left_out, keep, way, timeout=20))


def left_out(keep: bool, way: str) -> list[str]:
    """At distances that make a course of their own: ranks must expect, or not expect, the same passes after it."""
    units = lambda model: [child for child in model if isinstance(child, nn.Sequential)]  # noqa: E731
    build = lambda: nn.Sequential(*layers(), Fails())  # noqa: E731
    model, reference = shard(build(), way, units, keep=keep), build()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, reference)]
    for step in range(14):
        failing_rank = {2: 0, 4: 0, 5: 1, 9: 0, 11: 1}.get(step)
        if step == 7:
            with torch.no_grad():
                model(mine(step))
        fails_of(model).raises = "forward" if failing_rank == dist.get_rank() else None
        failed = torch.zeros(1)
        try:
            loss = loss_of(model, mine(step))
        except Failure:
            failed += 1
        dist.all_reduce(failed)
        assert bool(failed) == (failing_rank is not None)
        if failed:
            continue
        loss.backward()
        loss_of(reference, batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return value_problems("after nine steps", model, reference, 1e-10)


# What the broken backward used says nothing of the next one.


class Either(nn.Module):
    """Uses one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.rand(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)])
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[self.uses]


def uses_another_weight(way: str) -> list[str]:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        first, second, _ = layers()
        return nn.Sequential(first, Fails(), second, Either())

    model, plain = shard(build(), way, lambda model: [model[2], model[3]]), build()
    fail_once(model, "backward", mine(0))  # after the last unit's gradients were delivered
    model.zero_grad()
    for each, inputs in ((model, mine(1)), (plain, batch(1))):
        next(module for module in each.modules() if isinstance(module, Either)).uses = 1
        loss_of(each, inputs).backward()
    return gradient_problems("after a backward that broke", model, plain)


@every_way
@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_only_the_broken_backward_used(run_ranks, way, world):
    assert not any(run_ranks(uses_another_weight, way, world=world))
