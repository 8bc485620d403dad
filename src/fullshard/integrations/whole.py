"""The whole weights of a sharded model, for libraries that save what one rank has."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ..api.wrapper.markers import wrapper_of
from ..checkpoint.functions import get_model_state_dict
from ..errors import PhaseError
from ..runtime import runners_in
from ..torch_private.store import default_store

PATIENCE = 120.0
"""Seconds that ranks wait for each other before a collective that programs may call on one rank alone."""

_meetings: dict[str, int] = {}  # by what: how often this rank came


def sharded_around(model: nn.Module) -> nn.Module | None:
    """What is sharded: the wrapper's instance around `model`, or `model` itself; None if it is not sharded."""
    found: nn.Module | None = wrapper_of(model)
    if found is None and runners_in(model):
        found = model
    return found


def gathered(sharded: nn.Module, what: str) -> dict[str, Any]:
    """The whole weights in host memory on the first rank; nothing on others. Collective.

    Args:
        sharded: a model.
        what: is called; for the error.

    Raises:
        PhaseError: not all ranks came.
    """
    _meet(what)
    return get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _meet(what: str) -> None:
    """Wait until all ranks are here, as far as there is a store to tell by.

    Raises:
        PhaseError: some are not after `PATIENCE` seconds.
    """
    store, world = default_store(), dist.get_world_size()
    if store is None or world == 1:
        return
    number = _meetings[what] = _meetings.get(what, 0) + 1
    key, deadline = f"fullshard/{what}/{number}", time.monotonic() + PATIENCE
    here = store.add(key, 1)
    while here < world:
        if time.monotonic() > deadline:
            raise PhaseError(
                f"{what} of a sharded model gathers its weights, which takes all ranks.",
                rank=dist.get_rank(),
                expected=f"{world} ranks",
                got=f"{here} after {PATIENCE:g} s",
                remedy=f"call {what} on every rank (it writes on the main one), or pass "
                "state_dict=accelerator.get_state_dict(model), called on every rank",
                code="P030",
            )
        time.sleep(0.01)
        here = store.add(key, 0)
