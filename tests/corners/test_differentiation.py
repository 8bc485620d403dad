"""Differentiation that is not one backward of a loss: inside a forward, through `torch.func`, with sparse gradients.

Each case is right (as one process), or an error of ours that says what is not supported, on every rank; after it the
model takes an ordinary step as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from models import blocks_of
from ways import (
    WIDE,
    Block,
    Loss,
    Network,
    alone,
    differences,
    error_of,
    mean_square,
    named_error,
    on_ranks,
    right_or_named,
    shard,
    some_ways,
    wide_batch,
)

# Gradients taken inside a forward.


class ForceField(nn.Module):
    """An energy, and its gradient with respect to the positions, taken inside the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.before = nn.Parameter(torch.rand(WIDE))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.after = nn.Parameter(torch.rand(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_() if not x.requires_grad else x
            energy = x * self.before
            for block in self.blocks:
                energy = energy + torch.tanh(block(energy))
            energy = energy.sum(1, keepdim=True)  # of each sample
            keeps = self.how == "penalised"
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=keeps, retain_graph=True)
        return forces * self.after + energy * self.before.sum()


class Around(nn.Module):
    """A force field below a root that uses parameters of its own afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ForceField(how)])
        self.gain = nn.Parameter(torch.rand(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) * self.gain


@some_ways
@on_ranks
def test_gradients_taken_inside_forward(way: str) -> list[str]:
    """In the root's forward, and in that of a unit below it."""
    problems = []
    for build in (lambda how=how, of=of: of(how) for how in ("penalised", "plain") for of in (ForceField, Around)):
        problems += right_or_named(way, build, lambda model, x: model(x).square().sum() / len(x), ())
        model, plain, x = shard(build(), way, blocks_of), build(), wide_batch(0, 0)
        with torch.no_grad():
            problems += differences("evaluation", {"": model(x)}, {"": plain(x)}, 1e-4)
    return problems


# Functional calls and transforms.


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Plain parameters by the model's own names, doubled, as a user of `functional_call` would pass."""
    pairs = zip(model.named_parameters(), Network(Block).parameters(), strict=True)
    return {name: (2 * p.detach()).requires_grad_() for (name, _), p in pairs}


def its_own(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def functional(given: Callable[[nn.Module], dict[str, Tensor]]) -> Loss:
    return lambda model, x: torch.func.functional_call(model, given(model), (x,)).square().mean()


def transformed(transform: Callable[[nn.Module, Tensor], Tensor]) -> Loss:
    return lambda model, x: transform(model, x).square().sum() / len(x)


FUNCTIONAL: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "functional_call, whole tensors": (functional(whole), ("functional_call",)),
    "functional_call, own parameters": (functional(its_own), ("functional_call",)),
    "vmap": (transformed(lambda m, x: torch.vmap(m)(x)), ("torch.func",)),
    "grad": (transformed(lambda m, x: torch.func.grad(lambda v: m(v).sum())(x)), ("torch.func",)),
    "jacrev": (transformed(lambda m, x: torch.stack([torch.func.jacrev(m)(row) for row in x[::4]])), ("torch.func",)),
    "jvp": (transformed(lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]), ("torch.func",)),
    "jacobian": (
        transformed(
            lambda m, x: torch.stack(
                [torch.autograd.functional.jacobian(m, row, create_graph=True) for row in x[::4]],
            )
        ),
        (),
    ),
}


@pytest.mark.gloo("collectives in memory cannot copy a tensor of torch.func")
@some_ways
@on_ranks
def test_functional_calls_and_transforms(way: str) -> list[str]:
    """Where a functional call is given whole tensors, gradients are of those: the model itself gets none."""
    problems = []
    for what, (loss, names) in FUNCTIONAL.items():
        if way == "wrapper" and "functional_call" in what:
            continue  # none of the model's names: `functional_call` itself says what it was not given
        found = right_or_named(way, lambda: Network(Block), loss, (*names, "remedy") if names else ())
        problems += [f"{what}: {problem}" for problem in found]
    return problems


def jacobians_of_another_thread(model: nn.Module, x: Tensor) -> Tensor:
    """Their nodes are numbered apart from the forward's, as on a GPU, where autograd's own thread runs backwards."""
    grad = torch.autograd.grad
    with ThreadPoolExecutor(1) as thread:
        there = lambda *args, **kwargs: thread.submit(grad, *args, **kwargs).result()  # noqa: E731
        with mock.patch.object(torch.autograd, "grad", there):
            rows = [torch.autograd.functional.jacobian(model, row, create_graph=True) for row in x[::4]]
    return torch.stack(rows)


@pytest.mark.gloo("a rank in memory is a thread, and has no other")
@some_ways
@on_ranks
def test_a_graph_is_differentiated_in_any_order(way: str) -> list[str]:
    """The unit stays gathered until all of its backward's graph is differentiated, even if its forward's is earlier."""
    return right_or_named(way, lambda: Network(Block), transformed(jacobians_of_another_thread), ())


# Sparse gradients.


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, in a unit of its own or with another parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Embedding(10, WIDE, sparse=True), Block()])

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] * 3).long() % 10
        return self.blocks[1](self.blocks[0](rows))


@some_ways
def test_sparse_gradients_are_named(fake_world, way):
    """By the parameter, in every backward; the first failure leaves the model as it was."""
    fake_world(2)
    for units in (alone, blocks_of):
        model = shard(Sparse(), way, units)
        for _ in range(2):
            error = error_of(lambda model=model: mean_square(model, wide_batch(0, 0)).backward())
            assert not named_error(error, "sparse", "blocks.0.weight", "remedy")


# Gradients of sharded parameters asked for directly.


@some_ways
@pytest.mark.parametrize("unused", [False, True])
@on_ranks
def test_gradients_of_sharded_parameters_are_not_given_directly(way: str, unused: bool) -> None:
    """Refused by name, whole and in part; what the graph does hold is answered."""
    plain, x = Network(Block), wide_batch(0, dist.get_rank()).requires_grad_()
    model = shard(Network(Block), way, blocks_of)
    for parameters in (list(model.parameters()), list(model.parameters())[-1:]):
        with pytest.raises(fullshard.PhaseError, match=r"blocks\.2"):
            torch.autograd.grad(mean_square(model, x), parameters, allow_unused=unused)
        model.zero_grad()
    of_input, want = (torch.autograd.grad(mean_square(each, x), x)[0] for each in (model, plain))
    torch.testing.assert_close(of_input, want, rtol=1e-4, atol=1e-6)
    weight = next(iter(model.parameters()))
    if hasattr(weight, "full_tensor"):  # part of a graph of its own
        (of_weight,) = torch.autograd.grad(weight.full_tensor().square().sum(), weight)
        torch.testing.assert_close(of_weight.full_tensor(), 2 * weight.full_tensor())
    unused = nn.Parameter(torch.ones(3))
    assert torch.autograd.grad(x.sum(), unused, allow_unused=True) == (None,)
    assert torch.autograd.grad(x.sum(), (each for each in [unused]), allow_unused=True) == (None,)
