"""`torch.compile` of sharded models, of an optimizer's step, and of functions of sharded parameters: as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import ConfigError, PhaseError
from ways import (
    WRAPPERS,
    batch,
    differences,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    value_problems,
)

pytestmark = pytest.mark.gloo("compiled code is the process's: what a second rank compiles is for any size")
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
Step = Callable[[nn.Module, Tensor], Any]


def compiled(function: Any, backend: str = "aot_eager", **keywords: Any) -> Any:
    return torch.compile(function, backend=backend, **keywords)


def trained(where: str, model: nn.Module, step: Step, plain: nn.Module, plain_step: Step) -> list[str]:
    """Three steps of both, this rank's batches and all; what differs then."""
    for number in range(3):
        step(model, mine(number))
        plain_step(plain, batch(number))
    return value_problems(where, model, plain, 1e-6)


def step_of(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Step:
    """An eager step, but for what `step` is."""

    def act(model: nn.Module, x: Tensor) -> None:
        loss_of(model, x).backward()
        step()
        optimizer.zero_grad()

    return act


@pytest.mark.parametrize(
    ("way", "build"), [("rows", "AdamW"), ("flat", "SGD"), ("wrapper", "AdamW"), ("originals", "SGD")]
)
@on_ranks
def test_a_compiled_step(way: str, build: str) -> list[str]:
    """Both are compiled: an eager AdamW corrects its averages in Python's floats, not in tensors of 32 bits."""
    torch.compiler.reset()
    model, plain = shard(layers(), way), layers()
    ours, theirs = (BUILDERS[build](m.parameters()) for m in (model, plain))
    steps = step_of(ours, compiled(ours.step)), step_of(theirs, compiled(theirs.step))
    return trained(build, model, steps[0], plain, steps[1])


@pytest.mark.parametrize("way", ["rows", "originals"])
@on_ranks
def test_a_compiled_training_step(way: str) -> list[str]:
    """Forward, backward and step in one compiled function, which breaks the graph where it has to."""
    torch.compiler.reset()
    model, plain = shard(layers(), way), layers()
    steps = [compiled(step_of(optimizer := BUILDERS["AdamW"](m.parameters()), optimizer.step)) for m in (model, plain)]
    return trained(way, model, steps[0], plain, steps[1])


class OneByOne(torch.optim.SGD):
    """Momentum, averaged, by a function of one parameter."""

    def __init__(self, parameters: Any, function: Callable[..., None]) -> None:
        super().__init__(parameters, lr=0.1)
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                self.function(p.detach(), p.grad, average)


def change(p: Tensor, grad: Tensor, average: Tensor) -> None:
    average.lerp_(grad, 0.5)
    p.copy_(p - 0.1 * average)


@pytest.mark.parametrize("way", ["rows", "owner"])
@on_ranks
def test_a_compiled_function_of_each_parameter(way: str) -> list[str]:
    """Optimizers that compile a function of one parameter, its gradient and its state: what torchao's do."""
    torch.compiler.reset()
    model, plain = shard(layers()[1:], way), layers()[1:]  # of fewer shapes than are compiled at most
    ours = OneByOne(model.parameters(), compiled(change, fullgraph=True, dynamic=False))
    theirs = OneByOne(plain.parameters(), change)
    return trained(way, model, step_of(ours, ours.step), plain, step_of(theirs, theirs.step))


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
@on_ranks
def test_gradients_through_compiled_functions_of_rows() -> None:
    """What they return is a DTensor, as `torch.compile` expects of the gradient that it gets back."""
    parameter: Any = shard(layers(), "rows")[2].weight
    for name, function in FUNCTIONS.items():
        torch.compiler.reset()
        found = []
        for one in (function, compiled(function, fullgraph=True)):
            one(parameter).full_tensor().square().sum().backward()
            found.append((one(parameter).full_tensor(), parameter.grad.full_tensor()))
            parameter.grad = None
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(eager, traced, msg=name)
        for view in (parameter.detach(), parameter.data, found[0][0]):
            assert torch.equal(compiled(function)(view), function(view))


@on_ranks
def test_what_is_refused_is_refused_compiled() -> None:
    """A change of a weight before its backward; an optimizer that was built before its model was sharded."""
    torch.compiler.reset()
    model = shard(layers(), "rows")
    loss = loss_of(model, mine(0))
    with torch.no_grad():
        compiled(lambda p: p.mul_(2))(model[2].weight)
    with pytest.raises(PhaseError, match="changed"):
        loss.backward()
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(shard(model, "rows"), mine(0)).backward()
    with pytest.raises(ConfigError, match="built before its model was sharded"):
        compiled(optimizer.step)()


# Compiled models.


@some_ways
@on_ranks
def test_a_compiled_model(way: str) -> list[str]:
    """The first forward is the compiled one, or an eager one came before it; or it is a module around the model."""
    problems = []
    for how in ("aot_eager", "after a forward", "around"):
        torch.compiler.reset()
        model, plain = shard(layers(), way), layers()
        ours, theirs = (BUILDERS["SGD"](m.parameters()) for m in (model, plain))
        if how == "after a forward":
            with torch.no_grad():
                model(mine(9))
        made = compiled(
            nn.Sequential(model) if how == "around" else model, "aot_eager" if how == "aot_eager" else "eager"
        )
        for number in range(2):
            step_of(ours, ours.step)(made, mine(number))
            step_of(theirs, theirs.step)(plain, batch(number))
        problems += value_problems(how, model, plain)
    return problems


@pytest.mark.parametrize("way", WRAPPERS)
@on_ranks
def test_full_precision_in_eval_of_a_compiled_model(way: str) -> list[str]:
    """`full_precision_in_eval` changes what a compiled model computes with, too, and changes it back.

    Units are of the root's own class here: Dynamo does not guard that one of two objects is not the other.
    """
    torch.compiler.reset()
    mixed, low = fullshard.MixedPrecision(param_dtype=torch.bfloat16), torch.bfloat16
    model = shard(layers().float(), way, mixed_precision=mixed, full_precision_in_eval=True)
    made, x = compiled(model, "eager"), batch(0, 0).float()
    found = [made.train(mode)(x).dtype for mode in (True, False, True, False, True)]
    problems = [] if found == [low, torch.float32, low, torch.float32, low] else [f"outputs of {found}"]
    return problems + differences("eval", {"": made.eval()(x).detach()}, {"": layers().float()(x).detach()})
