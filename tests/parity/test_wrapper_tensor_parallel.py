"""The wrapper around tensor-parallel parameters: 2 x 2 ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import state_dict as helpers
from ways import on_ranks
from wrapped import wrap

both = pytest.mark.parametrize("originals", [True, False])


class Even(nn.Module):
    """A block whose hidden width two tensor-parallel ranks share evenly; its rows do not divide by two once more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def even_blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Even(), Even(), nn.Linear(6, 3))


def tensor_parallel_of(originals: bool, with_mesh: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = even_blocks()
    for block in model[:2]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    given = {"device_mesh": mesh["data"]} if with_mesh else {"process_group": mesh["data"].get_group()}
    return wrap(fullshard, model, use_orig_params=originals, auto_wrap_policy={Even}, **given)


@on_ranks(world=4)
def test_tensor_parallel_parameters(tmp_path: Path) -> list[str]:
    wrapper = fullshard.FullyShardedDataParallel
    model, plain, problems = tensor_parallel_of(False).double(), even_blocks().double(), []
    adamw = [torch.optim.AdamW(one.parameters(), lr=0.02) for one in (model, plain)]
    data = dist.get_rank() // 2

    def step(one, optimizer, x, clip):
        loss = one(x).square().mean()
        loss.backward()
        norm = clip(0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    def steps(start, count, one=model, optimizer=adamw[0]):
        for number in range(start, start + count):
            random = torch.Generator().manual_seed(number)
            batches = [torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(2)]
            want = step(plain, adamw[1], torch.cat(batches), lambda m: nn.utils.clip_grad_norm_(plain.parameters(), m))
            loss, norm = step(one, optimizer, batches[data], one.clip_grad_norm_)
            both_losses = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(both_losses)
            got = (both_losses.item() / 4, norm)
            for mine, theirs in zip(got, want, strict=True):
                assert abs(mine - theirs) <= 1e-10 * abs(theirs), f"step {number}: {mine}, wanted {theirs}"

    def same(what, values):
        for name, parameter in plain.named_parameters():
            value = values[name]
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert whole.shape == parameter.shape and torch.allclose(whole, parameter, rtol=1e-10, atol=1e-12), what

    steps(0, 2)
    state = model.state_dict()
    same("FULL", state)
    problems.extend(name for name, value in state.items() if isinstance(value, DTensor))
    with wrapper.summon_full_params(model):
        same("summoned", dict(model.named_parameters()))
        assert isinstance(model.module[0].module.up.weight, DTensor), "not shown as the DTensor it was"
        with torch.no_grad():
            model.module[0].module.up.weight.mul_(2)
            plain[0].up.weight.mul_(2)
    steps(2, 1)
    with wrapper.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        same("SHARDED", sharded)
        saved = {"model": sharded, "optim": wrapper.optim_state_dict(model, adamw[0])}
        dcp.save(saved, checkpoint_id=str(tmp_path / "checkpoint"))
        again = tensor_parallel_of(True).double()
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.02)
        loaded = helpers.get_state_dict(again, optimizer)
        into = {"model": loaded[0], "optim": loaded[1]}
        dcp.load(into, checkpoint_id=str(tmp_path / "checkpoint"))
        helpers.set_state_dict(again, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    steps(3, 2, again, optimizer)
    full = wrapper.optim_state_dict(again, optimizer)
    for name, parameter in plain.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(full["state"][name][key], adamw[1].state[parameter][key], rtol=1e-9, atol=1e-14), name
    third = tensor_parallel_of(False).double()
    third.load_state_dict(again.state_dict())
    optimizer = torch.optim.AdamW(third.parameters(), lr=0.02)
    optimizer.load_state_dict(wrapper.optim_state_dict_to_load(third, optimizer, full))
    steps(5, 2, third, optimizer)
    return problems


@on_ranks(world=4)
def test_tensor_parallel_parameters_over_a_process_group() -> None:
    """Without a mesh of both kinds there are whole state dicts, and sharded ones are refused with the remedy."""
    model = tensor_parallel_of(True, with_mesh=False)
    model(torch.ones(2, 6)).sum().backward()
    assert all(not isinstance(value, DTensor) for value in model.state_dict().values())
    fullshard.FullyShardedDataParallel.set_state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(fullshard.CheckpointError, match="device_mesh"):
        model.state_dict()


@on_ranks(world=4)
def test_sharded_state_over_a_part_of_the_ranks() -> None:
    """SHARDED state dicts name global ranks: here those of a group of every other one."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[dist.get_rank() % 2]
    models = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        models.append(wrap(fullshard, nn.Linear(5, 3), process_group=mine, use_orig_params=False))
        FSDP.set_state_dict_type(models[-1], fullshard.StateDictType.SHARDED_STATE_DICT)
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        FSDP.set_state_dict_type(model, fullshard.StateDictType.FULL_STATE_DICT)
    want, got = (model.state_dict() for model in models)
    assert all(torch.equal(want[name], got[name]) for name in want)
