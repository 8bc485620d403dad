"""What forwards give away besides tensors in containers: views of parameters, tensors in objects, losses kept aside.

Each case is right (as one process), or an error of ours that names the unit, on every rank; after it the model takes
an ordinary step as ever.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import fully_shard
from models import blocks_of
from ways import (
    WIDE,
    Block,
    Loss,
    Network,
    backward_of_both,
    gradient_problems,
    inner,
    mean_square,
    on_ranks,
    right_or_named,
    shard,
    wide_batch,
)

three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
Given = dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]]  # what is given, and made into a tensor

VIEWS: Given = {
    "the weight": (lambda block, y: (y, block.up.weight), lambda out: out[0] @ out[1]),
    "its transpose": (lambda block, y: (y, block.up.weight.t()), lambda out: out[0] @ out[1]),
    "a row": (lambda block, y: {"y": y, "row": block.up.weight[2]}, lambda out: out["y"] * out["row"]),
    "a bias, expanded": (lambda block, y: (y, block.up.bias.expand(4, 1, WIDE)), lambda out: out[0] + out[1][0]),
    "detached": (lambda block, y: (y, block.up.weight.detach()), lambda out: out[0] @ out[1]),
    "the weight alone": (lambda block, y: block.up.weight, lambda out: out * 2.0),
}


def giving(give: Callable, join: Callable) -> Callable[[], nn.Module]:
    return lambda: Network(lambda: Block(give), join)


@three_ways
@pytest.mark.parametrize("what", VIEWS)
@on_ranks
def test_a_view_of_a_parameter_among_the_outputs(way: str, what: str) -> list[str]:
    name = "bias" if "bias" in what else "weight"
    return right_or_named(way, giving(*VIEWS[what]), mean_square, (f"blocks.1.up.{name}", "remedy"), after=None)


@three_ways
@on_ranks
def test_a_view_of_a_parameter_in_evaluation(way: str) -> None:
    """The same without gradients; and a copy of the parameter, which is anyone's."""
    copied = (lambda block, y: (y, block.up.weight.clone()), lambda out: out[0] @ out[1])
    for given, may_raise in ((copied, False), (VIEWS["its transpose"], True)):
        build, x = giving(*given), wide_batch(0, 0)
        with torch.no_grad():
            try:
                torch.testing.assert_close(shard(build(), way, blocks_of)(x), build()(x))
            except fullshard.FullshardError as error:
                assert may_raise and "blocks.1.up.weight" in str(error)


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


OBJECTS: Given = {
    "namespace": (lambda block, y: SimpleNamespace(y=y), lambda out: out.y),
    "slots": (lambda block, y: Slotted(y), lambda out: out.y),
    "deep": (lambda block, y: Deep(y), lambda out: out.inside.items["all"][1]),
    "UserDict": (lambda block, y: UserDict(y=y), lambda out: out["y"]),
    "set": (lambda block, y: {y}, lambda out: next(iter(out))),
    "iterator": (lambda block, y: iter([y]), next),
    "closure": (lambda block, y: lambda: y, lambda out: out()),
    "attribute of the module": (lambda block, y: setattr(block, "kept", y) or block, lambda out: out.kept),
}


@pytest.mark.parametrize("what", OBJECTS)
@on_ranks
def test_outputs_in_plain_objects(what: str) -> list[str]:
    return right_or_named("rows", giving(*OBJECTS[what]), mean_square, ("blocks.1", "remedy"), after=None)


# Losses that a module keeps, beside or in place of its output.

ELSEWHERE: dict[int, Tensor] = {}  # by module


class Keeping(Block):
    """Keeps a loss of its own, which needs its parameters in backward; made after the output or `first`."""

    first = False

    def forward(self, x: Tensor) -> Tensor:
        y = None if self.first else super().forward(x)
        self.loss = self.up(x).square().mean() + self.down.weight.square().sum()
        return super().forward(x) if y is None else y


class KeepingFirst(Keeping):
    first = True


class KeepingElsewhere(Block):
    """Keeps a loss in a dictionary of the program's, beside an output that leads back as usual."""

    def forward(self, x: Tensor) -> Tensor:
        ELSEWHERE[id(self)] = self.up(x).square().mean()
        return super().forward(x)


