"""What works, beyond PyTorch's or unsaid by it, and is to stay so: docs/migration.md may name it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import WRAPPERS, batch, layers, shard, trains_as
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy, StateDictType
from ways import on_ranks, wrap

both_wrappers = pytest.mark.parametrize("originals", WRAPPERS, ids=["flat parameter", "original parameters"])


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("front_end", ["rows", "flat", True], ids=str)
def test_meshes_without_dim_names(run_ranks, front_end, shape):
    """PyTorch's needs names for a hybrid mesh."""
    assert all(run_ranks(nameless, front_end, shape))


def nameless(front_end: Any, shape: tuple[int, ...]) -> bool:
    mesh = init_device_mesh("cpu", shape)
    if not isinstance(front_end, bool):
        model = shard(layers(), layout=front_end, mesh=mesh)
        return trains_as(model, layers())
    strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
    model = wrap(layers(), device_mesh=mesh, sharding_strategy=strategy, use_orig_params=front_end)
    return trains_as(model, layers())


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks
def test_hybrid_without_a_policy_or_groups(strategy: str) -> None:
    """Node-local groups by themselves; PyTorch's wants a policy, groups or a mesh."""
    parts = layers()
    parts[0] = wrap(parts[0], sharding_strategy=ShardingStrategy[strategy])
    trains_as(wrap(parts, sharding_strategy=ShardingStrategy[strategy]), layers())


@both_wrappers
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("writeback", [False, True], ids=["", "written back"])
@on_ranks
def test_gradients_in_summon_full_params(writeback: bool, offload: bool, originals: bool) -> None:
    """PyTorch's has them with original parameters and without offloading only."""
    parts, whole = layers(), layers()
    parts[2] = wrap(parts[2], use_orig_params=originals)
    model = wrap(parts, use_orig_params=originals)
    model(batch(0, dist.get_rank())).square().mean().backward()
    whole(torch.cat([batch(0, rank) for rank in range(2)])).square().mean().backward()
    summon = FullyShardedDataParallel.summon_full_params
    keywords: dict[str, Any] = {"with_grads": True, "writeback": writeback, "offload_to_cpu": offload}
    for factor in (1.0, 3.0 if writeback else 1.0):
        with summon(model, **keywords):
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad * factor)
                if factor == 1.0:
                    mine.grad.mul_(3.0)


@both_wrappers
@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=str)
@on_ranks
def test_local_state_dicts_with_a_mesh(shape: tuple[int, ...], originals: bool) -> None:
    """PyTorch's raises. Saved and loaded, values and training are as before."""
    strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
    keywords = {"device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])}
    keywords |= {"sharding_strategy": strategy, "use_orig_params": originals}
    model, reference, other = wrap(layers(), **keywords), layers(), wrap(layers(seed=1), **keywords)
    assert trains_as(model, reference)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(state)
    trains_as(other, reference)


class Images(nn.Module):
    """Two convolutions that notice how their weights lie. [batch, 4, 8, 8] -> []"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 2)
        self.to(memory_format=torch.channels_last).double()
        self.lay: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 4, 1, 1).expand(-1, 4, 8, 8))
        self.lay.append(self.first.weight.is_contiguous(memory_format=torch.channels_last))
        return self.second(x.relu()).mean((2, 3))


@pytest.mark.parametrize("front_end", ["rows", "flat", *WRAPPERS], ids=str)
@on_ranks
def test_channels_last_parameters(front_end: Any) -> None:
    """They are computed with as they lay before; PyTorch's `fully_shard` refuses them."""
    images = Images()
    if isinstance(front_end, bool):
        model = wrap(images, use_orig_params=front_end)
    else:
        model = images
        for unit in (model.first, model.second, model):
            fullshard.fully_shard(unit, layout=front_end)
        assert model.first.weight.shape == (6, 4, 3, 3)
    assert trains_as(model, Images())
    assert len(images.lay) == 3 and all(images.lay)
