"""`from_pretrained` into shards: no rank ever holds the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ...checkpoint.functions import set_model_state_dict
from ...errors import ConfigError
from ...runtime import runners_in
from ...store.hugging_face import load_safetensors
from ...store.lora import is_peft_model
from ..sharding import finish, shard
from .blockwise import read_by_units
from .meta import fit, on_meta


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
        ConfigError: no local folder, no class, a dtype that is none, or a quantised model.
        CheckpointError: names, shapes or dtypes that do not fit, on every rank; see `load_safetensors`.
    """
    where = Path(folder)
    if not where.is_dir():
        raise ConfigError(
            "from_pretrained reads a local folder.",
            got=str(folder),
            remedy="download it first; nothing is fetched here",
            code="C216",
        )
    if isinstance(dtype, str):  # as transformers takes it
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "dtype must be a floating-point dtype, or None.",
            got=repr(dtype),
            remedy="torch.bfloat16, say; None or 'auto' takes what the configuration says",
            code="C190",
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
    _replace(base, lambda one: torch.zeros((), dtype=one.dtype).expand(one.shape) if one.is_meta else one)
    model = prepare(base)
    if not isinstance(model, nn.Module):
        raise ConfigError("prepare must return the model to shard.", got=type(model).__name__, code="C214")
    for config in getattr(model, "peft_config", {}).values():
        start = getattr(config, "init_lora_weights", True)
        if start not in (True, False, "gaussian", "orthogonal"):
            raise ConfigError(
                "Adapters are to start from the base's weights, of which no rank has all.",
                expected="init_lora_weights of True, False, gaussian or orthogonal",
                got=repr(start),
                remedy="adapt the whole model on the CPU, and shard it by fullshard.integrations.hf.shard",
                code="C213",
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
