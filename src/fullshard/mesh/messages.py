"""The wording of this package's errors and warnings, in the order of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, message

# axes.py


def not_a_mesh(kind: str) -> ConfigError:
    """The error for a mesh of the wrong type."""
    return ConfigError(
        f"mesh must be a torch.distributed DeviceMesh, got {kind}",
        remedy='omit mesh= for all ranks, or pass init_device_mesh("cpu", (dist.get_world_size(),)), or for a '
        'group DeviceMesh.from_group(group, "cpu"); on GPUs with "cuda" instead of "cpu"',
    )


def other_dims(shape: Sequence[int], dims: int) -> ConfigError:
    """The error for a mesh that does not have one or two dims."""
    return ConfigError(
        f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {dims} dims.",
        expected="mesh.ndim in (1, 2)",
        got=f"shape {shape}",
        remedy='slice the data-parallel dims out of it: mesh["dp"] or mesh["replicate", "shard"]',
        topic="mesh-dims",
    )


def outside_the_mesh(rank: int, mesh: str) -> ConfigError:
    """The error for a process that is not part of the mesh."""
    return ConfigError("This process is not part of the mesh passed to fully_shard.", rank=rank, got=mesh)


def no_smaller_groups(size: int, ranks: int, fitting: Sequence[str]) -> ConfigError:
    """The error for an int in `reshard_after_forward` that does not divide the number of ranks."""
    return ConfigError(
        f"reshard_after_forward={size} does not divide {ranks} ranks into smaller groups of equal size.",
        expected=f"one of {', '.join(fitting)}" if fitting else "True or False: this number has no other divisor",
        got=size,
        remedy="pass a divisor (the size of the groups over which parameters stay split from forward to backward), "
        "True (free full parameters after forward), or False (keep them until backward)",
    )


def other_device_type(expected: str, device: Any) -> ConfigError:
    """The error for a device that does not have the mesh's type."""
    return ConfigError(
        "The device to compute on does not have the mesh's device type.", expected=expected, got=str(device)
    )


def device_not_available(device_type: str, error: Exception) -> ConfigError:
    """The error for a mesh on a device that this process does not have."""
    return ConfigError(
        "The mesh's device type is not available to this process.",
        expected=f"a usable {device_type} device",
        got=str(error),
        remedy='build the mesh for a device that this machine has: init_device_mesh("cpu", ...)',
    )


def invalid_groups(groups: Any, hybrid: bool) -> ConfigError:
    """The error for a `process_group` that the strategy cannot use."""
    return ConfigError(
        "process_group has an invalid value for this sharding strategy.",
        expected="process_group=(shard_group, replicate_group), device_mesh=2-D, or neither"
        if hybrid
        else "a process group, or None for all ranks; a pair of groups only with a hybrid strategy",
        got=repr(groups),
        remedy="make groups with torch.distributed.new_group(ranks), on every rank",
    )


def groups_do_not_cross(rank: int, shard_groups: Sequence[Any], replicas: Sequence[int]) -> ConfigError:
    """The error for a pair of groups that have more than one rank in common."""
    return ConfigError(
        "The groups of process_group=(shard_group, replicate_group) must have exactly one rank in common.",
        rank=rank,
        expected="a replicate group that contains exactly one rank of each shard group",
        got=f"shard groups {', '.join(map(str, shard_groups))} of ranks {replicas}",
        remedy="take both from a 2-D mesh, init_device_mesh(device_type, (replicas, ranks_per_replica)), or pass this "
        "mesh as device_mesh",
    )


def unequal_nodes(sizes: Mapping[str, int]) -> ConfigError:
    """The error for nodes with different numbers of ranks."""
    return ConfigError(
        "Node-local groups need the same number of ranks on every node.",
        expected="equal numbers",
        got=", ".join(f"{size} on {host}" for host, size in sizes.items()),
        remedy="pass process_group=(shard_group, replicate_group) or a 2-D device_mesh",
    )


def alone() -> str:
    """The warning for a model that is sharded over a single process because no launcher started more."""
    return message(
        "The model is sharded over this process alone: torch.distributed is not initialized, and torchrun did not "
        "start the program.",
        remedy="ignore this in a notebook or on a single device; to train on several devices, start the program with "
        "torchrun --nproc-per-node=N, or call torch.distributed.init_process_group() first",
    )


# data_parallel.py


def unnamed_dims(shard: Any, replicate: Any) -> ConfigError:
    """The error for dims without names, or with a name that occurs twice."""
    return ConfigError(
        "DataParallelMeshDims requires the names of data-parallel mesh dims, without repetition.",
        expected='DataParallelMeshDims(shard="dp") or (shard=("dp", "cp"), replicate="pods")',
        got=f"shard={shard!r}, replicate={replicate!r}",
    )


def unknown_dims(names: Sequence[str], unknown: Sequence[str]) -> ConfigError:
    """The error for dims that the mesh does not have."""
    return ConfigError(
        "dp_mesh_dims names a dim that the mesh does not have.",
        expected=f"names among {names}",
        got=", ".join(map(repr, unknown)),
        topic="mesh-dims",
    )


def nothing_to_shard_on(replicate: Any) -> ConfigError:
    """The error for replicas without a dim to shard on."""
    return ConfigError(
        "dp_mesh_dims names replicas but no dim to shard on.",
        expected="shard=, the name of at least one dim",
        got=f"replicate={replicate!r} alone",
        remedy="use DistributedDataParallel, or name one of these dims in shard=",
        topic="mesh-dims",
    )


# dim_names.py


def two_shard_dims(first: str, second: str, got: str) -> ConfigError:
    """The error for a mesh of two dims that are both named as dims to shard over."""
    return ConfigError(
        "Both dims of the mesh are named as dims to shard over, but a 2-D mesh is read as (replicate, shard): "
        f"parameters would be repeated along {first!r}.",
        expected="a 1-D mesh, or a first dim of replicas",
        got=got,
        remedy=f"to shard over both, make a 1-D mesh of all these ranks, or pass fully_shard dp_mesh_dims="
        f"DataParallelMeshDims(shard=({first!r}, {second!r})), which flattens them; to shard over one, pass "
        f"mesh[{first!r}] or mesh[{second!r}]; if {first!r} is meant for replicas, rename it accordingly",
        topic="mesh-dims",
    )


def replicas_second(second: str, got: str) -> ConfigError:
    """The error for a mesh whose second dim is named as the dim of replicas."""
    return ConfigError(
        f"The second dim of the mesh is named {second!r}, but a 2-D mesh is read as (replicate, shard): "
        "parameters would be split along it.",
        expected="the dim of replicas first",
        got=got,
        remedy="make the mesh with the replicate dim first, as init_device_mesh(device, (replicas, shards), "
        'mesh_dim_names=("replicate", "shard"))',
        topic="mesh-dims",
    )
