"""Owners of experts: groups of ranks have different parameters, batches and steps, and share others."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.optim import owners

WIDE = 16
KINDS = {
    "muon": lambda params: fullshard.Muon(params, lr=0.05),
    "owners": lambda params: fullshard.OwnerOptimizer(params, torch.optim.Adafactor, lr=0.05),
}


class Experts(nn.Module):
    """Layers of all ranks, and experts of which each half of the ranks has others."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(9)])
        self.last = nn.Linear(WIDE, 8 * WIDE, bias=False)  # its owner has one tensor, of the bytes of eight batches
        torch.manual_seed(1 + place)
        self.experts = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(7)])

    def forward(self, x: Tensor, used: int) -> Tensor:
        for expert in self.experts[:used]:
            x = expert(x).tanh()
        return self.last(self.layers(x).tanh())


def problems_of_experts(kind: str) -> list[str]:
    """Parameters that differ in a bit from those of steps of a single batch, though ranks use seven experts or two."""
    mesh, world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data")), init_device_mesh("cpu", (4,))
    place = mesh.get_local_rank("expert")
    count = (7, 2)[place]
    trained = []
    for batch in (1024, 2**40):  # bytes: of one layer, or of all
        model = Experts(place)
        for expert in model.experts:
            fullshard.fully_shard(expert, mesh=mesh["data"], unused="zeros")
        for layer in model.layers:
            fullshard.fully_shard(layer, mesh=world, unused="zeros")
        fullshard.fully_shard(model, mesh=world, unused="zeros")
        with mock.patch.object(owners, "BATCH", batch):
            optimizer = KINDS[kind](model.parameters())
            for step in range(4):
                x = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                model(x, count).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append([parameter.full_tensor() for parameter in model.parameters()])
        if kind == "owners":
            plan = next(iter(optimizer._plans.values()))
            assert len(plan.batches) == (1 if batch > 1024 else 4 if place == 0 else 3), len(plan.batches)
    names = [name for name, _ in model.named_parameters()]
    return [name for name, ours, theirs in zip(names, *trained, strict=True) if not torch.equal(ours, theirs)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_ranks_with_different_numbers_of_batches_share_some(run_ranks, kind):
    assert run_ranks(problems_of_experts, kind, world=4) == [[]] * 4


def test_batches_have_numbers_without_gaps():
    with mock.patch.object(owners, "BATCH", 10):
        assert owners.batches_of([30, 10], [0, 0]) == [0, 1]  # of four batches, 0 and 3
        assert owners.batches_of([30, 10, 10, 10, 10], [0, 0, 1, 1, 1]) == [0, 3, 0, 1, 2]
        assert owners.batches_of([10, 10, 0], [0, 0, 0]) == [0, 1, 1]
        assert owners.batches_of([], []) == []
        assert owners.batches_of([0, 0], [0, 1]) == [0, 0]


def grown() -> tuple[list[int], int]:
    """The most plans of each kind, and the number of groups, over steps with gradients of random parameters."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.01)
    muon = fullshard.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    chance, most = random.Random(0), [0, 0, 0, 0]
    for _ in range(300):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if chance.random() < 0.5 else None
        optimizer.step()
        muon.step()
        lengths = [len(each._plans) for each in (optimizer, muon)]
        lengths += [max(map(len, each._known.values()), default=0) for each in (optimizer, muon)]
        most = [*map(max, most, lengths)]
    return most, len(optimizer._known) + len(muon._known)


@pytest.mark.gloo("exchanges pieces of different sizes")
def test_plans_of_random_parameters_do_not_grow(run_ranks):
    for most, groups in run_ranks(grown, world=2):
        assert most == [owners.MOST_PLANS] * 4 and groups == 2


def problems_of_empty() -> list[str]:
    """Empty parameters on owners: nothing is stepped, and nothing fails."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.empty, self.last = (nn.Parameter(torch.randn(n, 4)) for n in (5, 0, 3))
            self.also_empty = nn.Parameter(torch.randn(4, 0))

        def forward(self, x: Tensor) -> Tensor:
            return sum((p * 1.5).square().sum() for p in self.parameters()) * x.sum()

    problems = []
    for layout in ("rows", "flat"):
        for batch in (32, 2**24):
            model, plain = fullshard.fully_shard(Empty(), layout=layout), Empty()
            with mock.patch.object(owners, "BATCH", batch):
                ours = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.05)
                theirs = torch.optim.Adafactor([plain.first, plain.last], lr=0.05)
                for _ in range(3):
                    for module, optimizer in ((model, ours), (plain, theirs)):
                        module(torch.ones(1)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            if ours.state[model.empty]:
                problems.append(f"{layout}: state of an empty parameter")
            ours.load_state_dict(ours.state_dict())
            pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
            problems += [
                f"{layout}, {batch}: {n}" for (n, p), other in pairs if not torch.equal(p.full_tensor(), other)
            ]
    return problems


@pytest.mark.gloo("exchanges pieces of different sizes")
def test_empty_parameters_are_not_stepped(run_ranks):
    assert run_ranks(problems_of_empty, world=2) == [[], []]
