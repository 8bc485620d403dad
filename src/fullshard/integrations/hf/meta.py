"""A model of transformers before it has weights: parameters on meta, buffers as the model makes them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from ...errors import CheckpointError, ConfigError, message
from ...store.formats.safetensors_folder import SafetensorsSource
from ...store.source import MODEL

_RECOMPUTED = r"rotary_emb\.inv_freq$"
"""What older files hold of buffers that models compute themselves."""


def on_meta(source: Any, folder: Path, dtype: torch.dtype | None) -> Any:
    """The model that `source` and the folder's configuration say, its parameters on meta; what is tied is one.

    Raises:
        ConfigError: see `from_pretrained`.
    """
    config, cls = source, source
    if isinstance(source, type):
        if not hasattr(source, "from_pretrained"):
            raise _no_source(source)
        own = getattr(source, "config_class", None) or transformers.AutoConfig
        config = own.from_pretrained(str(folder), local_files_only=True)
    elif isinstance(source, transformers.PretrainedConfig):
        named = next(iter(source.architectures or ()), "")
        cls = getattr(transformers, named, None)
    if cls is None or not isinstance(config, transformers.PretrainedConfig):
        raise _no_source(source)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "The folder holds a model that was quantised; its weights are of classes of their own.",
            got=f"quantization_config in {folder / 'config.json'}",
            remedy="read the weights that were quantised, and quantise block by block (docs/clients/peft.md)",
        )
    dtype = dtype or _dtype_of(config)
    with init_empty_weights(include_buffers=False):  # under torch.device("meta") buffers would have no values either
        model = (
            cls.from_config(config, dtype=dtype)
            if hasattr(cls, "from_config")
            else cls._from_config(config, dtype=dtype)
        )
    model.tie_weights()  # parameters went to meta one by one, each name's its own
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 and _stays_float32(model, name, parameter.dtype):
            parameter.data = parameter.data.float()
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def _no_source(source: Any) -> ConfigError:
    return ConfigError(
        "from_pretrained builds a model of transformers.",
        expected="a class with from_pretrained, or a configuration whose architectures name one",
        got=getattr(source, "__name__", type(source).__name__),
    )


def _dtype_of(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found


def _stays_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether the model holds a parameter in float32 whatever is asked for."""
    held = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        held |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return any(re.search(rf"(^|\.){one}(\.|$)", name) for one in held)


def fit(model: Any, folder: Path, strict: bool) -> Callable[[str], str]:
    """Compare the model's names with those in the files; what files lack gets values, on the CPU.

    As transformers does, a base model (`AutoModel`) takes its part of files of a model around one, and such a model
    takes a base model's: names lose or gain `base_model_prefix`. What lies beside a base model is warned of.

    Returns:
        Given a tensor's name in the files, that in the model.

    Raises:
        CheckpointError: names differ, and `strict`; or a parameter without values that the model does not initialise.
    """
    files = SafetensorsSource(folder)
    written = {name.removeprefix(MODEL) for name in files.entries}
    files.close()
    named = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "") + "."
    names_here = {name: _name_here(name, prefix, named) for name in written}
    there = set(names_here.values())
    is_base = any(len(here) < len(name) for name, here in names_here.items())
    names: dict[int, list[str]] = {}
    for name, value in named.items():
        names.setdefault(id(value), []).append(name)
    missing = [known[0] for known in names.values() if there.isdisjoint(known)]
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), _RECOMPUTED)
    unexpected = _without(sorted(there - set(named)), ignored)
    beside = [name for name in unexpected if is_base and not name.startswith(prefix)]
    if beside and strict and not missing and beside == unexpected:
        warnings.warn(
            message(
                "Files hold more than the base model, which was loaded; the rest has no place in it.",
                parameter=beside[0],
                expected=f"names that begin with {prefix}",
                got=_some(beside),
            ),
            stacklevel=3,
        )
    elif missing or unexpected:
        told: dict[str, Any] = {
            "parameter": (missing or unexpected)[0],
            "expected": f"{_some(missing)}, which the files lack" if missing else "the model's names alone",
            "got": f"{_some(unexpected)}, which the model lacks" if unexpected else "nothing else",
        }
        if there.isdisjoint(named):
            raise CheckpointError(
                "Safetensors files hold no parameter of the model; nothing was loaded.",
                **told,
                remedy="name the class that wrote them (in the folder's config.json, architectures)",
            )
        if strict:
            raise CheckpointError(
                "Safetensors files and the model have different names; nothing was loaded.",
                **told,
                remedy="strict=False initialises what the files lack. Where transformers converts names while loading "
                "(experts, say), load once on one process, and write the model by fullshard.save_safetensors",
                topic="checkpoint-does-not-fit",
            )
        warnings.warn(message("Files and model have different names; the rest was loaded.", **told), stacklevel=3)
    _initialise(model, [name for name in names.values() if there.isdisjoint(name)])
    return lambda name: names_here.get(name, name)


def _name_here(name: str, prefix: str, named: Container[str]) -> str:
    """What a model calls a tensor in files that may be of its base, or of a model of which it is the base.

    Args:
        prefix: of the names of the base within the other.
        named: the model's names.
    """
    if name in named or prefix == ".":
        return name
    inside = name.removeprefix(prefix)
    return inside if inside in named else prefix + name if prefix + name in named else name


def _without(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    kept = [re.compile(one) for one in patterns]
    return [name for name in names if not any(one.search(name) for one in kept)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _initialise(model: Any, missing: Iterable[list[str]]) -> None:
    """Give parameters that are on meta the values that the model starts with.

    Args:
        missing: of each, all its names.
    """
    made: dict[str, nn.Parameter] = {}
    owners: dict[int, nn.Module] = {}
    for known in missing:
        empty: nn.Parameter | None = None
        for name in known:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            old = module._parameters.get(own)
            if old is None:  # a buffer, which has values
                continue
            empty = empty if empty is not None else nn.Parameter(torch.full_like(old, float("nan"), device="cpu"))
            module._parameters[own] = made[name] = empty
            owners[id(module)] = module
    for module in owners.values():
        with torch.no_grad():
            model._init_weights(module)
    for name, parameter in made.items():
        if bool(parameter.isnan().any()):
            raise CheckpointError(
                "Files lack a parameter which the model does not initialise either.",
                parameter=name,
                got=f"{type(model).__name__}._init_weights left it",
            )
