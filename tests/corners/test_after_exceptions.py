"""After an exception in a forward or a backward the next step is right, and ranks that differ still get an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from training import full
from ways import (
    WIDTH,
    batch,
    error_of,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named,
    named_error,
    on_ranks,
    shard,
    some_ways,
    synced,
    value_problems,
    whole_parameters,
)

three_ways = pytest.mark.parametrize("way", ["rows", "wrapper", "originals"])


class Failure(Exception):
    """What the user's own code raises here."""


class Fails(nn.Module):
    """Passes its input on; raises when told to."""

    raises: str | None = None

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


def failing() -> Turned:
    """As `layers()`, with a `Fails` between the two units."""
    left, right, last = layers()
    return Turned(left, right, Fails(), last)


def shard_failing(way: str) -> nn.Module:
    return shard(failing(), way, named("0", "1"))


def fails_of(model: nn.Module) -> Fails:
    return next(module for module in model.modules() if isinstance(module, Fails))


def fail_once(model: nn.Module, where: str, inputs: Tensor, grad: bool = True) -> None:
    """One pass in which user code raises, on every rank."""
    fails_of(model).raises = where
    with pytest.raises(Failure), torch.set_grad_enabled(grad):
        loss_of(model, inputs).backward()
    fails_of(model).raises = None


class Optional(nn.Sequential):
    """Its first child may be left out."""

    leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = self
        return second(x if self.leaves_out else first(x))


@on_ranks
def test_a_unit_whose_gradients_were_dropped_is_not_reduced() -> None:
    """The next step does not use it: it owes nothing any more."""
    model = shard(Optional(nn.Linear(4, 4), nn.Linear(4, 4)), "rows", named("0", "1"))
    model.set_requires_gradient_sync(False)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    handle.remove()
    model.set_requires_gradient_sync(True)
    model.leaves_out = True
    with fullshard.record_events() as events:
        model(x).sum().backward()
    assert {event.unit for event in events if event.verb == "reduce"} == {"1"}
    assert model[0].weight.grad is None


# The order of units, which ranks compare along the first pass.


@three_ways
@pytest.mark.parametrize("first", ["forward fails", "evaluation fails", "its input is refused"])
@on_ranks
def test_another_order_is_still_noticed_after_a_failed_pass(first: str, way: str) -> list[str]:
    """All units are of one size: gathers that pair up wrongly would say nothing."""
    model = shard_failing(way)
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


@three_ways
@on_ranks
def test_an_exception_that_the_models_own_forward_catches(way: str) -> list[str]:
    """Training goes on with the failing unit and without; another order on another rank is still noticed."""
    other = Careful()
    model, reference = shard(Careful(), way, units := named("tried", "left", "right")), Careful()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step, raises in enumerate(["forward", None, "forward", None, None]):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            fails_of(each).raises = raises
            loss_of(each, mine(step) if each is model else batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    problems = value_problems("after five steps", model, reference)
    fails_of(other).raises, other.turned = "forward", True
    error = error_of(lambda: shard(other, way, units)(mine(0)))
    return problems + named_error(error, kinds=fullshard.DivergenceError)


# Gradients and parameters after a failed backward.


CLEARS = {  # by the model: see the property machine
    "by optimizer, to zero": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False),
    "by children": lambda model: [
        setattr(p, "grad", None) for m in model.modules() for p in m._parameters.values() if p is not None
    ],
}


@three_ways
@pytest.mark.parametrize("clear", CLEARS)
@on_ranks
def test_gradients_cleared_after_a_failed_backward_are_gone(clear: str, way: str) -> list[str]:
    """Those from before it, too, synced or not: the next step is the next batch's."""
    problems: list[str] = []
    for before in (None, True, False):  # a batch accumulated before the failed one, with sync or without
        model, reference = shard_failing(way), failing()
        for each in (model, reference):
            if before is not None:
                with synced(each, before):
                    loss_of(each, mine(1) if each is model else batch(1)).backward()
            fail_once(each, "backward", mine(2) if each is model else batch(2))
            CLEARS[clear](each)
            loss_of(each, mine(3) if each is model else batch(3)).backward()
        problems += gradient_problems(f"synced before: {before}", model, reference)[:2]
    return problems


@some_ways
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks
def test_after_an_exception_users_see_sharded_parameters(where: str, way: str) -> list[str]:
    """Names, objects, shapes and values are those that the optimizer has, in every way of asking."""
    model = shard_failing(way)
    loss_of(model, mine(0)).backward()
    model.zero_grad()
    before = dict(model.named_parameters())
    values = {name: full(value) for name, value in model.state_dict().items()}
    fail_once(model, where, mine(1))
    children = [(n, m, p) for n, m in model.named_modules() for p in m.named_parameters(recurse=False)]
    asked = {
        "named_parameters": dict(model.named_parameters()),
        "parameters of children": {f"{prefix}.{name}".strip("."): p for prefix, _, (name, p) in children},
        "attributes": {name: model.get_parameter(name) for name in before},
    }
    for how, seen in asked.items():
        wrong = [name for name in before.keys() | seen.keys() if seen.get(name) is not before.get(name)]
        assert not wrong, f"{how}: {wrong}"
    after = whole_parameters(model)
    assert model.state_dict().keys() == values.keys()
    return [f"the value of {name} changed" for name in values if not torch.equal(values[name], after[name])]


# One rank raises alone, after its last gather; all ranks agree to leave the step out.


@pytest.mark.parametrize("way", ["rows", "originals"])
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
@on_ranks
def test_steps_left_out_since_one_rank_failed(keep: bool, way: str) -> list[str]:
    """At distances that make a course of their own: ranks must expect, or not expect, the same passes after it."""
    build = lambda: nn.Sequential(*layers(), Fails())  # noqa: E731
    model, reference = shard(build(), way, named("0", "1"), keep=keep), build()
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
