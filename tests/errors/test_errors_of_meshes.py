"""Errors of meshes and process groups; rank 0 of 4, on a group that moves no data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.device_mesh import DeviceMesh

from fullshard import DataParallelMeshDims, FullyShardedDataParallel, ShardingStrategy
from raising import assert_raises, raises, unit


def mesh(*names: str) -> DeviceMesh:
    """2 by 2 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


CALLS = {
    "C136": lambda: unit(mesh=4),
    "C137": lambda: unit(mesh=init_device_mesh("cpu", (2, 2, 1))),
    "C138": lambda: unit(mesh=DeviceMesh("cpu", [1, 2, 3])),
    "C140": lambda: FullyShardedDataParallel(
        nn.Linear(4, 4), device_mesh=init_device_mesh("cpu", (4,)), device_id=torch.device("meta")
    ),
    "C148": (lambda: DataParallelMeshDims(shard="dp", replicate="dp"), "each once"),
    "C149": (lambda: unit(mesh=mesh("dp", "tp"), dp_mesh_dims=DataParallelMeshDims("data")), "'data'"),
    "C150": (
        lambda: unit(mesh=mesh("dp", "tp"), dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
        "no dim to shard on",
    ),
    "C152": lambda: unit(mesh=mesh("dp_shard", "cp")),
    "C153": lambda: unit(mesh=mesh("dp_shard", "dp_replicate")),
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(fake_world, code):
    fake_world(4)
    assert_raises(code, CALLS[code])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device of this type")
def test_a_mesh_of_devices_that_there_are_not(fake_world):
    fake_world(4)
    with raises("C141", words=["cuda", "cpu"]):
        unit(mesh=DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False))


def test_no_names_of_data_parallel_dims():
    with raises("C148", words=["each once"]):
        DataParallelMeshDims()


def test_nodes_of_unequal_size(fake_world, monkeypatch):
    def hosts(found: list[str], _: str) -> None:
        found[:] = ["node-1", "node-1", "node-2"]

    fake_world(3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", hosts)
    with raises("C147"):
        FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_a_torch_that_cannot_flatten(fake_world, monkeypatch):
    fake_world(4)
    monkeypatch.delattr(DeviceMesh, "_flatten")
    with raises("C151"):
        unit(mesh=mesh("dp", "cp"), dp_mesh_dims=DataParallelMeshDims(("dp", "cp")))


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
