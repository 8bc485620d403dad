"""Which dtypes become which while loading: nothing is rounded unless asked for, and 8-bit floats are never cast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fullshard
from fullshard import CheckpointError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
EXACT = {  # what is stored, and what else it may become without a loss
    torch.float64: (),
    torch.float32: (torch.float64,),
    torch.bfloat16: (torch.float64, torch.float32),
    torch.float16: (torch.float64, torch.float32),
}


def model_of(dtype: torch.dtype, value: float = 0.0) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2, 3), value).to(dtype), requires_grad=False)
    return model


def in_a_folder(path: Path, stored: torch.dtype) -> Callable[..., object]:
    fullshard.save(path, model_of(stored, 1.5))
    return lambda model, cast: fullshard.load(path, model, cast=cast)


def in_safetensors(path: Path, stored: torch.dtype) -> Callable[..., object]:
    save_file(dict(model_of(stored, 1.5).state_dict()), path)
    return lambda model, cast: fullshard.load_safetensors(model, path, cast=cast)


def test_every_pair_of_dtypes(tmp_path: Path) -> None:
    kinds = (*FLOATS, *EIGHT, torch.int32)
    for format, stored in itertools.product((in_a_folder, in_safetensors), kinds):
        load = format(tmp_path / f"{format.__name__}{stored}.safetensors", stored)
        for wanted, cast in itertools.product(kinds, (False, True)):
            fits = wanted == stored or wanted in EXACT.get(stored, ()) or (cast and {wanted, stored} <= set(FLOATS))
            model = model_of(wanted)
            if fits:
                load(model, cast)
            else:
                with pytest.raises(CheckpointError, match=r"round values|different dtype"):
                    load(model, cast)
            assert (model.weight.float() == (1.5 if fits and wanted.is_floating_point else float(fits))).all()


def test_each_kind_of_loading_has_its_habit(tmp_path: Path, fake_world: Callable[..., None]) -> None:
    """A checkpoint continues training: exact. Published weights, and state dicts, are cast as users of these expect."""
    load = in_a_folder(tmp_path / "checkpoint", torch.float32)
    with pytest.raises(CheckpointError, match="cast=True"):
        fullshard.load(tmp_path / "checkpoint", model_of(torch.bfloat16))
    load(model := model_of(torch.bfloat16), True)
    assert (model.weight == 1.5).all()
    in_safetensors(tmp_path / "weights.safetensors", torch.float32)
    fullshard.load_safetensors(model := model_of(torch.bfloat16), tmp_path / "weights.safetensors")
    assert (model.weight == 1.5).all()
    fake_world(1)
    whole = {"weight": torch.full((2, 2), 1 + 2**-10)}  # 1 in bfloat16
    fullshard.fully_shard(functional := nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    set_model_state_dict(functional, whole, options=StateDictOptions(full_state_dict=True))
    wrapper = fullshard.FullyShardedDataParallel(nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    wrapper.load_state_dict(whole)
    for model in (functional, wrapper):
        assert {name: (value == 1).all() for name, value in fullshard.full_parameters(model)} == {"weight": True}


def test_optimizer_state_is_not_rounded_either(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fullshard.save(tmp_path, model, optimizer)
    model.to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match="round values"):
        fullshard.load(tmp_path, model, optimizer)
    assert not optimizer.state
    fullshard.load(tmp_path, model, optimizer, cast=True)
    assert optimizer.state[model.weight]["exp_avg"].any()
