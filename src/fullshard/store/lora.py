"""Merges LoRA's weights into those they adapt, under the names of the base model.

PEFT's layers are recognized by their documented attributes: `base_layer`, `lora_A` and `lora_B` by adapter, `scaling`,
`active_adapters`. An adapter adds scaling * B @ A (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
2021, section 4.1). PEFT itself is not imported.

    base_model.model.block.q_proj.base_layer.weight         block.q_proj.weight, the sum
    base_model.model.block.q_proj.lora_A.default.weight     (none)
    base_model.model.head.original_module.weight            (none, if an active adapter replaces it)
    base_model.model.head.modules_to_save.default.weight    head.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..checkpoint.table import Named, Table
from ..checkpoint.whole import Wanted
from ..errors import ConfigError
from ..text import plain_path

_BASE = ".base_layer."


@dataclass(frozen=True, eq=False)
class Delta:
    """An adapter's addition to a tensor: `scale` times `left` @ `right`, or times `left` if `right` is None.

    Attributes:
        left, right: weights of the adapter.
        transposed: whether to add the transposed product.
    """

    left: Wanted
    right: Wanted | None
    scale: float
    transposed: bool = False

    def add_to(self, whole: torch.Tensor, factors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Add it to `whole`, in place, or to a copy in a wider dtype; returns the sum.

        Args:
            factors: the whole weights of adapters, by id of the `Wanted`.
        """
        left = factors[id(self.left)]
        right = factors[id(self.right)] if self.right is not None else None
        dtype = torch.promote_types(whole.dtype, left.dtype)
        dtype = dtype if right is None else torch.promote_types(dtype, right.dtype)
        whole = whole.to(dtype)
        if right is None:
            return whole.add_(left.to(dtype), alpha=self.scale)
        first, second = left.flatten(1).to(dtype), right.flatten(1).to(dtype)
        if self.transposed:
            first, second = second.T, first.T
        return whole.flatten(1).addmm_(first, second, alpha=self.scale).view(whole.shape)


