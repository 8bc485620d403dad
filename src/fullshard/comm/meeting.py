"""Ranks meet before the engine says anything else over a gloo group: they open connections of the engine's own.

Until these are open the user's group has to serve, on which a collective of the engine's pairs up with whatever another
rank calls there: a hang, wrong numbers, or an abort in gloo's thread where sizes differ. Gloo pairs all-to-alls with
all-to-alls only, which programs hardly call: by that ranks exchange a line of text, and nothing but that.
"""

from __future__ import annotations

import secrets
import weakref

import torch
import torch.distributed as dist

from ..mesh import Axis, Lines, backend_of, device_type_of, lines_of, open_lines
from ..watcher import RANK
from .protocol import Comm
from .watched import Watched

_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # those that may have no connections even so, too


def own_lines(group: dist.ProcessGroup, backend: str | None = None) -> Lines:
    """The connections of this group's ranks, opened now if they are not; the group itself where there can be none.

    Collective over the group, the first time.

    Args:
        backend: by which the group serves the device that is meant; None: the device of `device_type_of`.

    Raises:
        DivergenceError: other ranks do not come, or are gone.
    """
    lines, size = lines_of(group), dist.get_world_size(group)
    if lines.is_open or group in _met or not can_open(group, size, backend or backend_of(group, device_type_of(group))):
        return lines
    _met.add(group)
    return open_lines(group, dist.get_rank(group), size, _first_name(group), on_host=True)


def apart_of(axis: Axis, comm: Comm) -> Axis:
    """The axis by its connections for what one rank may ask for alone, opened now if they are not, as `own_lines` does.

    On the user's group it would pair up with whatever the others do there; ranks that then all raise would wait for
    each other at their ends, as nobody but the user may break that group's connections off.
    """
    if comm.communicates and can_open(axis.group, axis.size, axis.backend):
        own_lines(axis.group, axis.backend)
    return axis.apart


def can_open(group: dist.ProcessGroup, size: int, backend: str | None) -> bool:
    """Whether ranks that talk over this group can have connections of the engine's own."""
    return size > 1 and type(group) is dist.ProcessGroup and backend == "gloo"


def new_name() -> str:
    """For connections: 16 letters; those of a group's first rank are taken."""
    return secrets.token_hex(8)


def _first_name(group: dist.ProcessGroup) -> str:
    """The first rank's new name, on every rank. Collective over a gloo group."""
    size = dist.get_world_size(group)
    sent = torch.frombuffer(bytearray(new_name().encode()), dtype=torch.uint8).repeat(size)
    received = torch.empty_like(sent)
    RANK.talks("texts")
    Watched(dist.all_to_all_single(received, sent, group=group, async_op=True)).wait()
    return bytes(received.view(size, -1)[0].tolist()).decode()
