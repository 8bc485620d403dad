"""Weights of a sharded model in the files that `from_pretrained` loads."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ...api.whole import gathered
from ...errors import ConfigError
from ...store.hugging_face import save_safetensors
from ...store.in_place import put_weights
from ...store.lora import is_peft_model
from ...store.ranks import Ranks

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a sharded model so that plain `from_pretrained(folder)` loads it. Collective: every rank calls it.

    Parameters are gathered and written bucket by bucket: no rank holds the model. Of a model that PEFT made the active
    adapter is written, for `peft.PeftModel.from_pretrained(base, folder)`; `fullshard.save_safetensors(model, folder,
    merge_lora=True)` writes the base with it merged in. A model whose files have other names than its parameters
    (transformers converts them while loading) is written by its own `save_pretrained`: the first rank holds it whole.

    Args:
        model: sharded in whole, or not at all.
        folder: where to; weights in it are replaced, other files stay. Tokenizers are yours to save.
        dtype: cast floating-point weights to this; None: as they are held.
        max_shard_size: of one file, in bytes or as "5GB", "200MiB".

    Raises:
        ConfigError: an invalid size.
        CheckpointError: the folder cannot be written, on any rank.
    """
    if converted(model):
        state, own = gathered(model, "save_pretrained"), getattr(model, "save_pretrained")  # noqa: B009 - of no nn.Module
        if dtype is not None:
            state = {name: one.to(dtype) if one.is_floating_point() else one for name, one in state.items()}
        with Ranks(process_group).step("save_pretrained", files=True):
            if state:
                own(str(folder), state_dict=state, max_shard_size=max_shard_size)
        return
    write_weights(model, folder, dtype=dtype, max_shard_size=max_shard_size, process_group=process_group)


def converted(model: nn.Module) -> bool:
    """Whether transformers changes names or shapes of this model's weights between memory and files."""
    noted = getattr(model, "_weight_conversions", None)  # by its own from_pretrained
    if noted is not None or not hasattr(model, "config") or is_peft_model(model):
        return bool(noted)
    try:
        from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping
    except ImportError:  # before version 5, which converts nothing
        return False
    return any(not isinstance(one, PrefixChange) for one in get_model_conversion_mapping(model, add_legacy=False))


def write_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write weights and configuration of a model, or of its adapter, into a folder that may be in use. Collective.

    Files are written in a folder within, and take the place of those that are there once they are whole: at once, so
    that a process which is killed leaves the old weights or the new ones. Of several files those that replace others
    get names that the index alone knows.

    Raises:
        ConfigError: an invalid size.
        CheckpointError: see `save_safetensors`.
    """
    size, where = bytes_of(max_shard_size), Path(folder)
    adapter = any(is_peft_model(module) for module in model.modules())
    fresh = where / ".fullshard-writing"
    ranks = Ranks(process_group)
    with ranks.step("making a folder for weights", files=True):
        if ranks.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
            where.mkdir(parents=True, exist_ok=True)
    save_safetensors(model, fresh, dtype=dtype, max_file_bytes=size, adapter=adapter, process_group=process_group)
    with ranks.step("putting weights in their places", files=True):  # no rank returns before they are
        if ranks.is_first:
            put_weights(fresh, where)


def bytes_of(size: int | str) -> int:
    """A size as Hugging Face's libraries write it, in bytes.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", str(size).upper())
    value = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if value <= 0 or isinstance(size, bool):
        raise ConfigError(
            "max_shard_size is a number of bytes, or a text.", expected="5GB, 200MB, 1GiB", got=repr(size)
        )
    return value
