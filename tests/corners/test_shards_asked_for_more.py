"""Norms of every order, inputs that are no strided tensors, LSTMs, and `.grad` in a loss: right, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import PhaseError, fully_shard
from fullshard.runtime import additions
from models import blocks_of
from ways import SOME_WAYS, WIDE, Block, Network, error_of, gradient_problems, named_error, on_ranks, shard, wide_batch

ORDERS = (2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf"), -1.0)


@on_ranks
def test_norms_of_flat_shards() -> list[str]:
    """Rank 1 holds no element of the first parameter, whose smallest value is not rank 0's of the second."""
    problems = []
    model, plain = nn.Linear(5, 7), nn.Linear(5, 7)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.linspace(2.0, 0.5, parameter.numel()).view_as(parameter))
        plain.weight[0, 0] = 0.0
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs)
    fully_shard(model, layout="flat")
    shards, wholes = [p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()]
    for order in ORDERS:
        got = [torch.linalg.vector_norm(one, order) for one in shards]
        want = [torch.linalg.vector_norm(one, order) for one in wholes]
        lists = torch._foreach_norm(shards, order)
        for mine, listed, theirs in zip(got, lists, want, strict=True):
            assert torch.allclose(mine, theirs) and torch.allclose(listed, theirs), (
                f"order {order}: {mine}, in a list {listed}, for {theirs}"
            )
    if hasattr(torch, "_foreach_powsum"):
        for mine, theirs in zip(torch._foreach_powsum(shards, 2), wholes, strict=True):
            assert mine.shape == () and torch.allclose(mine, theirs.square().sum()), (
                f"powsum {mine} for {theirs.square().sum()}"
            )
    multiplies = [lambda many: torch._foreach_mm(many, many)] if hasattr(torch, "_foreach_mm") else []  # torch 2.11
    for reduction in (torch._foreach_max, *multiplies):
        problems += named_error(error_of(lambda reduction=reduction: reduction(shards)), "flat shard", where="lists")
    problems += (
        [] if torch.equal(torch._foreach_add(shards, 1.0)[0].full_tensor(), wholes[0] + 1.0) else ["_foreach_add"]
    )
    return problems


def loss_of_grad(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward(create_graph=True)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    sum(gradient.square().sum() for gradient in gradients).backward()


@on_ranks
def test_grad_of_a_backward_with_create_graph() -> list[str]:
    """After create_graph `.grad` is right as a constant, for an optimizer and for the next step; not in a loss."""
    problems = []
    for way in SOME_WAYS:
        model, plain, x = shard(Network(Block), way, blocks_of), Network(Block), wide_batch(0, dist.get_rank())
        error = error_of(lambda model=model, x=x: loss_of_grad(model, x))
        problems += named_error(error, "create_graph", "blocks.2", "computed from .grad", kinds=PhaseError, where=way)
        model.zero_grad()
        for step, together in enumerate((False, True, True)):
            x, everyone = wide_batch(step, dist.get_rank()), wide_batch(step)
            model(x).square().mean().backward(create_graph=step == 0)
            plain(everyone).square().mean().backward()
            problems += gradient_problems(f"{way}, step {step}", model, plain)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            clip = getattr(model, "clip_grad_norm_", None)
            clip(0.1) if clip else fullshard.clip_grad_norm_(model.parameters(), 0.1)
            problems += gradient_problems(f"{way}, step {step}, clipped", model, plain)
            model.zero_grad(set_to_none=together), plain.zero_grad(set_to_none=together)
    return problems


class Sparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight.t()) if x.layout is torch.sparse_coo else super().forward(x)


def test_inputs_of_other_layouts(fake_world):
    """A sparse or nested input that needs a gradient gets it, as a leaf and with a graph."""
    fake_world(2)
    sparse = torch.eye(WIDE).to_sparse()
    jagged = torch.nested.nested_tensor([torch.randn(2, WIDE), torch.randn(3, WIDE)])
    for inputs in (sparse, jagged):
        model = fully_shard(Sparse(WIDE, 3))
        for factor in (None, 2.0):
            leaf = inputs.detach().clone().requires_grad_()
            out = model(leaf if factor is None else leaf * factor)
            (out.to_padded_tensor(0.0) if out.is_nested else out).sum().backward()
            assert leaf.grad is not None
            assert all(parameter.grad is not None for parameter in model.parameters() if parameter.ndim == 2)


class TwoSparse(nn.Linear):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward(left.to_dense() + right.to_dense())


def test_hooks_on_inputs_go_with_their_calls(fake_world):
    """Two inputs that are watched as they are and outlive many forwards keep no hook of a forward that is gone."""
    fake_world(2)
    model = fully_shard(TwoSparse(WIDE, WIDE))
    left, right = (torch.eye(WIDE).to_sparse().requires_grad_() * factor for factor in (2.0, 3.0))
    for _ in range(5):
        model(left, right)
    assert [len(tensor._backward_hooks or ()) for tensor in (left, right)] == [0, 0]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_units_made_in_inference_mode(fake_world, layout):
    fake_world(2)
    model = Network(Block)
    with torch.inference_mode():
        for block in model.blocks:
            fully_shard(block, layout=layout)
        fully_shard(model, layout=layout)
        model(wide_batch(0, 0))
    model(wide_batch(0, 0)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_showing_a_parameter_is_no_registration(fake_world):
    """An LSTM's class watches its attributes; a step goes around it, and its list of weights is right."""
    fake_world(2)
    model = fully_shard(nn.LSTM(WIDE, WIDE))
    x = torch.randn(3, 2, WIDE)
    model(x)[0].sum().backward()
    before = additions._Registrations.count
    model(x)[0].sum().backward()
    assert additions._Registrations.count == before
    assert all(mine is theirs for mine, theirs in zip(model._flat_weights, model.parameters(), strict=True))


def test_a_hook_on_first_gradients_costs_one_call(fake_world):
    """Of a unit without an input that needs a gradient: one call a parameter, and the first alone does anything."""
    fake_world(2)
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))))
    runner = model._get_fsdp_state()._runner
    expected = runner._first_gradient
    x = torch.randn(2, 4)
    model(x).sum().backward()
    assert expected is None
    first = runner._first_gradient
    assert first is not None
    hooks = [len(member.unsharded._post_accumulate_grad_hooks) for member in runner.unit.members]
    for _ in range(3):
        model(x).sum().backward()
    assert hooks == [len(member.unsharded._post_accumulate_grad_hooks) for member in runner.unit.members] == [1] * 20
