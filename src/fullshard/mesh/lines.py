"""The engine's own connections beside a user's process group.

Collectives of a group pair up in the order in which each rank issues them. A collective that the user issues on only
one rank, between the engine's, would pair with one of the engine's: the results are wrong if sizes agree, and gloo
aborts the process if they do not. So the engine uses separate groups: one for its collectives, and another for
comparisons between ranks that may be at different points. When ranks are stuck, the engine shuts both down: every wait
ends at once with an error, and no more memory is written.

Lines belong to a process group, not to a set of ranks: two models, each with its own group, may run in two threads.
Between all ranks of a hybrid mesh, for which the user has no group, they belong to the groups of its two axes
(`MeshAxes.joint`).

On accelerators gathers and reductions use the user's group, since a communicator costs memory there and the device does
the waiting. Comparisons use a gloo group on the host there too: beside a gather of a different size on the same
communicator their result would be undefined, and reading it would wait for the device.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..sockets import open_sockets
from ..torch_private.gloo_group import gloo_group, listening
from ..torch_private.gloo_threads import rest_at_exit
from ..torch_private.group_timeout import timeout_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, _Own] = weakref.WeakKeyDictionary()
"""By the user's group."""
_CONNECTED = timedelta(seconds=60)
"""Time limit for connections that the engine can do without: between all ranks of a hybrid mesh, and on the host
between ranks that run on accelerators, where gloo may not be configured."""


class Lines:
    """The groups that carry the engine's collectives between some ranks.

    Attributes:
        data: for gathers and reductions.
        side: for comparisons between ranks that may be at different points.
        apart: for users' calls outside of passes (whole values, `unshard`), which one rank may make alone.
        is_open: whether `side` is the engine's own.
        all_own: whether all three are the engine's own.
    """

    def __init__(self, data: dist.ProcessGroup, side: dist.ProcessGroup, apart: dist.ProcessGroup) -> None:
        self.data, self.side, self.apart = data, side, apart
        self.is_open, self.all_own = side is not data, apart is not data


@dataclass(frozen=True)
class _Own:
    """The engine's own groups beside a user's group. None means the user's, of which this keeps no reference.

    Attributes:
        listening: the addresses on which these groups' ranks listen, including this rank's. Exactly the connections of
            these groups have an end there; the program's other threads may open further connections at any time.
    """

    data: dist.ProcessGroup | None
    side: dist.ProcessGroup
    apart: dist.ProcessGroup | None
    listening: bytes

    def cut(self) -> None:
        """Shut the connections down."""
        for _, connection in open_sockets():
            with contextlib.suppress(OSError):
                peer = connection.getpeername()  # raises for a listening socket, which has to stay
                ends = [_packed(connection.family, end) for end in (connection.getsockname(), peer)]
                if any([end is not None and end in self.listening for end in ends]):
                    connection.shutdown(socket.SHUT_RDWR)


def lines_of(group: dist.ProcessGroup) -> Lines:
    """The lines of a group; all are `group` itself until `open_lines`."""
    lines = _opened.get(group)
    return Lines(group, group, group) if lines is None else Lines(lines.data or group, lines.side, lines.apart or group)


def open_lines(group: dist.ProcessGroup, rank: int, size: int, name: str, on_host: bool) -> Lines:
    """Make the engine's own groups for the ranks of a group, once. Collective over them.

    Args:
        rank, size: in the group.
        name: unique to these groups, and the same on all ranks.
        on_host: whether the group's collectives run on the host (gloo); if not, only comparisons get a group.
    """
    if group in _opened:
        return lines_of(group)
    rest_at_exit()
    prefix, timeout = f"fullshard/{name}", timeout_of(group)
    data: dist.ProcessGroup | None = None
    apart: dist.ProcessGroup | None = None
    if on_host:
        data = gloo_group(f"{prefix}/data", rank, size, timeout)
        parts = (gloo_group(f"{prefix}/{part}", rank, size, timeout, data) for part in ("side", "apart"))
        side, apart = parts if data is not None else (None, None)
    else:
        side = gloo_group(f"{prefix}/side", rank, size, timeout, connect_within=min(timeout, _CONNECTED))
    if side is not None and (apart is not None or not on_host):
        # groups beside "data" share its thread
        addresses = listening(f"{prefix}/{'data' if on_host else 'side'}", size)
        _opened[group] = _Own(data, side, apart, addresses)
    return lines_of(group)


def open_joint_lines(group: dist.ProcessGroup, rank: int, size: int, name: str) -> dist.ProcessGroup | None:
    """Make a group of more ranks than those of `group`, with lines of its own. Collective over its ranks.

    Args:
        group: a group with lines on the host, whose thread then serves these, too.
        rank, size: in the new group.
        name: unique to these groups, and the same on all ranks.

    Returns:
        The group, for sums at points that all ranks reach alike; None if this rank could not open it. The caller keeps
        it alive.
    """
    own = _opened.get(group)
    if own is None or own.data is None:
        return None
    prefix, timeout = f"fullshard/{name}", timeout_of(group)
    within = min(timeout, _CONNECTED)
    data = gloo_group(f"{prefix}/joint", rank, size, timeout, own.data, within)
    side = gloo_group(f"{prefix}/joint side", rank, size, timeout, own.data, within) if data is not None else None
    if data is None or side is None:
        return None
    _opened[data] = _Own(None, side, None, listening(f"{prefix}/joint", size))
    return data


def close_lines(group: dist.ProcessGroup) -> None:
    """Return to using `group` itself, because another rank could not open its lines."""
    _opened.pop(group, None)


def cut_all_lines() -> None:
    """Shut down all of the engine's connections of this process: every wait for them ends with an error."""
    for lines in list(_opened.values()):
        lines.cut()


def _packed(family: int, address: Any) -> bytes | None:
    """A socket's address in the layout of the system's `sockaddr`, up to the host; None if it is not TCP/IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port, *flow = address
    middle = struct.pack("!I", flow[0]) if flow else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + middle + socket.inet_pton(family, host.split("%")[0])
