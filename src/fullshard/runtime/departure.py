"""The warning that PyTorch's wrapper gives where it looks closely: a pass left the order of those before it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from ..errors import message
from .schedule import Orders


def warn_of_departure(orders: Orders, names: Sequence[str], rank: int) -> None:
    """Say once, under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, that the forward that ends now left the order of the last one.

    Ranks are compared along a first pass and wherever one leaves its course; this names the units.

    Args:
        orders: of the root.
        names: of its units, by index.
        rank: this one.
    """
    if orders.told or dist.get_debug_level() != dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        return
    found = orders.forward.departure()
    if found is None:
        return
    orders.told = True
    known, now = ("none" if i is None else f"unit {names[i] or '(root)'!r}" for i in found)
    warnings.warn(
        message(
            f"Forward order differs from that of the first iteration: rank {rank} ran {now} where it ran {known} "
            "before. Every rank has to change its order in the same way.",
            code="W010",
        ),
        stacklevel=4,
    )
