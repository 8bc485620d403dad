"""Errors of meshes and process groups; rank 0 of 4, on a group that moves no data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.device_mesh import DeviceMesh

from fullshard import DataParallelMeshDims, FullyShardedDataParallel, ShardingStrategy
from raising import assert_raises, raises, unit, words_of


def mesh(*names: str) -> DeviceMesh:
    """2 by 2 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


CALLS = [
    (lambda: unit(mesh=4), "ConfigError: mesh must be a torch.distributed DeviceMesh, got int"),
    (lambda: unit(mesh=init_device_mesh("cpu", (2, 2, 1))), "ConfigError: fully_shard takes a 1-D mesh (shard) or a"),
    (lambda: unit(mesh=DeviceMesh("cpu", [1, 2, 3])), "ConfigError: This process is not part of the mesh passed to"),
    (
        lambda: FullyShardedDataParallel(
            nn.Linear(4, 4), device_mesh=init_device_mesh("cpu", (4,)), device_id=torch.device("meta")
        ),
        "ConfigError: The device to compute on does not have the mesh's device",
    ),
    (
        lambda: DataParallelMeshDims(shard="dp", replicate="dp"),
        "ConfigError: DataParallelMeshDims requires the names of data-parallel ... without repetition",
    ),
    (
        lambda: unit(mesh=mesh("dp", "tp"), dp_mesh_dims=DataParallelMeshDims("data")),
        "ConfigError: dp_mesh_dims names a dim that the mesh does not have ... 'data'",
    ),
    (
        lambda: unit(mesh=mesh("dp", "tp"), dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
        "ConfigError: dp_mesh_dims names replicas but no dim to shard on.",
    ),
    (lambda: unit(mesh=mesh("dp_shard", "cp")), "ConfigError: Both dims of the mesh are named as dims to shard over"),
    (lambda: unit(mesh=mesh("dp_shard", "dp_replicate")), "ConfigError: The second dim of the mesh is named"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(fake_world, row):
    fake_world(4)
    assert_raises(row)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device of this type")
def test_a_mesh_of_devices_that_there_are_not(fake_world):
    fake_world(4)
    with raises("ConfigError: The mesh's device ... cuda ... cpu"):
        unit(mesh=DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False))


def test_no_names_of_data_parallel_dims():
    with raises("ConfigError: DataParallelMeshDims requires the names of data-parallel ... without repetition"):
        DataParallelMeshDims()


def test_nodes_of_unequal_size(fake_world, monkeypatch):
    def hosts(found: list[str], _: str) -> None:
        found[:] = ["node-1", "node-1", "node-2"]

    fake_world(3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", hosts)
    with raises("ConfigError: Node-local groups need the same number of ranks"):
        FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def wraps_with_groups_that_do_not_cross() -> None:
    everyone = dist.new_group()
    with raises("ConfigError: The groups of process_group=(shard_group ... a replicate group"):
        FullyShardedDataParallel(
            nn.Linear(4, 4),
            process_group=(everyone, everyone),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )


def test_groups_that_share_more_than_a_rank(run_ranks):
    run_ranks(wraps_with_groups_that_do_not_cross)
