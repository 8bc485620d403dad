"""`describe(model, optimizer=)`: the owners that it names are those that hold state; PowerSGD is named, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import comm_hooks

SHAPE = (2, 2)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)) for _ in range(3)])
    for block in model:
        fullshard.fully_shard(block, mesh=mesh)
    return fullshard.fully_shard(model, mesh=mesh)


def owned_and_described() -> tuple[list[str], str]:
    """Names of the parameters whose state is on this rank after a step; the description."""
    model = sharded()
    optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    owned = [name for name, parameter in model.named_parameters() if optimizer.state.get(parameter)]
    return owned, fullshard.describe(model, optimizer=optimizer)


@pytest.mark.gloo("exchanges pieces of different sizes")
def test_owners_are_the_ranks_that_hold_state(run_ranks):
    found = run_ranks(owned_and_described, world=4)
    names = sorted(name for owned, _ in found for name in owned)
    assert names == sorted(
        name
        for name, _ in nn.Sequential(
            *[nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)) for _ in range(3)]
        ).named_parameters()
    )
    for _, described in found:
        assert "OwnerOptimizer (AdamW): 12 whole parameters on owners among 4 ranks (2 replicas x 2)" in described
        for rank, (owned, _) in enumerate(found):
            (line,) = [line for line in described.splitlines() if line.startswith(f"  rank {rank}: ")]
            shown = line.rpartition(": ")[2].partition(" and ")[0].split(", ")
            assert shown and set(shown) <= set(owned), (line, owned)
            assert ("and" in line) == (len(owned) > 3)


def test_others_and_many_owners(fake_world):
    fake_world(4)
    model = sharded()
    state = comm_hooks.PowerSGDState(None, 3)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False))
    optimizers: list[Any] = [fullshard.Muon(matrices), torch.optim.SGD(others)]
    said = fullshard.describe(model, optimizer=optimizers)
    assert "mean over 4, between replicas by PowerSGD of rank 3 with error feedback" in said
    assert "multiplications are balanced, the largest load is 1.33 times the mean" in said
    assert said.endswith("SGD: each rank steps its shards")
    by_name = dict(enumerate(optimizers))
    assert fullshard.describe(model, optimizer=by_name.values()) == said
    assert fullshard.memory_use(model, by_name.values()) == fullshard.memory_use(model, optimizers)
    model = sharded()
    elements = fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW, elementwise=True)
    assert "elements on this rank, the replicas step" in fullshard.describe(model, optimizer=elements)


def test_of_many_owners_the_most_and_the_least_loaded(fake_world):
    fake_world(16)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    fullshard.fully_shard(model)
    said = fullshard.describe(model, optimizer=fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW))
    assert "and 8 ranks between these" in said and said.count("  rank ") == 8
