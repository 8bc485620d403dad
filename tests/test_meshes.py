"""Parameters with a mesh of their own (experts), and units of several modules or of modules without a forward."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard import ShardPlacementResult, fully_shard
from training import LAYOUTS

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Experts(nn.Module):
    """A shared layer, and an expert that each pair of ranks has for itself."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 6)
        torch.manual_seed(100 + expert)
        self.expert = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.shared(x)))


def batch(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@both_layouts
@pytest.mark.parametrize("policy", ["default", "bf16"])
def test_experts_on_a_mesh_of_their_own(run_ranks, layout, policy):
    assert all(run_ranks(with_experts, layout, policy, world=4))


def with_experts(layout: str, policy: str) -> bool:
    """Shared parameters are averaged over all four ranks, each expert over the two that have it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    rank = dist.get_rank()
    expert = mesh.get_local_rank("ep")
    model = Experts(expert)
    own = {id(p) for p in model.expert.parameters()}

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(mesh=mesh["edp"]) if id(parameter) in own else None

    low = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if policy == "bf16" else None)
    fully_shard(model, shard_placement_fn=place, layout=layout, mp_policy=low)
    assert [len(b.members) for b in model._runner().unit.buckets] == [2, 2]
    with fullshard.record_events() as events:
        model(batch(rank)).float().square().mean().backward()
    assert Counter(e.verb for e in events)["gather"] == 1  # one unit, two collectives within
    if policy == "default":
        wholes = [Experts(e) for e in range(2)]
        for other in range(4):
            wholes[other // 2](batch(other)).square().mean().backward()
        for name, p in model.expert.named_parameters():
            want = wholes[expert].expert.get_parameter(name).grad / 2
            torch.testing.assert_close(p.grad.full_tensor(), want)
        for name, p in model.shared.named_parameters():
            want = sum(w.shared.get_parameter(name).grad for w in wholes) / 4
            torch.testing.assert_close(p.grad.full_tensor(), want)
        norm = fullshard.clip_grad_norm_(model.parameters(), 1e9)
        grads = [p.grad.full_tensor() for p in model.parameters()]
        torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.shared.weight.full_tensor()
    optimizer.step()
    assert not torch.equal(before, model.shared.weight.full_tensor())
    torch.testing.assert_close(model.expert.weight.full_tensor().shape, torch.Size([5, 6]))
    return True


def test_another_dim_on_another_mesh(run_ranks):
    assert all(run_ranks(other_dim, world=4))


def other_dim() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Experts(0)
    places = {id(model.shared.weight): Shard(1), id(model.expert.weight): ShardPlacementResult(Shard(1), mesh["b"])}
    fully_shard(model, shard_placement_fn=lambda p: places.get(id(p)))
    assert model.shared.weight.to_local().shape == (6, 1)
    assert model.expert.weight.to_local().shape == (5, 3)
    assert model.expert.weight.placements == (Shard(1),)
    whole = Experts(0)
    for name, p in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), p)
    x = batch(0)
    torch.testing.assert_close(model(x), whole(x))
    return True


@pytest.mark.parametrize("returned", ["Shard(0)", ShardPlacementResult("rows"), ShardPlacementResult(Shard(0), mesh=3)])
def test_what_shard_placement_fn_may_not_return(fake_world, returned):
    fake_world(2)
    model = nn.Linear(4, 4)
    with pytest.raises(fullshard.ConfigError):
        fully_shard(model, shard_placement_fn=lambda p: returned)
    model(torch.ones(1, 4))


# Units of several modules, and units where there is no forward.


class Registry(nn.Module):
    """Blocks in a ModuleDict and a ModuleList; one of them is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        self.listed = nn.ModuleList([nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 3)])])

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[1][0](self.listed[0](self.named["a"](x)))


@both_layouts
def test_units_in_containers_and_one_never_called(run_ranks, layout):
    assert all(run_ranks(contained, layout))


def contained(layout: str) -> bool:
    model, whole = Registry(), Registry()
    for unit in (*model.named.values(), model.listed[0], model.listed[1][0], model):
        fully_shard(unit, layout=layout)
    for _ in range(2):
        for m in (model, whole):
            m.zero_grad()
            m(torch.ones(2, 4)).square().sum().backward()
        for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            if "unused" in name:
                assert mine.grad is None
            else:
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    return True


@both_layouts
def test_reshard_to_two_of_four_gathers_less_in_backward(run_ranks, layout):
    """The second gather is among two ranks: by the bytes that each collective moves."""
    for forward, backward, held in run_ranks(gathers_of_a_step, layout, world=4):
        assert forward == {4} and backward == {2}
        assert held > 0


def gathers_of_a_step(layout: str) -> tuple[set[int], set[int], int]:
    torch.manual_seed(0)
    recording = fullshard.RecordingComm(fullshard.TorchComm())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, reshard_after_forward=2, layout=layout, comm=recording)
    fully_shard(model, reshard_after_forward=2, layout=layout, comm=recording)
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
    recording.calls.clear()
    loss = model(torch.ones(1, 8)).sum()
    forward = {call.world for call in recording.calls if call.verb == "gather"}
    held = fullshard.memory_use(model).gathered
    recording.calls.clear()
    loss.backward()
    return forward, {call.world for call in recording.calls if call.verb == "gather"}, held


# Meshes of the same ranks are equal for torch, whatever their groups: it mixes them up in what it remembers.


def test_what_users_hold_is_on_the_mesh_of_its_unit(fake_world):
    fake_world(2)
    for mesh in (DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"), init_device_mesh("cpu", (2,))):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        weight, saved = model.weight, model.state_dict()["weight"]
        state = optimizer.state[weight]["exp_avg"]
        for held in (weight, weight.data, weight.detach(), weight.grad, weight.t(), weight * 2, saved, state):
            assert held.device_mesh is mesh
        assert copy.deepcopy(model).weight.device_mesh is mesh


def test_a_process_group_that_was_made_again_is_the_one_that_is_asked(fake_world):
    for group in ("of its own", "the default one"):
        fake_world(2)
        own = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") if group == "of its own" else None
        model = fully_shard(nn.Linear(4, 4), mesh=own)
        wholes = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert wholes["weight"].shape == (4, 4)
        dist.destroy_process_group()


def experts_on_meshes_of_different_sizes() -> bool:
    """The expert of rank 2 is on a mesh of its own: it has one axis with other ranks where ranks 0 and 1 have two."""
    rank = dist.get_rank()
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    fully_shard(model[1], mesh=DeviceMesh.from_group(pair if rank < 2 else single, "cpu"))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return True


def test_experts_on_meshes_of_different_sizes(run_ranks):
    assert all(run_ranks(experts_on_meshes_of_different_sizes, world=3))
