"""Differentiation that is not one backward of a loss: inside a forward, through `torch.func`, with sparse gradients.

Each case is right (as one process), or an error of ours that says what is not supported, on every rank; after it the
model takes an ordinary step as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from models import blocks_of
from training import assert_same
from ways import (
    SOME_WAYS,
    WIDE,
    Block,
    Loss,
    Network,
    mean_square,
    right_or_named,
    shard,
    some_ways,
    whole_gradients,
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


def force_field(way: str, how: str, nested: bool) -> list[str]:
    build = (lambda: Around(how)) if nested else (lambda: ForceField(how))
    problems = right_or_named(way, build, lambda model, x: model(x).square().sum() / len(x), ())
    model, plain, x = shard(build(), way, blocks_of), build(), wide_batch(0, 0)
    try:
        with torch.no_grad():
            if not torch.allclose(model(x), plain(x), rtol=1e-4, atol=1e-5):
                problems.append("evaluation")
    except Exception as error:
        problems.append(f"evaluation: {type(error).__name__}: {str(error)[:200]}")
    return problems


@pytest.mark.parametrize("nested", [False, True], ids=["in the root", "below the root"])
@pytest.mark.parametrize("how", ["penalised", "plain"])
@some_ways
def test_gradients_taken_inside_forward(run_ranks, way, how, nested):
    assert_same(run_ranks(force_field, way, how, nested, timeout=20))


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


def functionally(way: str, what: str) -> list[str]:
    """Where a functional call is given whole tensors, gradients are of those: the model itself gets none."""
    loss, names = FUNCTIONAL[what]
    return right_or_named(way, lambda: Network(Block), loss, (*names, "remedy") if names else ())


@pytest.mark.parametrize(
    ("way", "what"),
    # A flat parameter has none of the model's names, so that `functional_call` itself says what it was not given.
    [(f, w) for w in FUNCTIONAL for f in SOME_WAYS if f != "wrapper" or "functional_call" not in w],
)
def test_functional_calls_and_transforms(run_ranks, way, what):
    assert_same(run_ranks(functionally, way, what, timeout=20))


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


def sparse(way: str) -> list[str]:
    """An error of ours, in the first backward at the latest, that says which parameter and that it is sparse."""
    model = shard(Sparse(), way, blocks_of)
    try:
        mean_square(model, wide_batch(0, dist.get_rank())).backward()
    except fullshard.FullshardError as error:
        said = str(error)
        return [] if "sparse" in said and "weight" in said and "remedy" in said else [f"does not say what: {said}"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]
    plain = Sparse()
    mean_square(plain, wide_batch(0)).backward()
    got = whole_gradients(model)
    return [
        f"gradient of {name}"
        for name, p in plain.named_parameters()
        if p.grad is not None and not torch.allclose(got[name].to_dense(), p.grad.to_dense(), rtol=1e-4, atol=1e-6)
    ]


@some_ways
def test_sparse_gradients_are_named(run_ranks, way):
    assert_same(run_ranks(sparse, way, timeout=20))


# Gradients of sharded parameters asked for directly.


def asked_directly(way: str, unused: bool) -> list[str]:
    """Refused by name, whole and in part; what the graph does hold is answered."""
    build = lambda: Network(Block)  # noqa: E731
    model, x = shard(build(), way, blocks_of), wide_batch(0, dist.get_rank()).requires_grad_()
    problems = []
    for parameters in (list(model.parameters()), list(model.parameters())[-1:]):
        try:
            torch.autograd.grad(mean_square(model, x), parameters, allow_unused=unused)
            problems.append(f"{len(parameters)} parameters: nothing was raised")
        except fullshard.PhaseError as error:
            problems += [] if "blocks.2" in str(error) else [str(error)]
        model.zero_grad()
    (of_input,) = torch.autograd.grad(mean_square(model, x), x)
    plain = build()
    (want,) = torch.autograd.grad(mean_square(plain, x), x)
    if not torch.allclose(of_input, want, rtol=1e-4, atol=1e-6):
        problems.append("the gradient of the input is another one")
    weight = next(iter(model.parameters()))
    if hasattr(weight, "full_tensor"):  # part of a graph of its own
        (of_weight,) = torch.autograd.grad(weight.full_tensor().square().sum(), weight)
        if not torch.allclose(of_weight.full_tensor(), 2 * weight.full_tensor()):
            problems.append("the gradient through full_tensor() is another one")
    lone = nn.Parameter(torch.ones(3))
    assert torch.autograd.grad(x.sum(), lone, allow_unused=True) == (None,)
    return problems


@some_ways
@pytest.mark.parametrize("unused", [False, True])
def test_gradients_of_sharded_parameters_are_not_given_directly(run_ranks, way, unused):
    assert_same(run_ranks(asked_directly, way, unused, timeout=20))