def kept_of(index: int) -> Loss:
    """The loss that a block kept, alone; the first one's inputs need no gradient."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        block = inner(model.blocks[index])
        return ELSEWHERE.pop(id(block)) if id(block) in ELSEWHERE else block.loss

    return loss


def kept_and_output(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) + inner(model.blocks[1]).loss


def kept_then_output(model: nn.Module, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    inner(model.blocks[1]).loss.backward(retain_graph=True)
    return loss


KEPT: dict[str, tuple[type[Block], Loss]] = {
    "alone": (Keeping, kept_of(1)),
    "alone, made first": (KeepingFirst, kept_of(1)),
    "of the first block": (Keeping, kept_of(0)),
    "added to the output's": (Keeping, kept_and_output),
    "added to the output's, made first": (KeepingFirst, kept_and_output),
    "before the output's": (Keeping, kept_then_output),
    "where nobody looks": (KeepingElsewhere, kept_of(1)),  # freed memory is never read
}


@three_ways
@pytest.mark.parametrize("what", KEPT)
@on_ranks
def test_a_loss_kept_on_a_module(way: str, what: str) -> list[str]:
    kind, loss = KEPT[what]

    def build() -> nn.Module:
        model = Network(kind)
        torch.manual_seed(1)
        model.blocks[0] = kind()
        return model

    block = "blocks.0" if "first block" in what else "blocks.1"
    return right_or_named(way, build, loss, (f"{block}.up.weight" if kind is KeepingElsewhere else block, "remedy"))


class Sometimes(Block):
    """Its loss is None at first, and set from the third forward on: where it may be is known from the first."""

    count, loss = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.loss = self.up(x).square().mean() if self.count > 2 else None
        return super().forward(x)


def sometimes(model: nn.Module, x: Tensor) -> Tensor:
    output, loss = mean_square(model, x), inner(model.blocks[1]).loss
    return output if loss is None else loss


@three_ways
@on_ranks
def test_a_loss_kept_now_and_then(way: str) -> list[str]:
    """Two steps without the loss, then two with it."""
    model, plain = shard(Network(Sometimes), way, blocks_of), Network(Sometimes)
    problems = []
    for step in range(4):
        backward_of_both(model, plain, step, sometimes)
        problems += gradient_problems(f"step {step}", model, plain)
    return problems


def changed(change: Callable[[Tensor], Any], output: Tensor | dict[str, Tensor]) -> Tensor:
    """What a block returned, changed in place: [samples, WIDE] again."""
    y = output["y"] if isinstance(output, dict) else output
    change(y)
    return y.reshape(-1, WIDE)


def doubled_gradient(column: Tensor) -> None:
    column.register_hook(lambda gradient: gradient * 2)
    column.mul_(2)


RETURNED = {
    "reshaped": lambda block, y: y.view(-1, 1, WIDE),
    "a slice of that": lambda block, y: y.view(-1, 1, WIDE)[:],
    "in a dict": lambda block, y: {"y": y.view(-1, 1, WIDE)},
    "transposed twice": lambda block, y: y.t().t(),
    "changed before": lambda block, y: y.add_(1)[:],
}
CHANGES = {
    "itself": lambda y: y.add_(1),
    "a column": lambda y: y[..., 0].mul_(2),
    "a part of some": lambda y: y[..., 1:][..., :2].mul_(2),
    "a column with a hook": lambda y: doubled_gradient(y[..., 0]),
    "a column, then a hook": lambda y: y[..., 0].mul_(2).register_hook(lambda gradient: gradient * 3),
    "by another view": lambda y: y.view(-1, WIDE)[:, 1:].zero_(),
}


@three_ways
@pytest.mark.parametrize("returned", RETURNED)
@on_ranks
def test_outputs_that_are_views_and_are_changed_in_place(way: str, returned: str) -> list[str]:
    """What a view's gradient comes back through is made anew then, from the view's base on."""
    problems = []
    for name, change in CHANGES.items():
        build = partial(Network, partial(Block, RETURNED[returned]), partial(changed, change))
        model, plain = shard(build(), way, blocks_of), build()
        for step in range(4):
            backward_of_both(model, plain, step, mean_square)
            problems += gradient_problems(f"{name}, step {step}", model, plain)
    return problems


class Detached(nn.Linear):
    """A head that trains alone: what it is given gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), Detached(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda given: self.head(self.trunk(given)), x.clone(), use_reentrant=True)


def test_an_input_without_a_gradient_in_a_reentrant_checkpoint(fake_world):
    """Autograd calls hooks there with None."""
    fake_world(1)
    model = Headed()
    expected = copy.deepcopy(model)
    for unit in (model.trunk, model.head, model):
        fully_shard(unit)
    x = torch.randn(3, 4, requires_grad=True)
    for each in (model, expected):
        each(x).sum().backward()
    assert torch.allclose(model.head.weight.grad.full_tensor(), expected.head.weight.grad)
    assert model.trunk.weight.grad is None and expected.trunk.weight.grad is None
