"""What `save` and `load` are given, before ranks meet over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

_REMEDIES = {
    "model": "pass the model itself, not its state dict: {call}(folder, model, optimizer)",
    "optimizers": "pass an optimizer or a list of them; a step is named: {call}(folder, model, optimizer, step=3)",
    "state": 'pass a dict by name: state={{"scheduler": scheduler}}',
}


def check_given(call: str, model: Any, optimizers: Any, state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that `call` ("save" or "load") was given, as a list.

    Raises:
        ConfigError: an argument is of another type; it is named.
    """
    several = isinstance(optimizers, Iterable) and not isinstance(optimizers, (str, Mapping, nn.Module))
    given = list(optimizers) if several else [optimizers]
    checked: list[tuple[str, Any, type]] = [("model", model, nn.Module)]
    checked += [("optimizers", one, torch.optim.Optimizer) for one in given]
    checked += [("state", {} if state is None else state, Mapping)]
    for what, value, kind in checked:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{call}({what}=) has an invalid type.",
                expected=kind.__name__,
                got=type(value).__name__,
                remedy=_REMEDIES[what].format(call=call),
                code="C199",
            )
    return given
