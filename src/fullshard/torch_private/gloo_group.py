"""A gloo group of some ranks that nobody else knows, made by these ranks alone.

Private torch API: the constructors of `ProcessGroup` and `ProcessGroupGloo`, and `ProcessGroup._register_backend`. The
public alternative is `new_group(ranks, use_local_synchronization=True)`; it names the group after the ranks and the
number of groups that this process has, so that ranks with different numbers of groups wait for ever, and a process that
destroys its groups and makes new ones over the same store finds the addresses of the old ones. Where something is
missing there is no such group, and the user's serves. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .store import default_store

HAS_GLOO = hasattr(dist, "ProcessGroupGloo") and hasattr(dist.ProcessGroup, "_register_backend")
"""Whether such groups can be made."""


def gloo_group(name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """A group over the default group's store; None if it cannot be made. Collective: returns when all have come.

    Args:
        name: of no other group, now or before, and the same on all its ranks.
        rank, size: in the group.
    """
    store = default_store()
    if store is None or not HAS_GLOO:
        return None
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    try:
        backend = dist.ProcessGroupGloo(own, rank, size, timeout)
    except RuntimeError:  # the process that kept the store is gone
        return None
    group: Any = dist.ProcessGroup(own, rank, size)
    kinds = ["cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])]  # type: ignore[union-attr]
    for kind in kinds:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
