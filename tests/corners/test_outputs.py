"""What forwards give away besides tensors in containers: views of parameters, tensors in objects, losses kept aside.

Each case is right (as one process), or an error of ours that names the unit, on every rank; after it the model takes
an ordinary step as ever.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from models import blocks_of
from training import assert_same
from ways import (
    WIDE,
    Block,
    Loss,
    Network,
    backward_of_both,
    gradient_problems,
    inner,
    mean_square,
    right_or_named,
    shard,
    some_ways,
    wide_batch,
)

# Views of parameters.

GIVEN: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "the weight": (lambda block, y: (y, block.up.weight), lambda out: out[0] @ out[1]),
    "its transpose": (lambda block, y: (y, block.up.weight.t()), lambda out: out[0] @ out[1]),
    "a row": (lambda block, y: {"y": y, "row": block.up.weight[2]}, lambda out: out["y"] * out["row"]),
    "a bias, expanded": (lambda block, y: (y, block.up.bias.expand(4, 1, WIDE)), lambda out: out[0] + out[1][0]),
    "detached": (lambda block, y: (y, block.up.weight.detach()), lambda out: out[0] @ out[1]),
    "the weight alone": (lambda block, y: block.up.weight, lambda out: out * 2.0),
}


def given_view(way: str, what: str) -> list[str]:
    give, join = GIVEN[what]
    build = lambda: Network(lambda: Block(give), join)  # noqa: E731
    name = "bias" if "bias" in what else "weight"
    return right_or_named(way, build, mean_square, (f"blocks.1.up.{name}", "remedy"), after=None)


@pytest.mark.parametrize("what", GIVEN)
@some_ways
def test_a_view_of_a_parameter_among_the_outputs(run_ranks, way, what):
    assert_same(run_ranks(given_view, way, what, timeout=20))


def evaluated_view(way: str) -> list[str]:
    """The same without gradients; and a copy of the parameter, which is anyone's."""
    problems = []
    copies = lambda: Network(lambda: Block(lambda b, y: (y, b.up.weight.clone())), lambda o: o[0] @ o[1])  # noqa: E731
    views = lambda: Network(lambda: Block(lambda b, y: (y, b.up.weight.t())), lambda o: o[0] @ o[1])  # noqa: E731
    for build, may_raise in ((copies, False), (views, True)):
        model, plain, x = shard(build(), way, blocks_of), build(), wide_batch(0, 0)
        with torch.no_grad():
            try:
                if not torch.allclose(model(x), plain(x), atol=1e-6):
                    problems.append("wrong output")
            except fullshard.FullshardError as error:
                if not may_raise or "blocks.1.up.weight" not in str(error):
                    problems.append(f"{error}")
    return problems


@some_ways
def test_a_view_of_a_parameter_in_evaluation(run_ranks, way):
    assert_same(run_ranks(evaluated_view, way, timeout=20))


# Outputs in objects that are no containers.


class Slotted:
    """Without a `__dict__`."""

    __slots__ = ("note", "y")

    def __init__(self, y: Tensor) -> None:
        self.y, self.note = y, "not a tensor"


class Deep:
    """A tensor in a list in a dict in an object in an object."""

    def __init__(self, y: Tensor) -> None:
        self.inside = SimpleNamespace(items={"all": [None, y]})
        self.itself = self  # and a cycle


OBJECTS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "namespace": (lambda block, y: SimpleNamespace(y=y), lambda out: out.y),
    "slots": (lambda block, y: Slotted(y), lambda out: out.y),
    "deep": (lambda block, y: Deep(y), lambda out: out.inside.items["all"][1]),
    "UserDict": (lambda block, y: UserDict(y=y), lambda out: out["y"]),
    "set": (lambda block, y: {y}, lambda out: next(iter(out))),
    "iterator": (lambda block, y: iter([y]), next),
    "closure": (lambda block, y: lambda: y, lambda out: out()),
    "attribute of the module": (lambda block, y: setattr(block, "kept", y) or block, lambda out: out.kept),
}


