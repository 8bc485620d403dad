"""Errors of meshes and process groups; rank 0 of 4, on a group that moves no data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.device_mesh import DeviceMesh

from fullshard import DataParallelMeshDims, FullyShardedDataParallel, ShardingStrategy, fully_shard
from raising import raises, two_layers


@pytest.fixture
def _ranks(fake_world):
    fake_world(4)


@pytest.mark.usefixtures("_ranks")
def test_something_else_than_a_mesh():
    with raises("C136"):
        fully_shard(nn.Linear(4, 4), mesh=4)


@pytest.mark.usefixtures("_ranks")
def test_a_mesh_of_three_dims():
    with raises("C137"):
        fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2, 1)))


@pytest.mark.usefixtures("_ranks")
def test_a_mesh_of_other_ranks():
    with raises("C138"):
        fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [1, 2, 3]))


@pytest.mark.usefixtures("_ranks")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device of this type")
def test_a_mesh_of_devices_that_there_are_not():
    with raises("C141"):
        fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False))


@pytest.mark.usefixtures("_ranks")
def test_a_device_of_another_type_than_the_meshs():
    with raises("C140"):
        FullyShardedDataParallel(
            nn.Linear(4, 4), device_mesh=init_device_mesh("cpu", (4,)), device_id=torch.device("meta")
        )


def test_no_names_of_data_parallel_dims():
    with raises("C148"):
        DataParallelMeshDims()


@pytest.mark.usefixtures("_ranks")
def test_a_dim_that_the_mesh_does_not_have():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with raises("C149"):
        fully_shard(two_layers(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("data"))


@pytest.mark.usefixtures("_ranks")
def test_replicas_and_nothing_to_shard_on():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with raises("C150"):
        fully_shard(two_layers(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))


@pytest.mark.usefixtures("_ranks")
def test_two_dims_to_shard_over():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    with raises("C152"):
        fully_shard(two_layers(), mesh=mesh)


@pytest.mark.usefixtures("_ranks")
def test_replicas_in_the_second_dim():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with raises("C153"):
        fully_shard(two_layers(), mesh=mesh)


def test_nodes_of_unequal_size(fake_world, monkeypatch):
    def hosts(found: list[str], _: str) -> None:
        found[:] = ["node-1", "node-1", "node-2"]

    fake_world(3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", hosts)
    with raises("C147"):
        FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.usefixtures("_ranks")
def test_a_torch_that_cannot_flatten(monkeypatch):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    monkeypatch.delattr(DeviceMesh, "_flatten")
    with raises("C151"):
        fully_shard(two_layers(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(("dp", "cp")))


def wraps_with_groups_that_do_not_cross() -> None:
    everyone = dist.new_group()
    with raises("C430"):
        FullyShardedDataParallel(
            nn.Linear(4, 4),
            process_group=(everyone, everyone),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )


def test_groups_that_share_more_than_a_rank(run_ranks):
    run_ranks(wraps_with_groups_that_do_not_cross)
