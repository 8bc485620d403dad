"""Meshes and process groups: the axes along which a unit is split and replicated."""

from __future__ import annotations

import functools
import socket
import warnings
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_backend_config

from ..torch_private.mesh_without_group import AbsentGroup
from .lines import Lines, close_lines, lines_of, open_joint_lines, open_lines
from .messages import (
    alone,
    device_not_available,
    groups_do_not_cross,
    invalid_groups,
    no_smaller_groups,
    not_a_mesh,
    other_device_type,
    other_dims,
    outside_the_mesh,
    unequal_nodes,
)


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis of a mesh: a process group and this rank's place in it.

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

    @property
    def lines(self) -> Lines:
        """The groups that carry the engine's collectives over the axis.

        Cached once they are the engine's own: a different axis of the same ranks may open them later.
        """
        lines: Lines | None = self.__dict__.get("_lines")
        if lines is None:
            lines = lines_of(self.group)
            if lines.is_open:
                self.__dict__["_lines"] = lines
        return lines

    @property
    def aside(self) -> Axis:
        """The same ranks over separate connections, if the engine has opened any: for comparisons.

        These are on the host, whatever the mesh's device: if this is not the axis itself, it takes tensors on the host.
        """
        return self._over("side")

    @property
    def apart(self) -> Axis:
        """Like `aside`, for users' calls outside of passes."""
        return self._over("apart")

    def _over(self, part: str) -> Axis:
        axis: Axis | None = self.__dict__.get(f"_{part}")
        if axis is None:
            group = getattr(self.lines, part)
            if group is self.lines.data:
                return self
            axis = self.__dict__[f"_{part}"] = Axis(group, self.size, self.rank, "gloo", self.ranks)
            axis.__dict__["_lines"] = Lines(group, group, group)
        return axis

    def open_lines(self, name: str) -> bool:
        """Switch the axis to groups of the engine's own. Collective over the axis.

        Args:
            name: unique to these groups, and the same on all ranks.

        Returns:
            Whether this rank could open them.
        """
        if self.size == 1 or not self.ranks or type(self.group) is not dist.ProcessGroup:
            return False
        return open_lines(self.group, self.rank, self.size, name, self.backend == "gloo").is_open

    def close_lines(self) -> None:
        """Undo `open_lines`, before any use."""
        close_lines(self.group)


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """A mesh as the engine uses it. One object per mesh, groups and device: compare with `is`.

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
    def all(self) -> list[Axis]:
        """The shard axis, and the replicate axis if there is one."""
        return [self.shard] if self.replicate is None else [self.shard, self.replicate]

    @property
    def joint(self) -> Axis | None:
        """An axis of all ranks of the mesh, in ascending order, by groups of the engine's own.

        None if the mesh has a single axis of several ranks, on accelerators, and until `open_joint`.
        """
        joint: Axis | None = self.__dict__.get("_joint")
        if joint is None and self.replicate is not None:
            joint = self.__dict__["_joint"] = _joints.get(self.shard.group, {}).get(self.replicate.group)
        return joint

    @property
    def spanning(self) -> list[Axis]:
        """The axes over which, in turn, a collective reaches all ranks of the mesh: a single one if possible."""
        joint = self.joint
        return self.all if joint is None else [joint]

    @property
    def lacks_joint(self) -> bool:
        """Whether both axes have several ranks, and neither `open_joint` nor `close_joint` was called for them."""
        shard, replicate = self.shard, self.replicate
        if replicate is None or shard.size == 1 or replicate.size == 1:
            return False
        return replicate.group not in _joints.get(shard.group, {})

    def open_joint(self, name: str) -> bool:
        """Make the groups of `joint`. Collective over the mesh, once; both axes have lines on the host.

        Args:
            name: unique to these groups, and the same on all ranks.

        Returns:
            Whether this rank could make them.
        """
        ranks = tuple(sorted(self.ranks))
        rank, size = ranks.index(self.global_rank), len(ranks)
        group = open_joint_lines(self.shard.group, rank, size, name)
        self._keep_joint(None if group is None else Axis(group, size, rank, "gloo", ranks))
        return group is not None

    def close_joint(self) -> None:
        """Do without `joint` for good, before any use, because a rank could not open it."""
        self._keep_joint(None)

    def _keep_joint(self, joint: Axis | None) -> None:
        assert self.replicate is not None
        _joints.setdefault(self.shard.group, weakref.WeakKeyDictionary())[self.replicate.group] = joint

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks of the mesh."""
        return frozenset(self.mesh.mesh.flatten().tolist())

    @functools.cached_property
    def world(self) -> int:
        """Number of ranks with different data: shard times replicate."""
        return self.shard.size * self.copies

    @property
    def copies(self) -> int:
        """Number of replicas."""
        return self.replicate.size if self.replicate else 1

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of more than one rank. A sum over all ranks of the mesh goes over each of these."""
        return tuple(axis.group for axis in self.all if axis.size > 1)


_all_axes: weakref.WeakValueDictionary[tuple[Any, ...], MeshAxes] = weakref.WeakValueDictionary()
"""By mesh, device, groups and sizes. An entry lives, and keeps its groups alive, as long as a unit uses it."""


_joints: weakref.WeakKeyDictionary[dist.ProcessGroup, MutableMapping[dist.ProcessGroup, Axis | None]] = (
    weakref.WeakKeyDictionary()
)
"""`MeshAxes.joint`, by the groups of the shard and the replicate axis; None if ranks could not open it.

