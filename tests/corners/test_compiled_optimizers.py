"""`torch.compile` of an optimizer's step, and of functions of sharded parameters: as one process, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import WRAPPERS, batch, layers, shard
from torch import Tensor, nn

from fullshard import Blocks, ConfigError, PhaseError
from ways import wrap

pytestmark = pytest.mark.gloo("torch compiles for one thread at a time")

LAYOUTS = ["rows", "flat", Blocks("row"), "owner"]
FRONT_ENDS = [*LAYOUTS, *WRAPPERS]
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def sharded(front_end: Any) -> nn.Module:
    if not isinstance(front_end, bool):
        return shard(layers(), layout=front_end)
    parts = layers()
    parts[2] = wrap(parts[2], use_orig_params=front_end)
    return wrap(parts, use_orig_params=front_end)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=str)
def test_a_compiled_step(run_ranks, front_end, build):
    assert all(run_ranks(steps, front_end, build))


def steps(front_end: Any, build: str) -> bool:
    model, reference = sharded(front_end), layers()
    ours, theirs = (BUILDERS[build](m.parameters()) for m in (model, reference))
    # Both are compiled: a compiled AdamW corrects its averages in tensors of 32 bits, an eager one in Python's floats.
    torch.compiler.reset()
    step, their_step = compiled(ours.step), compiled(theirs.step)
    for number in range(3):
        model(batch(number, dist.get_rank())).square().mean().backward()
        step()
        ours.zero_grad()
        reference(_of_all(number)).square().mean().backward()
        their_step()
        theirs.zero_grad()
        torch.testing.assert_close(model(_of_all(9)), reference(_of_all(9)))
    return True


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=str)
def test_a_compiled_training_step(run_ranks, front_end):
    """Forward, backward and step in one compiled function, which breaks the graph where it has to."""
    assert all(run_ranks(training, front_end))


def training(front_end: Any) -> bool:
    model, reference = sharded(front_end), layers()
    ours, theirs = (BUILDERS["AdamW"](m.parameters()) for m in (model, reference))
    torch.compiler.reset()

    def one(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, their_step = compiled(one), compiled(one)
    for number in range(3):
        loss = step(model, ours, batch(number, dist.get_rank())).detach()
        dist.all_reduce(loss)
        torch.testing.assert_close(
            loss / dist.get_world_size(), their_step(reference, theirs, _of_all(number)).detach()
        )
    torch.testing.assert_close(model(_of_all(9)), reference(_of_all(9)))
    return True


@pytest.mark.parametrize("front_end", LAYOUTS, ids=str)
def test_a_compiled_function_of_each_parameter(run_ranks, front_end):
    """Optimizers that compile a function of one parameter, its gradient and its state: what torchao's do."""
    assert all(run_ranks(one_by_one, front_end))


class OneByOne(torch.optim.SGD):
    """Momentum, averaged, by a function of one parameter."""

    def __init__(self, parameters: Any, function: Callable[..., None]) -> None:
        super().__init__(parameters, lr=0.1)
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                self.function(p.detach(), p.grad, state["average"])


def change(p: Tensor, grad: Tensor, average: Tensor) -> None:
    average.lerp_(grad, 0.5)
    p.copy_(p - 0.1 * average)


def one_by_one(front_end: Any) -> bool:
    model, reference = sharded(front_end), layers()
    torch.compiler.reset()
    ours = OneByOne(model.parameters(), torch.compile(change, backend="aot_eager", fullgraph=True, dynamic=False))
    theirs = OneByOne(reference.parameters(), change)
    for number in range(3):
        for module, optimizer, x in (
            (model, ours, batch(number, dist.get_rank())),
            (reference, theirs, _of_all(number)),
        ):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(_of_all(9)), reference(_of_all(9)))
    return True


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda p: p * 2,
    "transposed": lambda p: p.t() * 3,
    "in another shape": lambda p: p.unsqueeze(1) * 2,
    "a view of a result": lambda p: (p * 2).t(),
    "in part without a gradient": lambda p: p.detach() * p,
}


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 asks every subclass of DTensor for __force_to_same_metadata__ in a compiled backward",
)
def test_gradients_through_compiled_functions_of_rows(run_ranks):
    """What they return is a DTensor, as `torch.compile` expects of the gradient that it gets back."""
    assert all(run_ranks(differentiated))


def differentiated() -> bool:
    parameter: Any = sharded("rows")[0].weight
    for name, function in FUNCTIONS.items():
        torch.compiler.reset()
        found = []
        for one in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            one(parameter).full_tensor().square().sum().backward()
            found.append((one(parameter).full_tensor(), parameter.grad.full_tensor()))
            parameter.grad = None
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(eager, traced, msg=name)
        for view in (parameter.detach(), parameter.data, found[0][0]):
            assert torch.equal(compiled(function)(view), function(view))
    return True


@pytest.mark.parametrize("traced", [False, True])
def test_a_change_between_forward_and_backward_is_seen(run_ranks, traced):
    """A compiled function that changes a weight is noticed as an eager one is."""
    assert all(run_ranks(changed_before_backward, traced))


def changed_before_backward(traced: bool) -> bool:
    torch.compiler.reset()
    model = sharded("rows")
    loss = model(batch(0, dist.get_rank())).square().mean()
    double = compiled(lambda p: p.mul_(2)) if traced else lambda p: p.mul_(2)
    with torch.no_grad():
        double(model[2].weight)
    with pytest.raises(PhaseError, match="changed"):
        loss.backward()
    return True


def _of_all(number: int) -> Tensor:
    return torch.cat([batch(number, rank) for rank in range(dist.get_world_size())])


def test_what_a_step_refuses_it_refuses_compiled(run_ranks):
    """An optimizer built before its model was sharded trains nothing, compiled or not."""
    assert all(run_ranks(too_early))


def too_early() -> bool:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(batch(0, dist.get_rank())).square().mean().backward()
    torch.compiler.reset()
    step = compiled(optimizer.step)
    with pytest.raises(ConfigError, match="built before its model was sharded"):
        step()
    return True
