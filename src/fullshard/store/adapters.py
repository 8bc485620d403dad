"""Adapters in PEFT's format: adapter_model.safetensors, and adapter_config.json.

Which weights belong to an adapter, and under which names, PEFT says itself (`get_peft_model_state_dict`): it is asked
with tensors on the meta device, on the first rank, and the others are told.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.names import Table
from ..errors import CheckpointError, ConfigError
from ..names import plain_class, plain_name
from .lora import is_peft_model

STEM = "adapter_model"
CONFIG = "adapter_config.json"
_DECIDES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings that decide what weights mean: other ones in a folder than in the model give other outputs."""


class Adapter:
    """One adapter of a model that PEFT made.

    Args:
        model: the model, wrapped or not.
        wanted: the adapter's name; True: the active one.

    Attributes:
        model: PEFT's, without what wraps it.
        name: the adapter's.
        config: PEFT's settings of it.

    Raises:
        ConfigError: no such adapter, or peft is not installed.
    """

    def __init__(self, model: nn.Module, wanted: bool | str) -> None:
        try:
            import peft
        except ImportError as error:
            raise ConfigError(
                "Adapters are saved and loaded in PEFT's format, by PEFT.", got=str(error), remedy="pip install peft"
            ) from error
        self._names_of = peft.get_peft_model_state_dict
        adapted = next(((path, m) for path, m in model.named_modules() if is_peft_model(m)), None)
        if adapted is None:
            raise ConfigError(
                "The model has no adapter of PEFT's.",
                got=type(model).__name__,
                remedy="adapt it by peft.get_peft_model before it is sharded",
            )
        path, self.model = adapted
        self._prefix = f"{path}." if path else ""
        configs: Mapping[str, Any] = self.model.peft_config
        active = list(self.model.active_adapters)
        if wanted is True and len(active) != 1:
            raise ConfigError("adapter=True needs one active adapter.", got=active, remedy="name one: adapter='...'")
        self.name: str = active[0] if wanted is True else str(wanted)
        if self.name not in configs:
            raise ConfigError("The model has no adapter of this name.", expected=", ".join(configs), got=self.name)
        self.config: Any = configs[self.name]

    def names(self, table: Table) -> dict[str, str]:
        """By the name in PEFT's files, the name in `table`.

        Raises:
            CheckpointError: PEFT makes a tensor of several.
        """
        stand_ins: dict[str, torch.Tensor] = {}
        name_of: dict[int, str] = {}
        for row in Table(self.model, lambda name: name).parameters:
            for name in row.names:
                stand_ins[name] = torch.empty(row.shape, device="meta")
                name_of[id(stand_ins[name])] = plain_name(self._prefix + name)
        rows = {name: row for row in table.parameters for name in row.names}
        names = {}
        names_of: Any = self._names_of  # whose annotations differ between versions of PEFT
        of_adapter = names_of(self.model, state_dict=dict(stand_ins), adapter_name=self.name)
        for name, stand_in in of_adapter.items():
            owner = rows.get(name_of.get(id(stand_in), ""))
            if owner is None:
                raise CheckpointError(
                    "An adapter has a tensor that is no parameter of the model as it is.",
                    parameter=name,
                    got=f"an adapter of type {self.config.peft_type}",
                    remedy="save it from a model on one rank, by PEFT",
                )
            names[plain_name(name)] = owner.name
        return names

    def save_config(self, folder: Path) -> None:
        """Write adapter_config.json, as `PeftModel.save_pretrained` does."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        base = self.model.get_base_model()
        kind = plain_class(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping if config.task_type is None else None)

    def check_config(self, folder: Path) -> None:
        """Compare adapter_config.json with the model's adapter.

        Raises:
            CheckpointError: there is none, or a setting that decides what weights mean is another.
        """
        try:
            settings = json.loads((folder / CONFIG).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                "A folder holds no adapter of PEFT's.", expected=f"{CONFIG} in {folder}", got=f"{error}"[:200]
            ) from None
        of_model = self.config.to_dict()
        for key in _DECIDES:
            there = settings.get(key) if isinstance(settings, dict) else None
            here = getattr(of_model.get(key), "value", of_model.get(key))
            if (there or None) != (here or None):
                raise CheckpointError(
                    "An adapter's settings differ from the model's; nothing was loaded.",
                    parameter=key,
                    expected=repr(here),
                    got=repr(there)[:100],
                    remedy="make the model's adapter from the folder: peft.PeftConfig.from_pretrained(folder)",
                )
