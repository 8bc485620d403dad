"""A private gloo group, made by its ranks alone and unknown to `torch.distributed`.

Private torch API: the constructors of `ProcessGroup` and `ProcessGroupGloo`, `ProcessGroup._register_backend` and
`_get_backend`, the backend's `_set_default_timeout`, `_devices` and `_threads` of its options, and gloo's records in
the store. The public alternative is `new_group(ranks, use_local_synchronization=True)`; it names the group after the
ranks and this process's number of groups, so that ranks with different numbers of groups wait forever, and a process
that destroys its groups and makes new ones over the same store finds the addresses of the old ones. Where
torch was built without gloo, the user's group is used. `tests/test_private_api.py` fails when one is gone.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .store import default_store

HAS_GLOO = hasattr(dist, "ProcessGroupGloo")
"""Whether torch was built with gloo."""


def listening(name: str, size: int) -> bytes:
    """The addresses on which ranks of a group made here listen: gloo's records in the store, with a `sockaddr` each.

    Empty if gloo writes them elsewhere, or if the process of the store is gone.

    Args:
        name, size: as passed to `gloo_group`, which has returned.
    """
    group_store = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
    keys = [f"0/{rank}" for rank in range(size)]
    try:
        return b"".join(group_store.multi_get(keys)) if group_store.check(keys) else b""
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
    """Make a group over the default group's store; None if impossible. Collective: returns once all ranks have joined.

    Args:
        name: never used for another group, and the same on all ranks.
        rank, size: in the group.
        beside: a group made here, of any ranks, whose thread then serves this group's connections, too: otherwise a
            gloo group has three threads, one of which wakes 100 times a second.
        connect_within: how long to wait for the other ranks to connect; None for `timeout`.
    """
    store = default_store()
    if store is None or not HAS_GLOO:
        return None
    if threading.current_thread() is not threading.main_thread():
        store = store.clone()  # a wait blocks other threads' use of a connection: ranks could deadlock
    group_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    gloo: Any = dist.ProcessGroupGloo
    try:
        if beside is None:
            backend = gloo(group_store, rank, size, connect_within or timeout)
        else:
            options = gloo._Options()
            options._devices = beside._get_backend(torch.device("cpu")).options._devices  # type: ignore[attr-defined]
            options._timeout, options._threads = connect_within or timeout, 1
            backend = gloo(group_store, rank, size, options)
        if connect_within is not None:
            backend._set_default_timeout(timeout)
    except RuntimeError:  # the process of the store is gone, or ranks cannot connect
        return None
    group: Any = dist.ProcessGroup(group_store, rank, size)
    kinds = ["cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])]  # type: ignore[union-attr]
    for kind in kinds:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
