"""Ranks meet: their watchers learn of each other, and the engine opens connections of its own.

A watcher starts when a process makes its first unit, and its address goes into the process group's store, where a rank
that waits finds who has come so far. At a model's first forward, before anything else, the ranks exchange addresses
among themselves.
"""

from __future__ import annotations

import json
import weakref

import torch
import torch.distributed as dist

from ..comm import Comm, can_open, introduced, introduction, own_lines
from ..mesh import Axis, MeshAxes, device_type_of
from ..torch_private.group_timeout import timeout_of
from ..torch_private.store import look_up, put
from ..watcher import RANK, Address
from .texts import texts_of_all

_KEY = "fullshard/watcher/{}"
_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups whose ranks have exchanged addresses."""
_published: list[weakref.ref[dist.ProcessGroup]] = []  # the default group under which this rank's address was told


def arrive(axes: MeshAxes) -> None:
    """A unit is made on this mesh: start this process's watcher, and let those find it that wait."""
    if axes.world == 1 or axes.shard.backend not in _WATCHED or not dist.is_initialized():
        return
    rank, group = dist.get_rank(), axes.shard.group
    address = RANK.start(rank, timeout_of(group, device_type_of(group)).total_seconds())
    assert dist.group.WORLD is not None
    if address is not None and (not _published or _published[0]() is not dist.group.WORLD):
        _published[:] = [weakref.ref(dist.group.WORLD)]
        RANK.reprieve()
        put(_KEY.format(rank), json.dumps(address))
        RANK.find_others = lambda: _find(dist.get_world_size())
        RANK.search()


def meet(axis: Axis, comm: Comm, device: torch.device) -> None:
    """Exchange addresses over an axis, and open lines. Collective over it, once."""
    if axis.size == 1 or not comm.communicates or axis.backend not in _WATCHED or axis.group in _met:
        return
    _met.add(axis.group)
    if can_open(axis.group, axis.size, axis.backend):
        own_lines(axis.group, axis.backend)
        return
    mine = introduction()
    room = max(int(text) for text in texts_of_all(str(len(mine)), axis, comm, device))
    name, known = introduced(texts_of_all(mine, axis, comm, device, room))
    RANK.meet(known)
    opened = axis.open_lines(name)
    if axis.backend != "gloo":
        RANK.waits_on_device()
        if "False" in texts_of_all(str(opened), axis, comm, device):
            axis.close_lines()


def _find(world: int) -> list[tuple[int, Address | None]]:
    """Where the ranks' watchers are, of all that have come so far."""
    values = look_up([_KEY.format(rank) for rank in range(world)])
    return [(rank, None if value is None else tuple(json.loads(value))) for rank, value in enumerate(values)]


_WATCHED = ("gloo", "nccl", "xccl", "hccl")
"""Backends whose ranks are processes that can be watched."""