def in_object(way: str, what: str) -> list[str]:
    give, join = OBJECTS[what]
    build = lambda: Network(lambda: Block(give), join)  # noqa: E731
    return right_or_named(way, build, mean_square, ("blocks.1", "remedy"), after=None)


@pytest.mark.parametrize("what", OBJECTS)
@some_ways
def test_outputs_in_plain_objects(run_ranks, way, what):
    assert_same(run_ranks(in_object, way, what, timeout=20))


# Losses that a module keeps, beside or in place of its output.


class Keeping(Block):
    """Keeps a loss of its own, which needs its parameters in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = self.up(x).square().mean() + self.down.weight.square().sum()
        return y


class KeepingFirst(Block):
    """As `Keeping`, made before the output is."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.up(x).square().mean() + self.down.weight.square().sum()
        return super().forward(x)


def kept_alone(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    return inner(model.blocks[1]).loss


def kept_and_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + inner(model.blocks[1]).loss


def kept_then_output(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    inner(model.blocks[1]).loss.backward(retain_graph=True)
    return loss


def kept_from_first(model: nn.Module, x: Tensor) -> Tensor:
    """Of the block that runs first, whose inputs need no gradient."""
    model(x)
    return inner(model.blocks[0]).loss


KEPT: dict[str, tuple[type[Block], Loss]] = {
    "alone": (Keeping, kept_alone),
    "alone, made first": (KeepingFirst, kept_alone),
    "added to the output's": (Keeping, kept_and_output),
    "added to the output's, made first": (KeepingFirst, kept_and_output),
    "before the output's": (Keeping, kept_then_output),
}


def kept(way: str, what: str) -> list[str]:
    kind, loss = KEPT[what]
    return right_or_named(way, lambda: Network(kind), loss, ("blocks.1", "remedy"))


@pytest.mark.parametrize("what", KEPT)
@some_ways
def test_a_loss_kept_on_a_module(run_ranks, way, what):
    assert_same(run_ranks(kept, way, what, timeout=20))


def kept_by_first(way: str) -> list[str]:
    def build() -> nn.Module:
        model = Network(Block)
        torch.manual_seed(1)
        model.blocks[0] = Keeping()
        return model

    return right_or_named(way, build, kept_from_first, ("blocks.0", "remedy"))


@some_ways
def test_a_loss_kept_on_the_first_module(run_ranks, way):
    assert_same(run_ranks(kept_by_first, way, timeout=20))


# Graphs that are kept where nobody looks: freed memory is never read.

ELSEWHERE: list[Tensor] = []


class KeepingElsewhere(Block):
    """Keeps a loss in a list of the program's, beside an output that leads back as usual."""

    def forward(self, x: Tensor) -> Tensor:
        ELSEWHERE.append(self.up(x).square().mean())
        return super().forward(x)


def kept_elsewhere(model: nn.Module, x: Tensor) -> Tensor:
    ELSEWHERE.clear()
    model(x)
    return ELSEWHERE.pop()


def kept_by_nobody(way: str) -> list[str]:
    return right_or_named(way, lambda: Network(KeepingElsewhere), kept_elsewhere, ("blocks.1.up.weight", "remedy"))


@some_ways
def test_a_loss_kept_elsewhere(run_ranks, way):
    assert_same(run_ranks(kept_by_nobody, way, timeout=20))


class Sometimes(Block):
    """Its loss is None at first, and set from the third forward on: where it may be is known from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.loss = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.loss = self.up(x).square().mean() if self.count > 2 else None
        return super().forward(x)


def sometimes(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x).square().mean()
    loss = inner(model.blocks[1]).loss
    return output if loss is None else loss


def kept_sometimes(way: str) -> list[str]:
    """Two steps without the loss, then two with it."""
    model, plain = shard(Network(Sometimes), way, blocks_of), Network(Sometimes)
    problems = []
    for step in range(4):
        backward_of_both(model, plain, step, sometimes)
        problems += gradient_problems(f"step {step}", model, plain)
    return problems


@some_ways
def test_a_loss_kept_now_and_then(run_ranks, way):
    assert_same(run_ranks(kept_sometimes, way, timeout=20))
