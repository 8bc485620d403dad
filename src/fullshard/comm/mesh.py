"""The axes of a device mesh along which a unit is split and replicated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ConfigError


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of a mesh: a process group and this rank's place in it.

    Attributes:
        group: the process group; its ranks are in the axis' order.
        size: number of ranks.
        rank: this process's index on the axis.
        backend: name of the group's backend for the mesh's device ("gloo", "nccl", "fake").
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    backend: str
    ranks: tuple[int, ...] = field(repr=False, default=())


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """A mesh as the engine uses it.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        device: where shards and gathered buckets live.
        shard: the axis along which elements are split.
        replicate: the axis along which the split copies are repeated; None if there is none.
        global_rank: this process's rank in the default group, for events and errors.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: Axis
    replicate: Axis | None
    global_rank: int

    @property
    def world(self) -> int:
        """Ranks that each hold different data: shard times replicate."""
        return self.shard.size * (self.replicate.size if self.replicate else 1)


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: a placement, and a mesh of the parameter's own (an expert's, say).

    Attributes:
        placement: `torch.distributed.tensor.Shard`, or None for `Shard(0)`.
        mesh: 1-D (shard) or 2-D (replicate, shard), as `fully_shard`'s; None for `fully_shard`'s own. Gradients are
            averaged over the ranks of this mesh.
    """

    placement: Any = None
    mesh: DeviceMesh | None = None


def resolve_mesh(mesh: DeviceMesh | None) -> MeshAxes:
    """The axes of `mesh`, or of a 1-D mesh over all ranks if None.

    Raises:
        ConfigError: no process group is initialised and no mesh given, the mesh has other than 1 or 2 dims, or
            this process is not in it.
    """
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "fully_shard has neither a mesh nor a process group to shard over.",
                expected="torch.distributed initialised, or mesh=",
                remedy="start with torchrun and call torch.distributed.init_process_group() first, "
                "or pass mesh=init_device_mesh(...)",
            )
        mesh = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {mesh.ndim} dims.",
            expected="mesh.ndim in (1, 2)",
            got=f"shape {tuple(mesh.shape)}",
            remedy='slice the data-parallel dims out of it: mesh["dp"] or mesh["replicate", "shard"]',
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            "This process is not part of the mesh given to fully_shard.", rank=dist.get_rank(), got=str(mesh)
        )
    replicate = _axis(mesh, 0) if mesh.ndim == 2 else None
    return MeshAxes(mesh, _device(mesh.device_type), _axis(mesh, mesh.ndim - 1), replicate, dist.get_rank())


def subdivide(axes: MeshAxes, size: int) -> Axis:
    """The axis of `size` consecutive ranks of the shard axis that this rank is in; collective over the mesh.

    Raises:
        ConfigError: if `size` is not a divisor of the shard axis other than 1 and itself.
    """
    if size <= 1 or size >= axes.shard.size or axes.shard.size % size:
        raise ConfigError(
            f"reshard_after_forward={size} is not a non-trivial divisor of the shard axis.",
            expected=f"an int that divides {axes.shard.size}, other than 1 and {axes.shard.size}",
            got=size,
            remedy="use True (free the unit) or False (keep it) for the trivial cases",
        )
    # Rows of [.., size] are consecutive ranks of the shard axis, whatever the mesh's own rank order.
    grid = axes.mesh.mesh.reshape(-1, size)
    return _axis(DeviceMesh(axes.mesh.device_type, grid, mesh_dim_names=("outer", "inner")), 1)


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    group = mesh.get_group(dim)
    device_type = mesh.device_type
    backend = str(dist.get_backend(group))
    if ":" in backend:  # e.g. "cpu:gloo,cuda:nccl": one per device type
        backend = dict(pair.split(":") for pair in backend.split(",")).get(device_type, backend)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group, mesh.size(dim), mesh.get_local_rank(dim), backend, ranks)


def _default_device_type() -> str:
    """The accelerator if the default group can talk for it, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and dist.get_backend() not in ("gloo", "mpi"):
        return accelerator.type
    if accelerator is not None and accelerator.type in str(dist.get_backend()):
        return accelerator.type
    return "cpu"


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    try:
        return torch.device(device_type, torch.get_device_module(device_type).current_device())
    except (RuntimeError, AssertionError) as error:  # what torch raises where it has no such device
        raise ConfigError(
            "The mesh's device type is not available to this process.",
            expected=f"a usable {device_type} device",
            got=str(error),
            remedy='build the mesh for a device this machine has: init_device_mesh("cpu", ...)',
        ) from error