@dataclass(frozen=True, eq=False)
class Export:
    """A tensor that `full_parameters` yields.

    Attributes:
        wanted: the tensor to gather.
        deltas: additions to it.
        dtype: of the sum, if there are deltas; None: the dtype in which it was added.
    """

    wanted: Wanted
    deltas: tuple[Delta, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def final_dtype(self) -> torch.dtype:
        """The dtype of the tensor that `finish` returns."""
        return self.dtype or self.wanted.result_dtype if self.deltas else self.wanted.result_dtype

    @property
    def factors(self) -> Iterator[Wanted]:
        """The weights of adapters, which must be gathered before `wanted`."""
        for delta in self.deltas:
            yield delta.left
            if delta.right is not None:
                yield delta.right

    def finish(self, whole: torch.Tensor, factors: dict[int, torch.Tensor]) -> torch.Tensor:
        """Add the deltas, and remove their weights from `factors`; see `Delta.add_to`."""
        if not self.deltas:
            return whole
        with torch.no_grad():
            for delta in self.deltas:
                whole = delta.add_to(whole, factors)
            for factor in self.factors:
                del factors[id(factor)]
            return whole.to(self.final_dtype)


@dataclass
class Adapted:
    """The parts of a PEFT model, by names in its table.

    Attributes:
        prefix: of the base model's names.
        adapters: prefixes of adapters' weights, which the base model does not have.
        copies: prefixes of a module that an adapter replaces and of its replacements -> the prefix in the base model.
        unused: those prefixes in `copies` whose modules the model does not run.
        layers: LoRA's layers, by path.
    """

    prefix: str = ""
    adapters: list[str] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    layers: dict[str, Any] = field(default_factory=dict)

    def base_name(self, name: str, unused: bool = False) -> str | None:
        """The name of a tensor in the base model; None if the base model does not have it.

        Args:
            unused: include modules that the model does not run, because an adapter replaces them.
        """
        if name.startswith(tuple(self.adapters if unused else (*self.adapters, *self.unused))):
            return None
        for old, new in self.copies.items():
            if name.startswith(old):
                name = new + name[len(old) :]
        name = name.replace(_BASE, ".")
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None


def adapted(model: nn.Module) -> Adapted:
    """The parts of a PEFT model; see `Adapted`.

    Raises:
        ConfigError: there is no adapter, or an adapter that cannot be merged.
    """
    parts = Adapted()
    modules = {plain_path(path): module for path, module in model.named_modules()}
    for path, module in modules.items():
        if is_peft_model(module) and not parts.prefix:
            start = f"{path}." if path else ""
            is_nested = any(name.startswith(f"{start}base_model.model.") for name in modules)
            parts.prefix = f"{start}base_model.model." if is_nested else f"{start}base_model."
        children = module._modules
        if "original_module" in children and "modules_to_save" in children:
            _add_saved_module(parts, path, module)
        elif "base_layer" in children:
            parts.layers[path] = module
            parts.adapters += [f"{path}.{name}." for name in getattr(module, "adapter_layer_names", ())]
        elif isinstance(getattr(module, "adapter_layer_names", None), tuple):
            raise _unmergeable(path, f"an adapter of class {type(module).__name__}")
    if not parts.layers and not parts.copies:
        raise ConfigError(
            "merge_lora: the model has no LoRA adapter.",
            got=type(model).__name__,
            remedy="omit merge_lora, or adapt the model by peft.get_peft_model before it is sharded",
        )
    return parts


def is_peft_model(module: nn.Module) -> bool:
    """Whether it is a PEFT model, which contains the adapted model as `base_model`."""
    return hasattr(type(module), "get_base_model") and hasattr(type(module), "active_adapters")


def _add_saved_module(parts: Adapted, path: str, module: Any) -> None:
    """Add a module that adapters replace (PEFT's `modules_to_save`)."""
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if len(active) > 1:
        raise _unmergeable(path, f"several adapters that replace it: {', '.join(active)}")
    used = f"{path}.modules_to_save.{active[0]}." if active else f"{path}.original_module."
    copies = [f"{path}.original_module.", *(f"{path}.modules_to_save.{name}." for name in module.modules_to_save)]
    parts.copies |= dict.fromkeys(copies, f"{path}.")
    parts.unused += [name for name in copies if name != used]


def merged_parameters(model: nn.Module, table: Table, dtype: torch.dtype | None, buffers: bool) -> list[Export]:
    """The base model's parameters, in its order, with the additions of the active adapters.

    Raises:
        ConfigError: see `adapted`; or a parameter belongs neither to the base model nor to an adapter.
    """
    parts = adapted(model)
    rows = {row.name: row for row in table.parameters}
    deltas: dict[str, list[Delta]] = {}
    for path, layer in parts.layers.items():
        for adapter in layer.active_adapters:
            if adapter not in layer.merged_adapters:
                _add_deltas(deltas, rows, path, layer, adapter)
    exports = []
    for row in table.parameters:
        name = parts.base_name(row.name)
        if name is None:
            if not row.name.startswith((*parts.adapters, *parts.unused)):
                raise _unmergeable(row.name, "a parameter outside the base model")
            continue
        added = tuple(deltas.pop(row.name, ()))
        exports.append(Export(Wanted(name, row, None if added else dtype), added, dtype))
    if deltas:
        raise _unmergeable(next(iter(deltas)), "an adapter of a weight that the model does not have")
    for row in table.buffer_rows if buffers else ():
        name = parts.base_name(row.name)
        if name is not None:
            exports.append(Export(Wanted(name, row, dtype)))
    return exports


def _add_deltas(deltas: dict[str, list[Delta]], rows: Mapping[str, Named], path: str, layer: Any, adapter: str) -> None:
    """Add an adapter's deltas for the weight and the bias of a layer."""
    linear, embedding = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_embedding_A.{adapter}"
    if linear not in rows and embedding not in rows:
        if any(name.startswith(f"{path}.") and f".{adapter}" in name for name in rows):
            raise _unmergeable(path, f"an adapter of class {type(layer).__name__}")
        return  # this adapter does not adapt this layer
    odd = [key for key in ("use_dora", "lora_variant") if getattr(layer, key, {}).get(adapter)]
    if odd:
        raise _unmergeable(path, f"{odd[0]} of adapter {adapter!r}")
    is_embedding, scale = embedding in rows, float(layer.scaling[adapter])
    name_of_a = embedding if is_embedding else linear
    a, b = Wanted("", rows[name_of_a]), Wanted("", rows[name_of_a.replace("_A.", "_B.")])
    weight = rows.get(f"{path}.base_layer.weight")
    transposed = is_embedding or bool(getattr(layer, "fan_in_fan_out", False))
    shape = [b.shape[0], torch.Size(a.shape[1:]).numel()]
    shape = shape[::-1] if transposed else shape
    fits = weight is not None and [weight.shape[0], torch.Size(weight.shape[1:]).numel()] == shape
    if weight is None or not fits or not weight.parameter.dtype.is_floating_point:
        raise _unmergeable(path, f"a {type(layer).__name__} whose weight is not of shape {shape} in floating point")
    deltas.setdefault(weight.name, []).append(Delta(b, a, scale, transposed))
    bias = rows.get(f"{path}.lora_B.{adapter}.bias")
    if bias is not None:
        deltas.setdefault(f"{path}.base_layer.bias", []).append(Delta(Wanted("", bias), None, scale))


def _unmergeable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        "merge_lora: an adapter cannot be merged tensor by tensor.",
        parameter=name,
        expected="LoRA on linear, embedding and convolution layers, and modules_to_save",
        got=reason,
        remedy="save the adapter (save_safetensors(..., adapter=True)) and merge it with peft's merge_and_unload()",
    )
