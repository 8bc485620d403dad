"""Which modules of a Hugging Face model become units, and sharding it by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ...api.functional.fully_shard import fully_shard
from ...api.functional.module import register_fsdp_forward_method
from ...errors import ConfigError
from ...policies import MixedPrecisionPolicy
from ...runtime import runners_in
from ..given import check_sharding
from ..quantised import by_rows

ModelT = TypeVar("ModelT", bound=nn.Module)

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def unit_classes(model: nn.Module, names: Iterable[str | type] | None = None) -> set[type[nn.Module]]:
    """The classes of a model's blocks: those that it says must not be split (`_no_split_modules`).

    Args:
        model: a model of transformers, or one that PEFT made around it.
        names: classes, or their names, to take in place of the model's own.

    Returns:
        Classes of modules in `model`; empty if neither the model nor `names` says any.

    Raises:
        ConfigError: a name in `names` that no module's class has.
    """
    inside = [module for module in model.modules() if module is not model]
    if names is None:
        planned = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        return {type(module) for module in inside if type(module).__name__ in planned}
    wanted, found = list(names), set()
    for one in wanted:
        classes = {type(m) for m in inside if (type(m).__name__ == one if isinstance(one, str) else type(m) is one)}
        if not classes:
            raise ConfigError(
                "units names a class that no module of the model has.",
                expected=f"some of {', '.join(sorted({type(m).__name__ for m in inside}))}",
                got=one if isinstance(one, str) else getattr(one, "__name__", repr(one)),
                remedy="leave units away to take the model's own plan (_no_split_modules)",
            )
        found |= classes
    return found


def shard(model: ModelT, *, units: Any = None, mixed_precision: str = "no", **settings: Any) -> ModelT:
    """Shard a Hugging Face model, in place: a unit of each of its blocks, and one of the rest.

    Shared weights stay shared. Build optimizers after it. The model's own `generate` gathers as its forward does, so
    that ranks whose texts end earlier go on in step (transformers' `synced_gpus`, which it sets by itself).

    Args:
        model: of transformers, or made by PEFT around one; on the CPU, the mesh's device, or meta (then `to_empty`, or
            see `from_pretrained`).
        units: classes of modules, or their names; or a policy, as `fully_shard(auto_wrap_policy=)` takes it. None: as
            the model says (`unit_classes`), else the blocks that it repeats.
        mixed_precision: "no", "bf16" or "fp16", as `TrainingArguments` and `Accelerator` say it: gathers and computes
            in 16 bits, reduces in float32, and holds what trains in float32, whatever it was loaded in. Frozen weights
            stay as they are. `mp_policy=` in its place says more.
        **settings: of `fullshard.fully_shard`: mesh, reshard_after_forward, layout, offload_policy, ...

    Returns:
        `model` itself.

    Raises:
        ConfigError: units that the model does not have, a word for mixed_precision that is none, both that and
            `mp_policy`, and whatever `fully_shard` refuses. Nothing has changed then.
    """
    units, settings = settings_of({"units": units, "mixed_precision": mixed_precision, **settings})
    policy = wrap_policy(model, units)
    by_rows(model)
    fully_shard(model, auto_wrap_policy=policy, **settings)
    if mixed_precision != "no":
        hold_in_float32(model)
    serve_generate(model)
    return model


def settings_of(sharding: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Of `shard`'s arguments, the units; and those that `fully_shard` takes.

    Raises:
        ConfigError: see `shard`.
    """
    check_sharding(sharding, "fullshard.integrations.hf.shard")
    settings = dict(sharding)
    units, word = settings.pop("units", None), settings.pop("mixed_precision", "no")
    if word not in _DTYPES:
        raise ConfigError("mixed_precision is a word.", expected=" or ".join(map(repr, _DTYPES)), got=repr(word))
    dtype = _DTYPES[word]
    if dtype is not None:
        if "mp_policy" in settings:
            raise ConfigError(
                "mixed_precision and mp_policy say the same in two ways.",
                got=f"mixed_precision={word!r}, mp_policy={settings['mp_policy']}",
                remedy='give mp_policy with mixed_precision="no"',
            )
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return units, settings


def serve_generate(model: nn.Module) -> None:
    """Let a sharded model's `generate` gather as its forward does: PEFT's calls the model inside, past the unit."""
    if callable(getattr(model, "generate", None)):
        register_fsdp_forward_method(model, "generate")


def wrap_policy(model: nn.Module, units: Any) -> Any:
    """What `fully_shard(auto_wrap_policy=)` takes for `units`.

    Raises:
        ConfigError: see `unit_classes`.
    """
    units = [units] if isinstance(units, str) and units != "auto" else units
    named = isinstance(units, (set, frozenset, tuple, list))
    if units is not None and not named:
        return [units] if isinstance(units, type) else units
    return unit_classes(model, units) or "auto"


def hold_in_float32(model: nn.Module) -> None:
    """Let what trains be held in float32, so that steps smaller than 16 bits can tell are not lost.

    Args:
        model: sharded. Only what this rank owns grows.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` or `FullyShardedDataParallel` holds any of its parameters."""
    return bool(runners_in(model))
