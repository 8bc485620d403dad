"""Transformers, adopted: `save_pretrained` of a sharded model writes whole weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from .whole import gathered, sharded_around


def adjust_models(modeling: ModuleType, told: Callable[[str], None]) -> None:
    """Gather the weights in `PreTrainedModel.save_pretrained`, which would write this rank's part of each, or raise.

    Args:
        modeling: `transformers.modeling_utils`.
        told: see `clients.watch`.
    """
    original = modeling.PreTrainedModel.save_pretrained
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        sharded = sharded_around(self)
        if sharded is None or given.arguments.get("state_dict") is not None:
            return original(self, *args, **kwargs)
        state = gathered(sharded, "save_pretrained")
        if not state:
            return None
        given.arguments["state_dict"] = state
        return original(*given.args, **given.kwargs)

    modeling.PreTrainedModel.save_pretrained = save_pretrained
    told("Transformers: save_pretrained of a sharded model writes whole weights; call it on every rank")
