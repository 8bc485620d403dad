"""LoRA's weights added to those they adapt, under the names of the base model.

PEFT's layers are recognised by what they are made of, as PEFT documents them: `base_layer`, `lora_A` and `lora_B` by
adapter, `scaling`, `active_adapters`. What an adapter adds is scaling * B @ A (E. Hu et al., "LoRA: Low-Rank Adaptation
of Large Language Models", 2021, section 4.1). PEFT itself is not imported.

    base_model.model.block.q_proj.base_layer.weight         block.q_proj.weight, with what is added
    base_model.model.block.q_proj.lora_A.default.weight     (nothing of its own)
    base_model.model.head.original_module.weight            (nothing, where an active adapter replaces it)
    base_model.model.head.modules_to_save.default.weight    head.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..checkpoint.names import Named, Table
from ..checkpoint.whole import Wanted
from ..errors import ConfigError
from ..names import plain_path

_BASE = ".base_layer."


@dataclass(frozen=True, eq=False)
class Delta:
    """What one adapter adds to one tensor: `scale` times `left` @ `right`, or times `left` where that is all.

    Attributes:
        left, right: weights of the adapter.
        transposed: the product is added transposed.
    """

    left: Wanted
    right: Wanted | None
    scale: float
    transposed: bool = False

    def add_to(self, whole: torch.Tensor, kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """`whole`, changed in place, or a wider copy."""
        left = kept[id(self.left)]
        right = kept[id(self.right)] if self.right is not None else None
        dtype = torch.promote_types(whole.dtype, left.dtype)
        dtype = dtype if right is None else torch.promote_types(dtype, right.dtype)
        whole = whole.to(dtype)
        if right is None:
            return whole.add_(left.to(dtype), alpha=self.scale)
        first, second = left.flatten(1).to(dtype), right.flatten(1).to(dtype)
        if self.transposed:
            first, second = second.T, first.T
        flat = whole.flatten(1)
        flat = flat.addmm_(first, second, alpha=self.scale)
        return flat.view(whole.shape)


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that users get.

    Attributes:
        wanted: what it is made of.
        deltas: what is added.
        dtype: to give it in, if something was added; else it is made in that.
    """

    wanted: Wanted
    deltas: tuple[Delta, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return self.wanted.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.wanted.shape

    @property
    def given_dtype(self) -> torch.dtype:
        """Of what users get."""
        return self.dtype or self.wanted.given_dtype if self.deltas else self.wanted.given_dtype

    @property
    def before(self) -> Iterator[Wanted]:
        """What must have been made whole before it is."""
        for delta in self.deltas:
            yield delta.left
            if delta.right is not None:
                yield delta.right

    def finish(self, whole: torch.Tensor, kept: dict[int, torch.Tensor]) -> torch.Tensor:
        """Add what is to be added, and forget the adapters' weights."""
        if not self.deltas:
            return whole
        with torch.no_grad():
            for delta in self.deltas:
                whole = delta.add_to(whole, kept)
            for one in self.before:
                del kept[id(one)]
            return whole.to(self.given_dtype)


@dataclass
class Adapted:
    """What PEFT made of a model, by names in its table.

    Attributes:
        prefix: what the base model's names begin with.
        own: prefixes of adapters' weights, which the base model does not have.
        copies: prefixes of a module that an adapter replaces and of what replaces it, and what the base model has.
        unused: of these, the prefixes of those that the model does not run.
        layers: LoRA's layers, by path.
    """

    prefix: str = ""
    own: list[str] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    layers: dict[str, Any] = field(default_factory=dict)

    def base_name(self, name: str, unused: bool = False) -> str | None:
        """What the base model calls a tensor; None: it has none of it.

        Args:
            unused: also of modules that the model does not run, as an adapter replaces them.
        """
        if any(name.startswith(own) for own in (self.own if unused else (*self.own, *self.unused))):
            return None
        for old, new in self.copies.items():
            if name.startswith(old):
                name = new + name[len(old) :]
        name = name.replace(_BASE, ".")
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None


def adapted(model: nn.Module) -> Adapted:
    """See `Adapted`.

    Raises:
        ConfigError: there is no adapter, or one of a kind that cannot be merged.
    """
    facts = Adapted()
    modules = {plain_path(path): module for path, module in model.named_modules()}
    for path, module in modules.items():
        if is_peft_model(module) and not facts.prefix:
            start = f"{path}." if path else ""
            inside = any(name.startswith(f"{start}base_model.model.") for name in modules)
            facts.prefix = f"{start}base_model.model." if inside else f"{start}base_model."
        parts = module._modules
        if "original_module" in parts and "modules_to_save" in parts:
            _add_saved_module(facts, path, module)
        elif "base_layer" in parts:
            facts.layers[path] = module
            facts.own += [f"{path}.{name}." for name in getattr(module, "adapter_layer_names", ())]
        elif isinstance(getattr(module, "adapter_layer_names", None), tuple):
            raise _unmergeable(path, f"an adapter of class {type(module).__name__}")
    if not facts.layers and not facts.copies:
        raise ConfigError(
            "merge_lora: the model has no LoRA adapter.",
            got=type(model).__name__,
            remedy="omit merge_lora, or adapt the model by peft.get_peft_model before it is sharded",
        )
    return facts


def is_peft_model(module: nn.Module) -> bool:
    """Whether PEFT made it around a model, which it has as `base_model`."""
    return hasattr(type(module), "get_base_model") and hasattr(type(module), "active_adapters")


def _add_saved_module(facts: Adapted, path: str, module: Any) -> None:
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if len(active) > 1:
        raise _unmergeable(path, f"several adapters that replace it: {', '.join(active)}")
    used = f"{path}.modules_to_save.{active[0]}." if active else f"{path}.original_module."
    every = [f"{path}.original_module.", *(f"{path}.modules_to_save.{name}." for name in module.modules_to_save)]
    facts.copies |= dict.fromkeys(every, f"{path}.")
    facts.unused += [name for name in every if name != used]


def merged_parameters(model: nn.Module, table: Table, dtype: torch.dtype | None, buffers: bool) -> list[Given]:
    """The base model's parameters, in its order, with what the active adapters add.

    Raises:
        ConfigError: see `adapted`; or a parameter that is neither the base model's nor an adapter's.
    """
    facts = adapted(model)
    rows = {row.name: row for row in table.parameters}
    deltas: dict[str, list[Delta]] = {}
    for path, layer in facts.layers.items():
        for adapter in layer.active_adapters:
            if adapter not in layer.merged_adapters:
                _add_deltas(deltas, rows, path, layer, adapter)
    parameters = []
    for row in table.parameters:
        name = facts.base_name(row.name)
        if name is None:
            if not any(row.name.startswith(own) for own in (*facts.own, *facts.unused)):
                raise _unmergeable(row.name, "a parameter of no part of the base model")
            continue
        added = tuple(deltas.pop(row.name, ()))
        parameters.append(Given(Wanted(name, row, None if added else dtype), added, dtype))
    if deltas:
        raise _unmergeable(next(iter(deltas)), "an adapter of a weight that the model does not have")
    for name, buffer in table.buffers.items() if buffers else ():
        base = facts.base_name(name)
        if base is not None:
            parameters.append(Given(Wanted(base, buffer, dtype)))
    return parameters


def _add_deltas(deltas: dict[str, list[Delta]], rows: Mapping[str, Named], path: str, layer: Any, adapter: str) -> None:
    """What one adapter adds to one layer's weight and bias."""
    linear, embedding = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_embedding_A.{adapter}"
    if linear not in rows and embedding not in rows:
        if any(name.startswith(f"{path}.") and f".{adapter}" in name for name in rows):
            raise _unmergeable(path, f"an adapter of class {type(layer).__name__}")
        return  # this adapter does not adapt this layer
    odd = [key for key in ("use_dora", "lora_variant") if getattr(layer, key, {}).get(adapter)]
    if odd:
        raise _unmergeable(path, f"{odd[0]} of adapter {adapter!r}")
    embeds, scale = embedding in rows, float(layer.scaling[adapter])
    first = embedding if embeds else linear
    a, b = Wanted("", rows[first]), Wanted("", rows[first.replace("_A.", "_B.")])
    weight = rows.get(f"{path}.base_layer.weight")
    turned = embeds or bool(getattr(layer, "fan_in_fan_out", False))
    shape = [b.shape[0], torch.Size(a.shape[1:]).numel()]
    shape = shape[::-1] if turned else shape
    fits = weight is not None and [weight.shape[0], torch.Size(weight.shape[1:]).numel()] == shape
    if weight is None or not fits or not weight.parameter.dtype.is_floating_point:
        raise _unmergeable(path, f"a {type(layer).__name__} whose weight is not of shape {shape} in floating point")
    deltas.setdefault(weight.name, []).append(Delta(b, a, scale, turned))
    bias = rows.get(f"{path}.lora_B.{adapter}.bias")
    if bias is not None:
        deltas.setdefault(f"{path}.base_layer.bias", []).append(Delta(Wanted("", bias), None, scale))


def _unmergeable(where: str, what: str) -> ConfigError:
    return ConfigError(
        "merge_lora: an adapter cannot be merged tensor by tensor.",
        parameter=where,
        expected="LoRA on linear, embedding and convolution layers, and modules_to_save",
        got=what,
        remedy="save the adapter (save_safetensors(..., adapter=True)) and merge it with peft's merge_and_unload()",
    )
