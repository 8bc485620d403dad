"""Connections of the engine's own beside a user's gloo group.

Collectives of one group pair up in the order in which each rank issues them. A collective of the user's between ours
on one rank only would pair with one of ours: wrong numbers where sizes agree, and an abort of the process in gloo's
own thread where they do not. So the engine talks over a group of its own; ranks that may be at different points
compare over a second one. Both are broken off when the ranks are found to be stuck: whatever waits then ends at once
with an error, and no memory is written to any more.

On accelerators the user's group serves for everything: a communicator there costs memory, and waits are the device's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

import torch.distributed as dist

from ..torch_private.group_timeout import timeout_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Lines] = weakref.WeakKeyDictionary()


class Lines:
    """The groups by which an axis' ranks talk.

    Attributes:
        data: for gathers and reductions.
        side: for comparisons, of ranks that may be at different points.
        is_open: whether these are the engine's own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.data = self.side = group
        self.is_open = False
        self._sockets: list[str] = []

    def open(self, ranks: tuple[int, ...]) -> None:
        """Make groups of our own, once. Collective over `ranks`, which are those of a gloo group."""
        if self.is_open:
            return
        before = set(_sockets().values())
        timeout = timeout_of(self.data)
        data, side = (
            dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
            for _ in range(2)
        )
        for group in (data, side):
            dist.barrier(group=group)  # connections are there from now on
        self._sockets = [link for link in _sockets().values() if link not in before]
        self.data, self.side, self.is_open = data, side, True

    def cut(self) -> None:
        """Break the connections off: what waits for one ends with an error."""
        mine = set(self._sockets)
        for fd, link in _sockets().items():
            if link in mine:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # raises for one that listens, which has to stay
                    connection.shutdown(socket.SHUT_RDWR)


def lines_of(group: dist.ProcessGroup) -> Lines:
    """The lines of a group; the same ones for every axis over it."""
    if group not in _opened:
        _opened[group] = Lines(group)
    return _opened[group]


def all_lines() -> list[Lines]:
    """Those of all groups of this process."""
    return list(_opened.values())


def _sockets() -> dict[int, str]:
    """The sockets of this process: what each descriptor leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found