As the user's groups live equally long on all ranks, these agree on whether they have tried.
"""


_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()
"""The device on which units compute, by the groups of their mesh."""


def _axes(mesh: DeviceMesh, device: torch.device, shard: Axis, replicate: Axis | None) -> MeshAxes:
    """The interned `MeshAxes` with these attributes; a `DeviceMesh` alone does not identify its groups."""
    key = (mesh, device, shard.group, shard.size, replicate and replicate.group)
    for axis in (shard, replicate):
        if axis is not None:
            _devices[axis.group] = device
    return _all_axes.setdefault(key, MeshAxes(mesh, device, shard, replicate, dist.get_rank()))


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result that `shard_placement_fn` may return: a placement and a separate mesh (for an expert, for example).

    Attributes:
        placement: `torch.distributed.tensor.Shard`, or None for `Shard(0)`.
        mesh: 1-D (shard) or 2-D (replicate, shard), as for `fully_shard`; None for `fully_shard`'s mesh. Gradients are
            reduced over the ranks of this mesh; `docs/gradients.md` describes what they are divided by.
    """

    placement: Any = None
    mesh: DeviceMesh | None = None


def resolve_mesh(mesh: DeviceMesh | None, device: torch.device | None = None) -> MeshAxes:
    """The axes of `mesh`, or of a 1-D mesh over all ranks if None.

    Args:
        device: on which to compute, of the mesh's device type; None for the current device of that type.

    Raises:
        ConfigError: the mesh does not have 1 or 2 dims, lacks this process, or has a different device type.
    """
    if mesh is None:
        ensure_group()
        mesh = init_device_mesh(device_type_of(None), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise not_a_mesh(type(mesh).__name__)
    if mesh.ndim not in (1, 2):
        raise other_dims(tuple(mesh.shape), mesh.ndim)
    if mesh.get_coordinate() is None:
        raise outside_the_mesh(dist.get_rank(), str(mesh))
    replicate = _axis(mesh, 0) if mesh.ndim == 2 else None
    compute_device = _device(mesh.device_type, device)
    return _axes(mesh, compute_device, _axis(mesh, mesh.ndim - 1), replicate)


_subdivided: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Axis]] = weakref.WeakKeyDictionary()
"""By the shard axis' group and by size. Making groups is collective; on accelerators each is a communicator."""


def ensure_group() -> None:
    """Initialize torch.distributed if the program has not: as torchrun configured it, or for this process alone.

    Raises:
        ValueError: torch's own, if a launcher set only some of the variables.
    """
    if dist.is_initialized():
        return
    try:
        dist.init_process_group()
        return
    except ValueError as error:  # raised by torch if no launcher has set RANK, the first variable that it reads
        if dist.is_torchelastic_launched() or "RANK" not in str(error):
            raise
    warnings.warn(alone(), stacklevel=4)
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)


def check_smaller_groups(size: int, ranks: int) -> None:
    """Check that so many ranks divide into groups of `size`.

    Raises:
        ConfigError: `size` is not a divisor of `ranks`, or is 1 or `ranks` itself.
    """
    if size <= 1 or size >= ranks or ranks % size:
        raise no_smaller_groups(size, ranks, [str(n) for n in range(2, ranks) if ranks % n == 0])


def subdivide(axes: MeshAxes, size: int) -> Axis:
    """The axis of the `size` consecutive ranks of the shard axis that include this rank.

    The first call makes the groups and is collective over the mesh.

    Raises:
        ConfigError: see `check_smaller_groups`.
    """
    check_smaller_groups(size, axes.shard.size)
    by_size = _subdivided.setdefault(axes.shard.group, {})
    if size not in by_size or not _in_use(by_size[size].group):
        # Rows of [.., size] are consecutive ranks of the shard axis, whatever the mesh's own rank order.
        grid = axes.mesh.mesh.reshape(-1, size)
        by_size[size] = _axis(DeviceMesh(axes.mesh.device_type, grid, mesh_dim_names=("outer", "inner")), 1)
    return by_size[size]


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    group = mesh.get_group(dim)
    backend = backend_of(group, mesh.device_type) or str(dist.get_backend(group))
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group, mesh.size(dim), mesh.get_local_rank(dim), backend, ranks)


def _device(device_type: str, device: torch.device | None = None) -> torch.device:
    if device is not None and device.type != device_type:
        raise other_device_type(device_type, device)
    if device_type == "cpu":
        return torch.device("cpu")
    if device is not None and device.index is not None:
        return device
    try:
        return torch.device(device_type, torch.get_device_module(device_type).current_device())
    except (RuntimeError, AssertionError) as error:  # raised by torch if there is no such device
        raise device_not_available(device_type, error) from error


