"""Starts this rank's watcher at its first unit, and opens the engine's own connections at a first forward."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from ..comm import Comm, can_open, new_name, own_lines
from ..mesh import Axis, MeshAxes, device_type_of
from ..torch_private.gloo_threads import rest_at_exit
from ..torch_private.group_timeout import timeout_of
from ..torch_private.store import StoreLine
from ..watcher import RANK, start
from .aside import texts_of_all

_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups for which `meet` has run."""
_published: list[weakref.ref[dist.ProcessGroup]] = []  # the default group under which this rank is watched


def arrive(axes: MeshAxes) -> None:
    """Start the watcher for a unit on this mesh, and make the process wait for gloo's threads when it exits."""
    rest_at_exit()  # for a single rank too: the program may have its own collectives
    if axes.world == 1 or axes.shard.backend not in _WATCHED or not dist.is_initialized():
        return
    default, group = dist.group.WORLD, axes.shard.group
    assert default is not None
    if not _published or _published[0]() is not default:
        _published[:] = [weakref.ref(default)]
        timeout = timeout_of(group, device_type_of(group)).total_seconds()
        start(RANK, dist.get_rank(), dist.get_world_size(), timeout, lambda: StoreLine("fullshard/watcher/"))
    RANK.peers.update(axes.mesh.mesh.flatten().tolist())


def meet(axis: Axis, comm: Comm, device: torch.device) -> None:
    """Open lines for an axis. Collective over it, once."""
    if axis.size == 1 or not comm.communicates or axis.backend not in _WATCHED or axis.group in _met:
        return
    _met.add(axis.group)
    if can_open(axis.group, axis.size, axis.backend):
        own_lines(axis.group, axis.backend)
        return
    opened = axis.open_lines(texts_of_all(new_name(), axis, comm, device)[0])
    if axis.backend != "gloo":
        RANK.idle = True  # the device waits for collectives; the host does not see it
        if "False" in texts_of_all(str(opened), axis, comm, device):
            axis.close_lines()


_WATCHED = ("gloo", "nccl", "xccl", "hccl")
"""Backends whose ranks are processes, which can be watched."""
