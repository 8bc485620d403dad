"""`from_pretrained` into shards: no rank ever holds the full model.

The model is built with parameters on meta and real buffers (`build_on_meta`). Its names are compared with those in the
files, and parameters missing from the files are initialised (`match_names`). Then the model is sharded and each rank
reads its part; or, to quantise weights on the way, units are read, quantised and sharded one by one (`_read_by_units`).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ...api.functional.fully_shard import fully_shard
from ...api.wrapping import plan_wrapping
from ...checkpoint.functions import set_model_state_dict
from ...errors import CheckpointError, ConfigError, invalid_argument, message
from ...runtime import runners_in
from ...store.formats.safetensors_folder import SafetensorsSource
from ...store.hugging_face import load_safetensors
from ...store.lora import adapted
from ...store.names import MODEL
from ...store.piece import whole_piece
from ...store.ranks import Ranks
from ..quantised import by_rows, replace_parameters
from ..sharding import finish, plan_sharding, shard
from .saving import has_adapter


def from_pretrained(
    source: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    prepare: Callable[[Any], nn.Module] | None = None,
    quantise: Callable[[Any], object] | None = None,
    mixed_precision: str = "no",
    **sharding: Any,
) -> Any:
    """Build a Transformers model without its weights, shard it, and read each rank's part of the weights. Collective.

    Like `source.from_pretrained(folder)` followed by sharding, but no rank ever holds the full model: parameters are
    built on meta, and each rank copies what it owns out of memory-mapped files. Buffers get the values that the model
    computes, whether or not files have them; weights that the configuration ties are tied. Build optimizers afterwards.

    Args:
        source: a Transformers class (`LlamaForCausalLM`, `AutoModelForCausalLM`, ...), whose configuration is read
            from the folder; or a configuration, whose `architectures` name the class.
        folder: a local folder of safetensors files, with or without an index.
        dtype: dtype of the parameters, or its name; weights are cast to it. None or "auto": the configuration's dtype,
            or else float32.
        strict: require the same names in the model and the files, apart from `base_model_prefix`; a base model
            (`AutoModel` for a causal model's folder) ignores the other tensors, with a warning. False: parameters
            missing from the files are initialised by the model, identically on all ranks, and tensors unknown to the
            model are ignored; a warning lists both.
        prepare: called with the unsharded model, whose parameters are on meta; returns the model to shard, such as
            `lambda model: peft.get_peft_model(model, settings)`. Parameters that it adds keep rank 0's values.
        quantise: called with each block before it is sharded, its full weights on the CPU; replaces weights in it, such
            as `lambda block: torchao.quantize_(block, ...)`. Only one block is held in full at a time; finally the
            weights outside of blocks are.
        mixed_precision, **sharding: see `shard`.

    Returns:
        The model, in evaluation mode as from Transformers; sharded, unless there is no process group.

    Raises:
        ConfigError: not a local folder, no class, an invalid dtype, or a model that is already quantised.
        CheckpointError: names, shapes or dtypes do not match, raised on every rank; see `load_safetensors`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            "from_pretrained reads a local folder.",
            got=str(folder),
            remedy="download the model first; from_pretrained downloads nothing",
        )
    if isinstance(dtype, str):  # Transformers accepts names
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        remedy = "pass torch.bfloat16, for example; None or 'auto' uses the configuration's dtype"
        raise invalid_argument("dtype", dtype, "a floating-point dtype, or None", remedy)
    base = build_on_meta(source, path, dtype)
    rename = match_names(base, path, strict)
    model = base if prepare is None else _prepared(base, prepare)
    initial = _take_initial_values(model)
    if quantise is not None:
        plan = plan_sharding(model, sharding.pop("units", None), mixed_precision, sharding)
        _read_by_units(model, path, rename, initial, quantise, *plan)
    else:
        if dist.is_initialized():
            shard(model, mixed_precision=mixed_precision, **sharding)
        _allocate(model)
        if initial:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=False)
            set_model_state_dict(model, initial, options=options)
        # Files come second: PEFT copied modules (modules_to_save) before they had values.
        load_safetensors(model, path, strict=False, base=has_adapter(model), rename=rename)
    finish(model, mixed_precision)
    return model.eval()


