"""Connections of the engine's own beside a user's process group.

Collectives of one group pair up in the order in which each rank issues them. A collective of the user's between ours
on one rank only would pair with one of ours: wrong numbers where sizes agree, and an abort of the process in gloo's
own thread where they do not. So the engine talks over groups of its own; ranks that may be at different points
compare over a second one. Both are broken off when the ranks are found to be stuck: whatever waits then ends at once
with an error, and no memory is written to any more.

Lines belong to one process group, whatever its ranks: two models with a group each may run in two threads.

On accelerators the user's group serves for gathers and reductions, as a communicator there costs memory, and waits are
the device's. Comparisons have a gloo group on the host there, too: beside a gather of another size on the same
communicator they would be undefined, and reading their result would wait for the device.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..torch_private.gloo_group import SHARES_THREADS, gloo_group, listening
from ..torch_private.gloo_threads import rest_at_exit
from ..torch_private.group_timeout import timeout_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, _Own] = weakref.WeakKeyDictionary()
"""By the user's group."""
_CONNECTED = timedelta(seconds=60)
"""How long ranks that run on accelerators try to connect on the host: gloo may not be set up there."""


class Lines:
    """The groups by which some ranks talk.

    Attributes:
        data: for gathers and reductions.
        side: for comparisons, of ranks that may be at different points.
        apart: for what users ask for outside of passes (whole values, `unshard`), which one rank may do alone.
        is_open: whether `side` is the engine's own.
        all_own: whether all three are.
    """

    def __init__(
        self,
        data: dist.ProcessGroup,
        side: dist.ProcessGroup,
        apart: dist.ProcessGroup,
    ) -> None:
        self.data, self.side, self.apart = data, side, apart
        self.is_open, self.all_own = side is not data, apart is not data


@dataclass(frozen=True)
class _Own:
    """The engine's own groups beside one of the user's, which serves where there is None: nothing here keeps it.

    Attributes:
        listening: where these groups' ranks listen, this one too. One end of each of their connections is there, and of
            no other's: a program's other threads open connections whenever they like.
    """

    data: dist.ProcessGroup | None
    side: dist.ProcessGroup
    apart: dist.ProcessGroup | None
    listening: bytes

    def cut(self) -> None:
        """Break the connections off."""
        for fd in _sockets():
            with contextlib.suppress(OSError), _connection(fd) as connection:
                peer = connection.getpeername()  # raises for one that listens, which has to stay
                ends = [_packed(connection.family, end) for end in (connection.getsockname(), peer)]
                if any([end is not None and end in self.listening for end in ends]):
                    connection.shutdown(socket.SHUT_RDWR)


def lines_of(group: dist.ProcessGroup) -> Lines:
    """The lines of a group if they were opened; else `group` itself serves."""
    own = _opened.get(group)
    return Lines(group, group, group) if own is None else Lines(own.data or group, own.side, own.apart or group)


def open_lines(group: dist.ProcessGroup, rank: int, size: int, name: str, on_host: bool) -> Lines:
    """Make groups of our own for the ranks of a group, once. Collective over them.

    Args:
        rank, size: in the group.
        name: of no other group, and the same on all these ranks.
        on_host: whether the group's collectives run on the host (gloo): else comparisons alone get a group.
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
        made = ("side",) if not on_host else ("data",) if SHARES_THREADS else ("data", "side", "apart")  # own listeners
        addresses = b"".join([listening(f"{prefix}/{part}", size) for part in made])
        _opened[group] = _Own(data, side, apart, addresses)
    return lines_of(group)


def close_lines(group: dist.ProcessGroup) -> None:
    """Let `group` itself serve again: another rank could not open its lines."""
    _opened.pop(group, None)


def cut_all_lines() -> None:
    """Break off all connections of this process: what waits for one ends with an error."""
    for own in list(_opened.values()):
        own.cut()


def _sockets() -> list[int]:
    """The descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


@contextlib.contextmanager
def _connection(fd: int) -> Iterator[socket.socket]:
    """A socket of somebody else's, which stays open after this and does not learn of `socket.setdefaulttimeout`."""
    blocks = os.get_blocking(fd)
    with socket.socket(fileno=os.dup(fd)) as connection:
        os.set_blocking(fd, blocks)
        yield connection


def _packed(family: int, address: Any) -> bytes | None:
    """A socket's address as the system's `sockaddr` has it, up to the host; None of what is not TCP/IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port, *flow = address
    middle = struct.pack("!I", flow[0]) if flow else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + middle + socket.inet_pton(family, host.split("%")[0])
