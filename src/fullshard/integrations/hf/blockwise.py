"""Weights that are quantised while they are read: one unit is whole in host memory at a time, never the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...api.functional.fully_shard import fully_shard
from ...api.wrapping import plan_wrapping
from ...errors import CheckpointError
from ...store.formats.safetensors_folder import SafetensorsSource
from ...store.lora import adapted, is_peft_model
from ...store.ranks import Ranks
from ...store.source import MODEL
from ..quantised import by_rows
from ..sharding import plan_sharding


def read_by_units(
    model: nn.Module,
    folder: Path,
    rename: Callable[[str], str],
    made: dict[str, torch.Tensor],
    quantise: Callable[[Any], object],
    sharding: dict[str, Any],
) -> None:
    """Read, quantise and shard one unit after the other, then what is left. Collective.

    Args:
        model: parameters on meta.
        folder: of safetensors files.
        rename: from what they call a tensor to what the model does.
        made: values of parameters that are in no file, by name; the first rank's are taken.
        quantise: given each block with its weights on the CPU; puts others in their places.
        sharding: as `shard` takes it.

    Raises:
        ConfigError: `quantise` failed to leave weights that can be split; see `by_rows`.
        CheckpointError: a shape that is another in the files.
    """
    policy, settings = plan_sharding(model, sharding)
    blocks = [block for _, block, _ in plan_wrapping(model, policy)]
    if dist.is_initialized():
        made = Ranks(None).share(made)
    base_name = (
        adapted(model).base_name if any(map(is_peft_model, model.modules())) else lambda name, unused=False: name
    )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    values = _Values(SafetensorsSource(folder), made, names, base_name)
    values.source.rename(rename)
    try:
        for unit in [*blocks, model]:
            values.fill(unit)
            if unit is not model:
                quantise(unit)
                by_rows(unit)
            if dist.is_initialized():
                fully_shard(unit, **settings)
    finally:
        values.source.close()


class _Values:
    """What parameters are filled with.

    Args:
        source: the files.
        made: see `read_by_units`.
        names: of parameters on meta, by their ids.
        base_name: what files call a parameter.
    """

    def __init__(
        self,
        source: SafetensorsSource,
        made: dict[str, torch.Tensor],
        names: dict[int, list[str]],
        base_name: Callable[..., str | None],
    ) -> None:
        self.source, self.made, self.names, self.base_name = source, made, names, base_name
        self._filled: dict[int, nn.Parameter] = {}

    def fill(self, unit: nn.Module) -> None:
        """Put parameters with values, on the CPU, in the places of those on meta."""
        for module in unit.modules():
            for own, old in module._parameters.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in self._filled:
                    value = self._value(old)
                    self._filled[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
                module._parameters[own] = self._filled[id(old)]
        self._filled = {
            key: one for key, one in self._filled.items() if len(self.names[key]) > 1
        }  # tied elsewhere, too

    def _value(self, old: nn.Parameter) -> torch.Tensor:
        known = self.names[id(old)]
        for name in known:
            inside = self.base_name(name, unused=True)
            if inside is not None and MODEL + inside in self.source.entries:
                found = self.source.read(MODEL + inside)
                if found.shape != old.shape:
                    raise CheckpointError(
                        "Safetensors files do not fit the model: a tensor has another shape.",
                        parameter=name,
                        expected=tuple(old.shape),
                        got=tuple(found.shape),
                        code="K169",
                    )
                return found.to(old.dtype, copy=True)
        for name in known:
            if name in self.made:
                return self.made[name]
        raise CheckpointError("A parameter is in no file, and was not made either.", parameter=known[0], code="K168")
