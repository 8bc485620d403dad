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
from collections.abc import Iterable

import torch.distributed as dist

from ..torch_private.gloo_group import gloo_group
from ..torch_private.gloo_threads import rest_at_exit
from ..torch_private.group_timeout import timeout_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Lines]] = weakref.WeakKeyDictionary()
"""By the default group under which they were opened, and by ranks: groups of the same ranks share lines."""


class Lines:
    """The groups by which some ranks talk.

    Attributes:
        data: for gathers and reductions.
        side: for comparisons, of ranks that may be at different points.
        apart: for what users ask for outside of passes (whole values, `unshard`), which one rank may do alone.
        is_open: whether these are the engine's own.
    """

    def __init__(
        self,
        data: dist.ProcessGroup,
        side: dist.ProcessGroup,
        apart: dist.ProcessGroup,
        sockets: Iterable[str] = (),
    ) -> None:
        self.data, self.side, self.apart, self._sockets = data, side, apart, frozenset(sockets)
        self.is_open = data is not side

    def cut(self) -> None:
        """Break the connections off: what waits for one ends with an error."""
        for fd, link in _sockets().items():
            if link in self._sockets:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # raises for one that listens, which has to stay
                    connection.shutdown(socket.SHUT_RDWR)


def lines_of(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Lines:
    """The lines of these ranks if they were opened; else `group` itself serves."""
    world = dist.group.WORLD
    found = _opened.get(world, {}).get(ranks) if world is not None else None
    return found or Lines(group, group, group)


def open_lines(group: dist.ProcessGroup, ranks: tuple[int, ...], name: str) -> Lines:
    """Make groups of our own for the ranks of a gloo group, once. Collective over them.

    Args:
        name: of no other group, and the same on all these ranks.
    """
    found = lines_of(group, ranks)
    if found.is_open:
        return found
    rest_at_exit()
    before = set(_sockets().values())
    timeout = timeout_of(group)
    rank = ranks.index(dist.get_rank())
    data = gloo_group(f"fullshard/{name}/data", rank, len(ranks), timeout)
    parts = (gloo_group(f"fullshard/{name}/{part}", rank, len(ranks), timeout, data) for part in ("side", "apart"))
    side, apart = parts if data is not None else (None, None)
    if data is None or side is None or apart is None:
        return found
    assert dist.group.WORLD is not None
    by_ranks = _opened.setdefault(dist.group.WORLD, {})
    by_ranks[ranks] = Lines(data, side, apart, [link for link in _sockets().values() if link not in before])
    return by_ranks[ranks]


def all_lines() -> list[Lines]:
    """All that are open in this process."""
    return [lines for by_ranks in _opened.values() for lines in by_ranks.values()]


def _sockets() -> dict[int, str]:
    """The sockets of this process: what each descriptor leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found
