"""What works, beyond PyTorch's or unsaid by it, and is to stay so: docs/migration.md may name it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drop_in import WRAPPERS, layers, shard, trains_as
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy, StateDictType
from ways import on_ranks, wrap

both_wrappers = pytest.mark.parametrize("originals", WRAPPERS, ids=["flat parameter", "original parameters"])


def mesh_settings(*shape: int) -> dict[str, Any]:
    """A mesh without names, and the strategy for it."""
    strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
    return {"device_mesh": init_device_mesh("cpu", shape), "sharding_strategy": strategy}


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("front_end", ["rows", "flat", True], ids=str)
@on_ranks
def test_meshes_without_dim_names(front_end: Any, shape: tuple[int, ...]) -> None:
    """PyTorch's needs names for a hybrid mesh."""
    if isinstance(front_end, bool):
        model = wrap(layers(), use_orig_params=front_end, **mesh_settings(*shape))
    else:
        model = shard(layers(), layout=front_end, mesh=init_device_mesh("cpu", shape))
    trains_as(model, layers())


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks
def test_hybrid_without_a_policy_or_groups(strategy: str) -> None:
    """Node-local groups by themselves; PyTorch's wants a policy, groups or a mesh."""
    parts = layers()
    parts[0] = wrap(parts[0], sharding_strategy=ShardingStrategy[strategy])
    trains_as(wrap(parts, sharding_strategy=ShardingStrategy[strategy]), layers())


@both_wrappers
@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=str)
@on_ranks
def test_local_state_dicts_with_a_mesh(shape: tuple[int, ...], originals: bool) -> None:
    """PyTorch's raises. Saved and loaded, values and training are as before."""
    keywords = {**mesh_settings(*shape), "use_orig_params": originals}
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
