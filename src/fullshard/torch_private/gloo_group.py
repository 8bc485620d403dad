"""A gloo group of some ranks that nobody else knows, made by these ranks alone.

Private torch API: the constructors of `ProcessGroup` and `ProcessGroupGloo`, `ProcessGroup._register_backend` and
`_get_backend`, the backend's `_set_default_timeout`, `_devices` and `_threads` of its options, and what gloo writes
into the store. The public alternative is `new_group(ranks, use_local_synchronization=True)`; it names the group after
the ranks and the number of groups that this process has, so that ranks with different numbers of groups wait for ever,
and a process that destroys its groups and makes new ones over the same store finds the addresses of the old ones. Where
something is missing there is no such group, and the user's serves. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .store import default_store

HAS_GLOO = hasattr(dist, "ProcessGroupGloo") and hasattr(dist.ProcessGroup, "_register_backend")
"""Whether such groups can be made."""
SHARES_THREADS = HAS_GLOO and hasattr(dist.ProcessGroupGloo, "_Options") and hasattr(dist.ProcessGroupGloo, "options")
"""Whether several can have the thread that serves connections in common."""


def listening(name: str, size: int) -> bytes:
    """Where the ranks of a group that was made here listen: gloo's records in the store, each with a `sockaddr` in it.

    Empty where gloo writes them elsewhere, or the process that kept the store is gone.

    Args:
        name, size: of `gloo_group`, which has returned.
    """
    own = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
    keys = [f"0/{rank}" for rank in range(size)]
    try:
        return b"".join(own.multi_get(keys)) if own.check(keys) else b""
    except RuntimeError:
        return b""


def gloo_group(
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    beside: dist.ProcessGroup | None = None,
    connect_within: timedelta | None = None,
) -> dist.ProcessGroup | None:
    """A group over the default group's store; None if it cannot be made. Collective: returns when all have come.

    Args:
        name: of no other group, now or before, and the same on all its ranks.
        rank, size: in the group.
        beside: one that was made here, whose thread serves this one's connections, too: a gloo group has three of its
            own, one of which wakes 100 times a second.
        connect_within: how long to wait for the other ranks at first; None: `timeout`.
    """
    store = default_store()
    if store is None or not HAS_GLOO:
        return None
    if threading.current_thread() is not threading.main_thread():
        store = store.clone()  # a wait keeps other threads off its connection: two ranks' would wait for each other
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    gloo: Any = dist.ProcessGroupGloo
    try:
        if beside is None or not SHARES_THREADS:
            backend = gloo(own, rank, size, connect_within or timeout)
            if connect_within is not None:
                backend._set_default_timeout(timeout)
        else:
            options = gloo._Options()
            options._devices = beside._get_backend(torch.device("cpu")).options._devices  # type: ignore[attr-defined]
            options._timeout, options._threads = timeout, 1
            backend = gloo(own, rank, size, options)
    except RuntimeError:  # the process that kept the store is gone, or ranks cannot connect
        return None
    group: Any = dist.ProcessGroup(own, rank, size)
    kinds = ["cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])]  # type: ignore[union-attr]
    for kind in kinds:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