# From process groups, for the wrapper front-end: a group, a pair of groups, or node-local groups.

_hybrid: dict[tuple[Any, ...], MeshAxes] = {}
"""By the default group, the device, and the user's pair of groups. Making groups is collective. See `_in_use`."""


def axes_of_groups(groups: Any, hybrid: bool, device: torch.device | None = None) -> MeshAxes:
    """The axes for `process_group=`: a group to shard over; for hybrid strategies a pair (shard, replicate).

    Args:
        groups: None (all ranks; hybrid: shard inside a node, replicate over nodes), a process group, or a pair.
        hybrid: whether the strategy shards and replicates.
        device: on which to compute; None for the accelerator if the group serves it, else the CPU.

    Raises:
        ConfigError: `groups` is invalid for the strategy.
    """
    ensure_group()
    pair = isinstance(groups, (tuple, list))
    members = groups if pair else [] if groups is None else [groups]
    fits = groups is None or (pair and len(members) == 2 if hybrid else not pair)
    if not fits or not all(isinstance(group, dist.ProcessGroup) for group in members):
        raise invalid_groups(groups, hybrid)
    kind = device.type if device is not None else device_type_of(groups[0] if pair else groups)
    compute_device = _device(kind, device)
    if hybrid:
        for key in [key for key, axes in _hybrid.items() if not _in_use(key[0], *(axis.group for axis in axes.all))]:
            del _hybrid[key]
        key = (dist.group.WORLD, compute_device, *members)
        if key not in _hybrid:
            _hybrid[key] = resolve_mesh(_pair_mesh(groups, kind) if pair else _node_mesh(kind), compute_device)
        return _hybrid[key]
    if groups is None or groups is dist.group.WORLD:
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(groups, kind)
    return resolve_mesh(mesh, compute_device)


def _in_use(*groups: Any) -> bool:
    """Whether none of these groups has been destroyed."""
    try:
        return all(dist.get_backend(group) for group in groups)
    except ValueError:
        return False


def device_type_of(group: Any) -> str:
    """The device type that `group` (None for the default group) serves: the accelerator's if possible, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    backend = backend_of(group, accelerator.type)
    explicit = ":" in str(dist.get_backend(group))  # gloo serves accelerators too, slowly
    return accelerator.type if backend is not None and (explicit or backend not in ("gloo", "mpi")) else "cpu"


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for tensors exchanged over `group`: the one on which the group's units compute.

    Without units the device that the group is bound to (`init_process_group(device_id=)`), else the current device.
    Of ranks that do not exist the CPU, on which their fake tensors are.
    """
    if isinstance(group, AbsentGroup):
        return torch.device("cpu")
    kind = device_type_of(group)
    for device in (_devices.get(group), getattr(group, "bound_device_id", None)):
        if device is not None and device.type == kind:
            return _device(kind, device)
    return _device(kind)


def backend_of(group: Any, device_type: str) -> str | None:
    """The name of the backend by which `group` serves a device type; None if it does not."""
    backend = str(dist.get_backend(group))
    if backend == "undefined":  # the group was created without a backend: torch chose a backend for every device type
        backend = str(get_backend_config(group))
    if ":" not in backend:
        return backend
    return dict(pair.split(":") for pair in backend.split(",")).get(device_type)  # e.g. "cpu:gloo,cuda:nccl"


def unsharded_axes(axes: MeshAxes) -> MeshAxes:
    """The same ranks with nothing split: a single rank on the shard axis, all ranks on the replicate axis.

    For a single group or a 1-D mesh; callers check this.
    """
    ranks = axes.shard
    single = Axis(ranks.group, 1, 0, ranks.backend, (axes.global_rank,))
    return _axes(axes.mesh, axes.device, single, ranks if ranks.size > 1 else None)


def _pair_mesh(groups: Any, kind: str) -> DeviceMesh:
    shard, replicate = groups
    shard_ranks = dist.get_process_group_ranks(shard)
    rows: list[Any] = [None] * dist.get_world_size(replicate)
    dist.all_gather_object(rows, shard_ranks, group=replicate)
    if len({rank for row in rows for rank in row}) < sum(map(len, rows)) or len(set(map(len, rows))) > 1:
        raise groups_do_not_cross(dist.get_rank(), rows, dist.get_process_group_ranks(replicate))
    return DeviceMesh.from_group(
        [replicate, shard], kind, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=("replicate", "shard")
    )


def _node_mesh(kind: str) -> DeviceMesh:
    """Shard over the ranks of a node, replicate over nodes. Ranks with the same host name are on the same node."""
    world = dist.get_world_size()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = {host: [rank for rank in range(world) if hosts[rank] == host] for host in hosts}
    sizes = {host: len(ranks) for host, ranks in nodes.items()}
    if len(set(sizes.values())) > 1:
        raise unequal_nodes(sizes)
    return DeviceMesh(kind, list(nodes.values()), mesh_dim_names=("replicate", "shard"))
