"""`from_pretrained` into shards: no rank ever holds the model.

Its parameters are made on meta, its buffers as the model makes them (`on_meta`); names are compared with those in the
files, and what files lack gets values (`fit`). Then the model is sharded and each rank reads its part; or, if weights
are quantised while they are read, one unit after the other is read, quantised and sharded (`read_by_units`).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Container, Iterable
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
from ...errors import CheckpointError, ConfigError, message
from ...runtime import runners_in
from ...store.formats.safetensors_folder import SafetensorsSource
from ...store.hugging_face import load_safetensors
from ...store.lora import adapted, is_peft_model
from ...store.ranks import Ranks
from ...store.source import MODEL
from ..quantised import by_rows
from ..sharding import finish, plan_sharding, shard


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
    """Build a model of transformers without its weights, shard it, and read each rank's part of them. Collective.

    As `source.from_pretrained(folder)` followed by sharding, but no rank ever holds the model: parameters are made on
    meta, and rectangles of mapped files are copied into shards. Buffers are made as the model makes them, in files or
    not; weights that the configuration ties are tied. Build optimizers after it.

    Args:
        source: a class of transformers (`LlamaForCausalLM`, `AutoModelForCausalLM`, ...), whose configuration is read
            from the folder; or a configuration, whose `architectures` name the class.
        folder: local, of safetensors files, with an index or without.
        dtype: of the parameters, or its name; files are cast to it. None or "auto": what the configuration says, else
            float32.
        strict: whether names must be the same on both sides, but for `base_model_prefix`, and what lies beside a base
            model (`AutoModel` of a causal model's folder), of which a warning tells. False: what files lack is
            initialised as the model does it, the same on all ranks, what the model lacks is left, and a warning names
            both.
        prepare: given the model before it is sharded, with parameters on meta; returns the one to shard, as
            `lambda model: peft.get_peft_model(model, settings)` does. Parameters that it adds are kept, those of the
            first rank on all.
        quantise: given each block with its weights, whole and on the CPU, before it is sharded; puts others in
            their places, as `lambda block: torchao.quantize_(block, ...)` does. One block is whole at a
            time, and in the end what is in none.
        mixed_precision, **sharding: see `shard`.

    Returns:
        The model, in evaluation mode as transformers' own; sharded, unless there is no process group.

    Raises:
        ConfigError: no local folder, no class, an invalid dtype, or a quantised model.
        CheckpointError: names, shapes or dtypes that do not fit, on every rank; see `load_safetensors`.
    """
    where = Path(folder)
    if not where.is_dir():
        raise ConfigError(
            "from_pretrained reads a local folder.",
            got=str(folder),
            remedy="download it first; nothing is fetched here",
        )
    if isinstance(dtype, str):  # as transformers takes it
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "dtype must be a floating-point dtype, or None.",
            got=repr(dtype),
            remedy="torch.bfloat16, say; None or 'auto' takes what the configuration says",
        )
    base = on_meta(source, where, dtype)
    rename = fit(base, where, strict)
    model = base if prepare is None else _prepared(base, prepare)
    made = _take_made(model)
    held = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    words = "no" if "mp_policy" in sharding else mixed_precision
    if quantise is not None:
        read_by_units(model, where, rename, made, quantise, {"mixed_precision": words, **sharding})
    else:
        if dist.is_initialized():
            shard(model, mixed_precision=words, **sharding)
        _give_memory(model, held)
        _read(model, where, rename, made)
    finish(model, mixed_precision)
    return model.eval()


def _read(model: nn.Module, folder: Path, rename: Callable[[str], str], made: dict[str, torch.Tensor]) -> None:
    if made:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=False)
        set_model_state_dict(model, made, options=options)
    # After it: PEFT's copies of modules (modules_to_save) were made of what had no values.
    base = any(is_peft_model(module) for module in model.modules())
    load_safetensors(model, folder, strict=False, base=base, rename=rename)


def _prepared(base: nn.Module, prepare: Callable[[Any], nn.Module]) -> nn.Module:
    """What `prepare` makes of a base whose parameters seem to lie on the CPU, where additions then are made.

    Raises:
        ConfigError: it returned no model, or PEFT is to start adapters from weights that nobody has yet.
    """
    _replace(base, lambda one: torch.zeros((), dtype=one.dtype, device="cpu").expand(one.shape) if one.is_meta else one)
    model = prepare(base)
    if not isinstance(model, nn.Module):
        raise ConfigError("prepare must return the model to shard.", got=type(model).__name__)
    for config in getattr(model, "peft_config", {}).values():
        start = getattr(config, "init_lora_weights", True)
        if start not in (True, False, "gaussian", "orthogonal"):
            raise ConfigError(
                "Adapters are to start from the base's weights, of which no rank has all.",
                expected="init_lora_weights of True, False, gaussian or orthogonal",
                got=repr(start),
                remedy="adapt the whole model on the CPU, and shard it by fullshard.integrations.hf.shard",
            )
    return model


def _replace(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put others in the places of parameters; one that is in several places stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or (id(old) not in made and (value := make(old)) is old):
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
            module._parameters[name] = made[id(old)]


def _take_made(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the parameters off the model that have values, and leave some on meta in the places of all."""
    held = {name: one for name, one in model.named_parameters() if not one.is_meta and not _is_hollow(one)}
    _replace(model, lambda one: one if one.is_meta else torch.empty_like(one, device="meta"))
    return {name: one.detach() for name, one in held.items()}


def _is_hollow(tensor: torch.Tensor) -> bool:
    """Whether it is one that `_prepared` made, or a copy of it: all its elements are one."""
    return tensor.dim() > 0 and tensor.numel() > 1 and not any(tensor.stride())


def _give_memory(model: nn.Module, held: list[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    """Let parameters have memory, and buffers their values.

    Args:
        held: buffers before the model was sharded, and where.
    """
    units = [runner.unit for runner in runners_in(model) if runner.unit.buckets]
    device = units[0].buckets[0].axes.device if units else torch.device("cpu")
    model.to_empty(device=device)
    moved = {id(buffer): buffer.to(device) for _, _, buffer in held if buffer is not None}
    for module, name, buffer in held:
        module._buffers[name] = None if buffer is None else moved[id(buffer)]


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
                        topic="checkpoint-does-not-fit",
                    )
                return found.to(old.dtype, copy=True)
        for name in known:
            if name in self.made:
                return self.made[name]
        raise CheckpointError(
            "A parameter is in no file, and was not made either.", parameter=known[0], topic="weights-on-meta"
        )
