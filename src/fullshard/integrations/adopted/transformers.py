"""Transformers, adopted: `save_pretrained` of a sharded model writes whole weights."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ...api.whole import saving_whole


def adjust_models(modeling: ModuleType, told: Callable[[str], None]) -> None:
    """Gather the weights in `PreTrainedModel.save_pretrained`, which would write this rank's part of each, or raise.

    Args:
        modeling: `transformers.modeling_utils`.
        told: see `clients.watch`.
    """
    modeling.PreTrainedModel.save_pretrained = saving_whole(modeling.PreTrainedModel.save_pretrained)
    told("Transformers: save_pretrained of a sharded model writes whole weights; call it on every rank")
