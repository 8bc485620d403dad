"""Ranks meet: their watchers learn of each other, and the engine opens connections of its own.

A watcher starts when a process makes its first unit, and its address goes into the process group's store, where a rank
that waits finds who has come so far. At a model's first forward the ranks exchange addresses among themselves.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..comm import Comm
from ..mesh import Axis, MeshAxes, device_type_of
from ..torch_private.group_timeout import timeout_of
from ..torch_private.store import look_up, put
from ..watcher import RANK, Address
from .texts import texts_of_all

_KEY = "fullshard/watcher/{}"
_all_met: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()
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


def meet(axes: Sequence[Axis], comm: Comm, device: torch.device) -> None:
    """Exchange addresses over every axis, and open lines. Collective over each of them, once."""
    for axis in axes:
        if axis.size == 1 or not comm.communicates or axis.backend not in _WATCHED:
            continue
        if axis.ranks in _met():
            axis.open_lines("")  # which are there
            continue
        _met().add(axis.ranks)
        mine = [secrets.token_hex(8), list(RANK.known.items())]  # those of another axis, too
        room = max(int(text) for text in texts_of_all(str(len(json.dumps(mine))), axis, comm, device))
        names, known = zip(*map(json.loads, texts_of_all(json.dumps(mine), axis, comm, device, room)), strict=True)
        RANK.meet({rank: tuple(address) for each in known for rank, address in each})
        axis.open_lines(names[0])
        if axis.backend != "gloo":
            RANK.waits_on_device()


def _met() -> set[tuple[int, ...]]:
    """Sets of ranks that have exchanged addresses, under the default group that there is now."""
    assert dist.group.WORLD is not None
    return _all_met.setdefault(dist.group.WORLD, set())


def _find(world: int) -> list[tuple[int, Address | None]]:
    """Where the ranks' watchers are, of all that have come so far."""
    values = look_up([_KEY.format(rank) for rank in range(world)])
    return [(rank, None if value is None else tuple(json.loads(value))) for rank, value in enumerate(values)]


_WATCHED = ("gloo", "nccl", "xccl", "hccl")
"""Backends whose ranks are processes that can be watched."""
