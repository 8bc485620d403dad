"""Optimizers that were built before a model was sharded: given its shards in place of the parameters that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """A model's parameters, which may not be sharded yet, and a name of each."""
    return {parameter: name for name, parameter in model.named_parameters()}


def point_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], before: Mapping[nn.Parameter, str], model: nn.Module
) -> None:
    """Put a model's parameters where optimizers hold those that it had before.

    Args:
        optimizers: of any models.
        before: what `names_of` said then.
        model: sharded since.

    Raises:
        ConfigError: an optimizer has state of a parameter, which is of another shape now.
    """
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        inner: Any = getattr(optimizer, "optimizer", optimizer)
        for group in inner.param_groups:
            stepped = [before[one] for one in group["params"] if one in before and inner.state.get(one)]
            if stepped:
                raise ConfigError(
                    "An optimizer has stepped before the model was sharded.",
                    parameter=stepped[0],
                    got=f"{type(inner).__name__} with state",
                    remedy="prepare model and optimizer together, before the first step; load its state after",
                    code="C244",
                )
            group["params"] = [now[before[one]] if one in before else one for one in group["params"]]