def _prepared(base: nn.Module, prepare: Callable[[Any], nn.Module]) -> nn.Module:
    """The result of `prepare` on a base whose parameters appear to be on the CPU, so that it adds parameters there.

    Raises:
        ConfigError: it returned no model, or PEFT would compute initial adapters from weights that have no values yet.
    """
    hollow = {p: torch.zeros((), dtype=p.dtype, device="cpu").expand(p.shape) for p in base.parameters() if p.is_meta}
    replace_parameters(base, hollow)
    model = prepare(base)
    if not isinstance(model, nn.Module):
        raise ConfigError("prepare must return the model to shard.", got=type(model).__name__)
    for config in getattr(model, "peft_config", {}).values():
        method = getattr(config, "init_lora_weights", True)
        if method not in (True, False, "gaussian", "orthogonal"):
            raise ConfigError(
                "Adapters would be initialised from the base model's weights, which no rank holds in full.",
                expected="init_lora_weights of True, False, gaussian or orthogonal",
                got=repr(method),
                remedy="add the adapter to the full model on the CPU, then shard it with "
                "fullshard.integrations.hf.shard",
            )
    return model


def _take_initial_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move all parameters to meta; returns the values of those that had any, by name."""
    initial = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta and not _is_hollow(p)}
    replace_parameters(model, {p: torch.empty_like(p, device="meta") for p in model.parameters() if not p.is_meta})
    return initial


def _is_hollow(tensor: torch.Tensor) -> bool:
    """Whether all elements share one memory location, as in `_prepared`'s placeholders and copies of them."""
    return tensor.dim() > 0 and tensor.numel() > 1 and not any(tensor.stride())


def _allocate(model: nn.Module) -> None:
    """Allocate parameters on the mesh's device, tied ones once, and move buffers there with their values."""
    tied = _names_by_id(model.named_parameters(remove_duplicate=False)).values()
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    units = [runner.unit for runner in runners_in(model) if runner.unit.buckets]
    device = units[0].buckets[0].axes.device if units else torch.device("cpu")
    model.to_empty(device=device)
    for first, *others in tied:  # to_empty() has made a tensor for each name
        for path, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(path), name, model.get_parameter(first))
    moved = {id(buffer): buffer.to(device) for _, _, buffer in buffers if buffer is not None}
    for module, name, buffer in buffers:
        module._buffers[name] = None if buffer is None else moved[id(buffer)]


_RECOMPUTED = r"rotary_emb\.inv_freq$"
"""Buffers in older files that models compute themselves."""


def build_on_meta(source: Any, folder: Path, dtype: torch.dtype | None) -> Any:
    """Build the model that `source` and the folder's configuration describe, with tied parameters on meta.

    Raises:
        ConfigError: see `from_pretrained`.
    """
    config, cls = source, source
    if isinstance(source, type) and hasattr(source, "from_pretrained"):
        config_class = getattr(source, "config_class", None) or transformers.AutoConfig
        config = config_class.from_pretrained(str(folder), local_files_only=True)
    elif isinstance(source, transformers.PretrainedConfig):
        cls = getattr(transformers, next(iter(source.architectures or ()), ""), None)
    if cls is None or not isinstance(config, transformers.PretrainedConfig):
        raise ConfigError(
            "from_pretrained builds Transformers models.",
            expected="a class with from_pretrained, or a configuration whose architectures name one",
            got=getattr(source, "__name__", type(source).__name__),
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "The folder holds a quantised model, whose weights have special classes.",
            got=f"quantization_config in {folder / 'config.json'}",
            remedy="start from the original weights, and quantise block by block (docs/clients/peft.md)",
        )
    dtype = dtype or config.dtype or torch.float32
    with init_empty_weights(include_buffers=False):  # under torch.device("meta") buffers would have no values either
        build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
        model = build(config, dtype=dtype)
    model.tie_weights()  # moving parameters to meta one by one has untied them
    if in_float32 := "|".join(model._get_dtype_plan(dtype)):
        for name, parameter in model.named_parameters():
            if re.search(rf"(^|\.)({in_float32})(\.|$)", name):
                parameter.data = parameter.data.float()
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def match_names(model: Any, folder: Path, strict: bool) -> Callable[[str], str]:
    """Compare the model's names with those in the files, and initialise missing parameters, on the CPU.

    As in Transformers, a base model (`AutoModel`) takes its part of a larger model's files, with a warning that
    lists the rest, and a larger model takes a base model's files: names lose or gain `base_model_prefix`.

    Returns:
        A function from a tensor's name in the files to its name in the model.

    Raises:
        CheckpointError: names differ, and `strict`; or the model does not initialise a missing parameter.
    """
    with SafetensorsSource(folder) as files:
        file_names = {name.removeprefix(MODEL) for name in files.entries}
    tensors = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "") + "."
    model_names = {name: _model_name(name, prefix, tensors) for name in file_names}
    in_files = set(model_names.values())
    is_base = any(len(model_name) < len(file_name) for file_name, model_name in model_names.items())
    absent = [names for names in _names_by_id(tensors.items()).values() if in_files.isdisjoint(names)]
    missing = _without([names[0] for names in absent], getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), _RECOMPUTED)
    unexpected = _without(sorted(in_files - set(tensors)), ignored)
    is_rest = is_base and not missing and not any(name.startswith(prefix) for name in unexpected)
    if missing or unexpected:
        difference: dict[str, Any] = {
            "parameter": (missing or unexpected)[0],
            "expected": f"{_some(missing)}, which the files lack" if missing else "only the model's names",
            "got": f"{_some(unexpected)}, which the model lacks" if unexpected else "no other names",
        }
        if in_files.isdisjoint(tensors) or (strict and not is_rest):
            raise CheckpointError(
                "The safetensors files and the model have different names; nothing was loaded.",
                **difference,
                remedy="pass the class that wrote them (architectures in the folder's config.json), or strict=False to "
                "initialise parameters that the files lack. If Transformers converts names while loading (of experts, "
                "for example), load the model once in one process, and write it with fullshard.save_safetensors",
                topic="checkpoint-does-not-fit",
            )
        warnings.warn(
            message("The files and the model have different names; matching tensors were loaded.", **difference),
            stacklevel=3,
        )
    _initialise(model, [name for names in absent for name in names])
    return model_names.__getitem__


