"""What meshes and process groups say to users, in the order of the code: the wording of errors and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, message

# axes.py


def not_a_mesh(kind: str) -> ConfigError:
    """The error for a mesh of another type."""
    return ConfigError(
        f"mesh must be a torch.distributed DeviceMesh, got {kind}",
        remedy='leave mesh= out for all ranks, or give init_device_mesh("cpu", (dist.get_world_size(),)), or of a '
        'group DeviceMesh.from_group(group, "cpu"); "cuda" in place of "cpu" on GPUs',
    )


def other_dims(shape: Sequence[int], dims: int) -> ConfigError:
    """The error for a mesh of neither one nor two dims."""
    return ConfigError(
        f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {dims} dims.",
        expected="mesh.ndim in (1, 2)",
        got=f"shape {shape}",
        remedy='slice the data-parallel dims out of it: mesh["dp"] or mesh["replicate", "shard"]',
        topic="mesh-dims",
    )


def outside_the_mesh(rank: int, mesh: str) -> ConfigError:
    """The error for a process that is not part of the mesh."""
    return ConfigError("This process is not part of the mesh given to fully_shard.", rank=rank, got=mesh)


def no_smaller_groups(size: int, ranks: int, fitting: Sequence[str]) -> ConfigError:
    """The error for an int in `reshard_after_forward` that does not divide the ranks."""
    return ConfigError(
        f"reshard_after_forward={size} does not cut {ranks} ranks into smaller groups of equal size.",
        expected=f"one of {', '.join(fitting)}" if fitting else "True or False: this number has no other divisor",
        got=size,
        remedy="give one of these (an int is the size of the groups in which parameters stay split from forward to "
        "backward), or True (free what was gathered after forward), or False (keep it until backward)",
    )


def other_device_type(expected: str, device: Any) -> ConfigError:
    """The error for a device that is not of the mesh's type."""
    return ConfigError("The device to compute on is not of the mesh's device type.", expected=expected, got=str(device))


def device_not_available(device_type: str, error: Exception) -> ConfigError:
    """The error for a mesh on a device that this process does not have."""
    return ConfigError(
        "The mesh's device type is not available to this process.",
        expected=f"a usable {device_type} device",
        got=str(error),
        remedy='build the mesh for a device this machine has: init_device_mesh("cpu", ...)',
    )


def needs_two_groups(groups: Any) -> ConfigError:
    """The error for one group for a hybrid strategy."""
    return ConfigError(
        "A hybrid strategy shards over one group and replicates over another.",
        expected="process_group=(shard_group, replicate_group), device_mesh=2-D, or neither",
        got=repr(groups),
    )


def takes_one_group() -> ConfigError:
    """The error for two groups for a strategy that is not hybrid."""
    return ConfigError("process_group is a pair only for hybrid strategies; give one group")


def not_groups(groups: Any) -> ConfigError:
    """The error for something that is no process group."""
    return ConfigError(
        "process_group must be a process group, or two of them for hybrid strategies.",
        got=repr(groups),
        remedy="make groups with torch.distributed.new_group(ranks), on every rank",
    )


def groups_do_not_cross(rank: int, shard_groups: Sequence[Any], replicas: Sequence[int]) -> ConfigError:
    """The error for a pair of groups that have more than one rank in common."""
    return ConfigError(
        "The groups of process_group=(shard_group, replicate_group) do not cross in one rank.",
        rank=rank,
        expected="a replicate group that holds one rank of each shard group",
        got=f"shard groups {', '.join(map(str, shard_groups))} of ranks {replicas}",
        remedy="make both from one 2-D mesh: init_device_mesh(device_type, (replicas, ranks_per_replica)), or give "
        "that as device_mesh",
    )


def unequal_nodes(sizes: Mapping[str, int]) -> ConfigError:
    """The error for nodes that hold different numbers of ranks."""
    return ConfigError(
        "Nodes do not hold the same number of ranks, so node-local groups cannot be made.",
        expected="equal numbers",
        got=", ".join(f"{size} on {host}" for host, size in sizes.items()),
        remedy="give process_group=(shard_group, replicate_group) or a 2-D device_mesh",
    )


def alone() -> str:
    """The warning for a model that is sharded over one process, as nobody started more."""
    return message(
        "The model is sharded over this process alone: torch.distributed is not initialised, and torchrun did not "
        "start the program.",
        remedy="nothing is to be done in a notebook or on one device; to train on several, start the program with "
        "torchrun --nproc-per-node=N, or call torch.distributed.init_process_group() first",
    )


# data_parallel.py


def unnamed_dims(shard: Any, replicate: Any) -> ConfigError:
    """The error for dims that are not named, each once."""
    return ConfigError(
        "DataParallelMeshDims needs the names of data-parallel mesh dims, each once.",
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
    """The error for replicas alone."""
    return ConfigError(
        "dp_mesh_dims gives replicas and nothing to shard on.",
        expected="shard=, the name of at least one dim",
        got=f"replicate={replicate!r} alone",
        remedy="use DistributedDataParallel, or name one of these dims in shard=",
        topic="mesh-dims",
    )


def cannot_flatten(names: Sequence[str]) -> ConfigError:
    """The error for a torch that does not flatten dims."""
    return ConfigError(
        f"this version of torch cannot flatten mesh dims {names}: make the mesh with one dim in their place"
    )


# names.py


def two_shard_dims(first: str, second: str, got: str) -> ConfigError:
    """The error for a mesh of two dims that are both named as dims to shard over."""
    return ConfigError(
        "Both dims of the mesh are named as dims to shard over, but a 2-D mesh is read as (replicate, shard): "
        f"parameters would be repeated along {first!r}.",
        expected="a 1-D mesh, or a first dim of replicas",
        got=got,
        remedy=f"to shard over both, make a 1-D mesh of all these ranks, or give fully_shard dp_mesh_dims="
        f"DataParallelMeshDims(shard=({first!r}, {second!r})), which flattens them; to shard over one, give "
        f"mesh[{first!r}] or mesh[{second!r}]; if {first!r} is meant to be replicas, name it so",
        topic="mesh-dims",
    )


def replicas_second(second: str, got: str) -> ConfigError:
    """The error for a mesh whose second dim is named as that of replicas."""
    return ConfigError(
        f"The second dim of the mesh is named {second!r}, but a 2-D mesh is read as (replicate, shard): "
        "parameters would be split along it.",
        expected="the dim of replicas first",
        got=got,
        remedy="make the mesh with the replicate dim first, as init_device_mesh(device, (replicas, shards), "
        'mesh_dim_names=("replicate", "shard"))',
        topic="mesh-dims",
    )
