"""The key-value store of the default process group, and a separate connection to it for the watcher.

Private torch API: `torch.distributed.distributed_c10d._get_default_store`. The public alternative is that users pass
the store, which programs do not keep. Without it hangs are not explained. `tests/test_private_api.py` fails when it is
gone. All else is public: `Store.clone`, `compare_set`, `check`, `PrefixStore.underlying_store`, `TCPStore.host`.
"""

from __future__ import annotations

import contextlib
import select
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..sockets import open_sockets

_default_store: Any = getattr(distributed_c10d, "_get_default_store", None)
_PATIENCE = timedelta(seconds=30)
_REACHED = 2.0
"""Seconds within which an available store accepts a connection; torch would try for the group's timeout."""


def default_store() -> Any:
    """The store, or None."""
    return _default_store() if _default_store is not None and dist.is_initialized() else None


class StoreLine:
    """A separate connection to the default process group's store, independent of waits on other connections.

    Args:
        prefix: of all keys.

    Raises:
        RuntimeError, OSError: there is no store, or it does not accept another connection (now).
    """

    def __init__(self, prefix: str) -> None:
        store = default_store()
        if store is None:
            raise RuntimeError("the process group has no store")
        host, port = _address_of(store)
        if port:
            socket.create_connection((host, port), timeout=_REACHED).close()
        before = set(_sockets_to(port))
        connection = store.clone()
        connection.set_timeout(_PATIENCE)
        self._store = dist.PrefixStore(prefix, connection)  # type: ignore[attr-defined]
        fd = next((descriptor for descriptor in _sockets_to(port) if descriptor not in before), None)
        self._poll = None
        if fd is not None and hasattr(select, "POLLRDHUP"):
            self._poll = select.poll()
            self._poll.register(fd, select.POLLRDHUP)

    @property
    def has_ended(self) -> bool:
        """Whether the store's process closed the connection: check before each use, as torch then prints a trace."""
        return self._poll is not None and bool(self._poll.poll(0))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def remove(self, key: str) -> None:
        self._store.delete_key(key)

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def get(self, keys: list[str]) -> list[str]:
        """The values of keys that exist."""
        return [value.decode() for value in self._store.multi_get(keys)] if keys else []

    def replace(self, key: str, before: str, after: str) -> bool:
        """Set a key from `before` ("" if it does not exist) to `after`; returns whether it had that value."""
        return bool(self._store.compare_set(key, before, after).decode() == after)


def _address_of(store: Any) -> tuple[str, int]:
    """Host and TCP port of a store's process; port 0 if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "")), int(getattr(store, "port", 0))


def _sockets_to(port: int) -> list[int]:
    """The descriptors of this process's sockets that are connected to this port; none for port 0."""
    descriptors = []
    for descriptor, connection in open_sockets() if port else ():
        with contextlib.suppress(OSError):
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                descriptors.append(descriptor)
    return descriptors
