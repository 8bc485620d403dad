"""Opens the engine's own connections between the ranks of a gloo group, before any other use of the group.

Until these are open only the user's group is available, on which a collective of the engine pairs up with whatever
another rank calls there: a hang, wrong numbers, or an abort in gloo's thread if sizes differ. Gloo pairs all-to-alls
only with all-to-alls, which programs rarely call: ranks exchange one line of text by an all-to-all, and nothing else.
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

_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # includes groups that could open no connections


def own_lines(group: dist.ProcessGroup, backend: str | None = None) -> Lines:
    """The connections between this group's ranks, opened if needed; the group itself where none are possible.

    Collective over the group at the first call.

    Args:
        backend: by which the group serves the device in question; None for the device of `device_type_of`.

    Raises:
        DivergenceError: other ranks do not make this call, or are gone.
    """
    lines, size = lines_of(group), dist.get_world_size(group)
    if lines.is_open or group in _met or not can_open(group, size, backend or backend_of(group, device_type_of(group))):
        return lines
    _met.add(group)
    return open_lines(group, dist.get_rank(group), size, _first_name(group), on_host=True)


def apart_of(axis: Axis, comm: Comm) -> Axis:
    """The axis on connections for calls that one rank may make alone, opened if needed as by `own_lines`.

    On the user's group such a call would pair up with whatever other ranks do there. If all ranks then raise they would
    wait for each other at exit, as only the user may abort that group's connections.
    """
    if comm.communicates and can_open(axis.group, axis.size, axis.backend):
        own_lines(axis.group, axis.backend)
    return axis.apart


def can_open(group: dist.ProcessGroup, size: int, backend: str | None) -> bool:
    """Whether the engine can open its own connections between this group's ranks."""
    return size > 1 and type(group) is dist.ProcessGroup and backend == "gloo"


def new_name() -> str:
    """A new name for connections, of 16 characters; a group uses its first rank's."""
    return secrets.token_hex(8)


def _first_name(group: dist.ProcessGroup) -> str:
    """A new name, the first rank's on every rank. Collective over a gloo group."""
    size = dist.get_world_size(group)
    sent = torch.frombuffer(bytearray(new_name().encode()), dtype=torch.uint8).repeat(size)
    received = torch.empty_like(sent)
    RANK.talks("texts")
    Watched(dist.all_to_all_single(received, sent, group=group, async_op=True)).wait()
    return bytes(received.view(size, -1)[0].tolist()).decode()
