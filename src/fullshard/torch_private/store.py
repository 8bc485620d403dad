"""The key-value store by which the default process group was made.

Private torch API: `torch.distributed.distributed_c10d._get_default_store`. The public alternative is to have the user
pass the store, which programs do not keep. It serves only to find ranks that have not come to their first forward;
where it is missing these are not named. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_default_store: Any = getattr(distributed_c10d, "_get_default_store", None)


def put(key: str, value: str) -> None:
    """Write down `value` for all ranks, if there is a store."""
    store = default_store()
    if store is not None:
        store.set(key, value)


def look_up(keys: list[str]) -> list[str | None]:
    """The values of these keys; None for those that nobody has written, and where the store cannot be asked."""
    found: list[str | None] = []
    store = default_store()
    for key in keys:
        try:
            found.append(store.get(key).decode() if store is not None and store.check([key]) else None)
        except RuntimeError:  # the process that kept it is gone
            store = None
            found.append(None)
    return found


def default_store() -> Any:
    """The store, or None."""
    return _default_store() if _default_store is not None and dist.is_initialized() else None
