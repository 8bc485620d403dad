"""PEFT, adopted: adapters of a sharded model are saved whole, and found inside of wrapped blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from ...api.whole import saving_whole
from ...names import WRAPPED, clean_name, clean_path
from ..rebind import rebind


def adjust_states(save_and_load: ModuleType, told: Callable[[str], None]) -> None:
    """Let `get_peft_model_state_dict` find adapters in blocks that are wrapped one by one.

    It looks for keys of a state dict by the paths of modules, in which the wrapper's own name shows (version 1); it
    would find none, and an empty file would be written.

    Args:
        save_and_load: `peft.utils.save_and_load`.
        told: see `clients.watch`.
    """
    original = save_and_load.get_peft_model_state_dict

    @functools.wraps(original)
    def get_peft_model_state_dict(model: nn.Module, state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        paths: dict[str, str] = {}
        for path, _ in model.named_modules():
            paths.setdefault(clean_path(path), path)  # of a wrapped module, its instance's
        if all(WRAPPED not in path for path in paths.values()):
            return original(model, state_dict, *args, **kwargs)
        given = model.state_dict() if state_dict is None else state_dict
        shown = {_shown(name, paths): value for name, value in given.items()}
        return {clean_name(name): value for name, value in original(model, shown, *args, **kwargs).items()}

    rebind(original, get_peft_model_state_dict)


def adjust_model(peft_model: ModuleType, told: Callable[[str], None]) -> None:
    """Gather the weights in `PeftModel.save_pretrained`, which would write this rank's part of each, or raise.

    Args:
        peft_model: `peft.peft_model`.
        told: see `clients.watch`.
    """
    peft_model.PeftModel.save_pretrained = saving_whole(peft_model.PeftModel.save_pretrained)
    told("PEFT: save_pretrained of a sharded model writes whole adapters; call it on every rank")


def _shown(name: str, paths: dict[str, str]) -> str:
    """A parameter's name with the wrapper's in it.

    Args:
        paths: of modules, by what they are without it.
    """
    path, dot, own = name.rpartition(".")
    return f"{paths.get(path, path)}{dot}{own}"
