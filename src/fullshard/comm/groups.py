"""Axes from process groups, for the wrapper front-end: a group, a pair of groups, or node-local ones."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ConfigError
from .mesh import Axis, MeshAxes, resolve_mesh

_cached: dict[Any, tuple[Any, MeshAxes]] = {}
"""By ids of the groups: the groups themselves (so that ids stay theirs) and the axes."""


def axes_of_groups(groups: Any, hybrid: bool, device: torch.device | None = None) -> MeshAxes:
    """The axes for `process_group=`: one group to shard over; for hybrid strategies a pair (shard, replicate).

    Args:
        groups: None (all ranks; hybrid: shard inside a node, replicate over nodes), a process group, or a pair.
        hybrid: whether the strategy shards and replicates.
        device: where to compute; None: the accelerator if the group can talk for it, else the CPU.

    Raises:
        ConfigError: no process group is initialised, or `groups` does not fit the strategy.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "FullyShardedDataParallel has no process group to shard over.",
            remedy="start with torchrun and call torch.distributed.init_process_group() first",
        )
    pair = isinstance(groups, (tuple, list))
    if hybrid and groups is not None and not pair:
        raise ConfigError(
            "A hybrid strategy shards over one group and replicates over another.",
            expected="process_group=(shard_group, replicate_group), device_mesh=2-D, or neither",
            got=repr(groups),
        )
    if not hybrid and pair:
        raise ConfigError("process_group is a pair only for hybrid strategies; give one group")
    given = groups if pair else [] if groups is None else [groups]
    if not all(isinstance(group, dist.ProcessGroup) for group in given) or (pair and len(given) != 2):
        raise ConfigError(
            "process_group must be a process group, or two of them for hybrid strategies.",
            got=repr(groups),
            remedy="make groups with torch.distributed.new_group(ranks), on every rank",
        )
    kind = device.type if device is not None else device_type_of(groups[0] if pair else groups)
    key = (id(dist.group.WORLD), tuple(map(id, groups)) if pair else id(groups), hybrid, kind)
    if key not in _cached:
        if len(_cached) > 64:
            _cached.clear()
        if hybrid:
            mesh = _pair_mesh(groups, kind) if pair else _node_mesh(kind)
        elif groups is None or groups is dist.group.WORLD:
            mesh = init_device_mesh(kind, (dist.get_world_size(),))
        else:
            mesh = DeviceMesh.from_group(groups, kind)
        _cached[key] = ((dist.group.WORLD, groups), resolve_mesh(mesh))
    return _cached[key][1]


def device_type_of(group: Any) -> str:
    """The device type that `group` serves: the accelerator's if there is one and it can, else "cpu"."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        backend = str(dist.get_backend(group))
        if accelerator is not None and (backend not in ("gloo", "mpi") or accelerator.type in backend):
            return accelerator.type
    return "cpu"


def reduce_value(value: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce a small tensor in place, by way of the device that `group` serves if it lies elsewhere (offloaded)."""
    kind = device_type_of(group)
    if value.device.type == kind:
        dist.all_reduce(value, op=op, group=group)
    else:
        moved = value.to(kind)
        dist.all_reduce(moved, op=op, group=group)
        value.copy_(moved)
    return value


def unsharded_axes(axes: MeshAxes) -> MeshAxes:
    """The same ranks with nothing split: one rank on the shard axis, all of them on the replicate axis."""
    if axes.replicate is not None:
        raise ConfigError("NO_SHARD takes one process group or a 1-D device_mesh")
    own = axes.shard
    alone = Axis(own.group, 1, 0, own.backend, (axes.global_rank,))
    return MeshAxes(axes.mesh, axes.device, alone, own if own.size > 1 else None, axes.global_rank)


def _pair_mesh(groups: Any, kind: str) -> DeviceMesh:
    shard, replicate = groups
    mine = dist.get_process_group_ranks(shard)
    rows: list[Any] = [None] * dist.get_world_size(replicate)
    dist.all_gather_object(rows, mine, group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], kind, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )


def _node_mesh(kind: str) -> DeviceMesh:
    """Shard over the ranks of a node, replicate over nodes. Ranks on one node are those of one host name."""
    world = dist.get_world_size()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = {host: [rank for rank in range(world) if hosts[rank] == host] for host in hosts}
    sizes = {host: len(ranks) for host, ranks in nodes.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "Nodes do not hold the same number of ranks, so node-local groups cannot be made.",
            expected="equal numbers",
            got=", ".join(f"{size} on {host}" for host, size in sizes.items()),
            remedy="give process_group=(shard_group, replicate_group) or a 2-D device_mesh",
        )
    return DeviceMesh(kind, list(nodes.values()), mesh_dim_names=("replicate", "shard"))