def _model_name(name: str, prefix: str, names: Container[str]) -> str:
    """The model's name for a tensor in files that may be its base model's, or a larger model's.

    Args:
        prefix: what the base model's names begin with inside the larger model.
        names: the model's names.
    """
    if name in names or prefix == ".":
        return name
    inside = name.removeprefix(prefix)
    return inside if inside in names else prefix + name if prefix + name in names else name


def _names_by_id(tensors: Iterable[tuple[str, Any]]) -> dict[int, list[str]]:
    """All names of each tensor, by its id; tied tensors have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return names


def _without(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _initialise(model: Any, missing: Iterable[str]) -> None:
    """Give missing parameters, which are on meta, the values that the model starts with."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name in missing if name in parameters]  # the others are buffers, which have values
    unset = {parameters[name] for name in names}
    replace_parameters(model, {p: torch.full_like(p, float("nan"), device="cpu") for p in unset})
    with torch.no_grad():
        for module in dict.fromkeys(model.get_submodule(name.rpartition(".")[0]) for name in names):
            model._init_weights(module)
    for name in names:
        if bool(model.get_parameter(name).isnan().any()):
            raise CheckpointError(
                "A parameter is missing from the files, and the model does not initialise it.",
                parameter=name,
                got=f"{type(model).__name__}._init_weights did not set it",
            )


def _read_by_units(
    model: nn.Module,
    folder: Path,
    rename: Callable[[str], str],
    initial: dict[str, torch.Tensor],
    quantise: Callable[[Any], object],
    policy: Any,
    settings: dict[str, Any],
) -> None:
    """Read, quantise and shard one block after the other, then the rest of the model. Collective.

    Args:
        model: parameters on meta.
        folder: of safetensors files.
        rename: from a tensor's name in the files to its name in the model.
        initial: values of parameters that are not in the files, by name; all ranks use rank 0's.
        quantise: called with each block, its weights on the CPU; replaces weights in it.
        policy, settings: arguments of `fully_shard`.

    Raises:
        ConfigError: `quantise` left weights that cannot be split; see `by_rows`.
        CheckpointError: a shape, dtype or tie does not fit the files, or a parameter has no value.
    """
    initial = Ranks().share(initial)
    base_name: Callable[..., str | None] = adapted(model).base_name if has_adapter(model) else lambda name, unused: name
    names = _names_by_id(model.named_parameters(remove_duplicate=False))
    source = SafetensorsSource(folder)
    source.rename(rename)

    def value_of(parameter: nn.Parameter) -> torch.Tensor:
        """From the files, as `load_safetensors` reads it, or else from `initial`, under any of its names."""
        own = names[id(parameter)]
        file_names = [MODEL + name for name in (base_name(name, unused=True) for name in own) if name is not None]
        if present := [name for name in file_names if name in source.entries]:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            source.fill(source.copies_into(whole_piece(own[0], value, False), present, cast=True))
            return value
        for name in own:
            if name in initial:
                return initial[name]
        raise CheckpointError(
            "A parameter is missing from the files and has no initial value.", parameter=own[0], topic="weights-on-meta"
        )

    with source:
        for unit in [*(block for _, block, _ in plan_wrapping(model, policy)), model]:
            replace_parameters(model, {p: value_of(p) for p in unit.parameters() if p.is_meta})
            if unit is not model:
                quantise(unit)
                by_rows(unit)
            if dist.is_initialized():
                fully_shard(unit, **settings)
