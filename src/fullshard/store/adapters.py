"""Adapters in PEFT's format: adapter_model.safetensors, and adapter_config.json.

PEFT itself decides which weights belong to an adapter, and their names: the first rank calls
`get_peft_model_state_dict` with tensors on the meta device, and sends the names to the other ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.table import Named, Table
from ..errors import CheckpointError, ConfigError
from ..text import plain_class, plain_name
from .contents import table_of
from .lora import is_peft_model
from .ranks import Ranks

STEM = "adapter_model"
CONFIG = "adapter_config.json"
_SETTINGS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"
)  # fmt: skip
"""Settings that change the meaning of the weights: with different values the model's outputs differ."""


class Adapter:
    """An adapter of a PEFT model.

    Args:
        model: the model, wrapped or not.
        name: the adapter's name; True: the active adapter.

    Attributes:
        model: the PEFT model, without wrappers.
        name: the adapter's name.
        config: the adapter's settings.
        table: of the whole model.
        rows: the adapter's parameters in `table`, by name in PEFT's files.

    Raises:
        ConfigError: no such adapter, or peft is not installed.
    """

    @classmethod
    def of(cls, model: nn.Module, name: bool | str, ranks: Ranks) -> Adapter:
        """`model`'s adapter of this name, with its rows. Collective: only the first rank calls PEFT.

        Raises:
            CheckpointError: PEFT computes a tensor from several parameters.
        """
        adapter = ranks.together("looking for the model's adapter", lambda: cls(model, name))
        names = ranks.first("looking for the adapter's parameters", adapter._names)
        rows = {row.name: row for row in adapter.table.parameters}
        adapter.rows = {file_name: rows[row_name] for file_name, row_name in names.items()}
        return adapter

    def __init__(self, model: nn.Module, name: bool | str) -> None:
        self.table = table_of(model)
        self.rows: dict[str, Named] = {}
        try:
            import peft
        except ImportError as error:
            raise ConfigError(
                "Adapters are saved and loaded in PEFT's format, by PEFT.", got=str(error), remedy="pip install peft"
            ) from error
        self._state_dict_of: Any = peft.get_peft_model_state_dict  # its annotations differ between versions of PEFT
        peft_model: tuple[str, Any] | None = next(
            (item for item in model.named_modules() if is_peft_model(item[1])), None
        )
        if peft_model is None:
            raise ConfigError(
                "The model has no PEFT adapter.",
                got=type(model).__name__,
                remedy="adapt it by peft.get_peft_model before it is sharded",
            )
        path, self.model = peft_model
        self._prefix = f"{path}." if path else ""
        configs: Mapping[str, Any] = self.model.peft_config
        active = list(self.model.active_adapters)
        if name is True and len(active) != 1:
            raise ConfigError(
                "adapter=True needs exactly one active adapter.", got=active, remedy="name the adapter: adapter='...'"
            )
        self.name: str = active[0] if name is True else str(name)
        if self.name not in configs:
            raise ConfigError("The model has no adapter of this name.", expected=", ".join(configs), got=self.name)
        self.config: Any = configs[self.name]

    def _names(self) -> dict[str, str]:
        """The names in PEFT's files, each with the name in `table`."""
        stand_ins: dict[str, torch.Tensor] = {}
        name_of: dict[int, str] = {}
        for row in Table(self.model, lambda name: name).parameters:
            for name in row.names:
                stand_ins[name] = torch.empty(row.shape, device="meta")
                name_of[id(stand_ins[name])] = plain_name(self._prefix + name)
        rows = {name: row for row in self.table.parameters for name in row.names}
        names = {}
        of_adapter = self._state_dict_of(self.model, state_dict=dict(stand_ins), adapter_name=self.name)
        for name, stand_in in of_adapter.items():
            owner = rows.get(name_of.get(id(stand_in), ""))
            if owner is None:
                raise CheckpointError(
                    "An adapter has a tensor that is not a parameter of the model.",
                    parameter=name,
                    got=f"an adapter of type {self.config.peft_type}",
                    remedy="save it from a model on a single rank, by PEFT",
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
            CheckpointError: it does not exist, or a setting in `_SETTINGS` differs.
        """
        try:
            settings = json.loads((folder / CONFIG).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                "A folder contains no PEFT adapter.", expected=f"{CONFIG} in {folder}", got=f"{error}"[:200]
            ) from None
        of_model = self.config.to_dict()
        for key in _SETTINGS:
            saved = settings.get(key) if isinstance(settings, dict) else None
            expected = getattr(of_model.get(key), "value", of_model.get(key))
            if (saved or None) != (expected or None):
                raise CheckpointError(
                    "An adapter's settings differ from the model's; nothing was loaded.",
                    parameter=key,
                    expected=repr(expected),
                    got=repr(saved)[:100],
                    remedy="create the model's adapter from the folder: peft.PeftConfig.from_pretrained(folder)",
                )
