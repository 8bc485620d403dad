"""Write a sharded model's weights as files that `from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int
from torch import nn
from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

from ...api.save_pretrained import gathered
from ...errors import invalid_argument
from ...store.full_parameters import check_dtype
from ...store.hugging_face import save_configs, save_safetensors
from ...store.in_place import put_weights
from ...store.lora import is_peft_model
from ...store.ranks import Ranks


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a sharded model so that plain `from_pretrained(folder)` loads it. Collective: every rank calls it.

    Parameters are gathered and written bucket by bucket: no rank holds the full model. For a PEFT model this writes the
    active adapter, for `peft.PeftModel.from_pretrained(base, folder)`; `fullshard.save_safetensors(model, folder,
    merge_lora=True)` writes the base model with the adapter merged in. If Transformers converts the model's names or
    shapes between memory and files, its own `save_pretrained` writes it, and rank 0 holds the full model.

    Args:
        model: sharded entirely, or not at all.
        folder: where to write; weights in it are replaced, other files stay. Save tokenizers yourself.
        dtype: cast floating-point weights to this; None: keep their dtype.
        max_shard_size: size limit of one file, in bytes or as "5GB", "200MiB".

    Raises:
        ConfigError: an invalid size or dtype.
        CheckpointError: the folder cannot be written, on any rank.
    """
    check_dtype(dtype)
    if converted(model):
        size = bytes_of(max_shard_size)
        weights = gathered(model, "save_pretrained")
        transformers_model: Any = model
        if dtype is not None:
            weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}

        def save() -> None:
            if weights:
                transformers_model.save_pretrained(str(folder), state_dict=weights, max_shard_size=size)
                save_configs(model, Path(folder), dtype, merged=False)  # its own says the dtype in memory

        Ranks().together("save_pretrained", save)
        return
    write_weights(model, folder, dtype=dtype, max_shard_size=max_shard_size)


def converted(model: nn.Module) -> bool:
    """Whether Transformers converts names or shapes of this model's weights between memory and files."""
    conversions = getattr(model, "_weight_conversions", None)  # set by its own from_pretrained
    if conversions is None and hasattr(model, "config") and not is_peft_model(model):
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [change for change in mapping if not isinstance(change, PrefixChange)]
    return bool(conversions)


def has_adapter(model: nn.Module) -> bool:
    """Whether the model is a PEFT model, or contains one."""
    return any(map(is_peft_model, model.modules()))


def write_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write weights and configuration of a model, or of its adapter, into a folder that may be in use. Collective.

    Files are written to a subfolder, and replace those in `folder` atomically once they are complete: if the process
    is killed, the old weights remain, or the new ones are there. If there are several files, those that would overwrite
    others get new names, which the index lists.

    Raises:
        ConfigError: an invalid size.
        CheckpointError: see `save_safetensors`.
    """
    size, path = bytes_of(max_shard_size), Path(folder)
    fresh = path / ".fullshard-writing"
    ranks = Ranks()

    def create_folder() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)

    ranks.first("creating a folder for weights", create_folder)
    save_safetensors(model, fresh, dtype=dtype, max_file_bytes=size, adapter=has_adapter(model))
    ranks.first("moving weights into place", lambda: put_weights(fresh, path))  # no rank returns earlier


def bytes_of(size: int | str) -> int:
    """Parse a size as Hugging Face's libraries write it.

    Raises:
        ConfigError: an invalid size.
    """
    try:
        value: int = convert_file_size_to_int(size)
    except (ValueError, AttributeError):
        value = 0
    if value <= 0:
        raise invalid_argument("max_shard_size", size, 'a number of bytes, or a string such as "5GB", "200MB", "1GiB"')
    return value
