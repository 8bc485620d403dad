"""Gradients that users give up: `zero_grad()` discards what was accumulated without sync, too.

What waits unsharded for the next reduction does not show in `.grad`, so nothing on a parameter tells that it was
given up. Modules of ours override `zero_grad`; optimizers are noticed by a wrapper around `Optimizer.zero_grad`, put
there when the first model is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..shard import Member, Unit, owner_of
from .root import ROOTS

_installed: list[Any] = []


def give_up(parameters: Iterable[Any]) -> None:
    """Discard gradients of these parameters that were accumulated without sync, or not yet reduced."""
    for root in list(ROOTS):
        root.recover_if_broken()
    units: dict[int, tuple[Unit, set[int]]] = {}
    for parameter in parameters:
        unit = owner_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if unit is not None:
            units.setdefault(id(unit), (unit, set()))[1].add(id(parameter))
    for unit, ids in units.values():
        for gradients in unit.gradients:
            bucket = gradients.bucket
            whole = id(bucket.flat_parameter) in ids
            members: list[Member] = [m for m in bucket.members if whole or id(m.sharded) in ids]
            live = gradients.live_bytes
            gradients.give_up(members)
            unit.ledger.reducing -= live - gradients.live_bytes


def install() -> None:
    """Notice every optimizer's `zero_grad`. Once."""
    if _installed:
        return
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        give_up([parameter for group in self.param_groups for parameter in group["params"]])
        original(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    _installed.append(zero_grad)
