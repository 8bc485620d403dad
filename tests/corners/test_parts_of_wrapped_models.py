"""A module inside a wrapper's instance does not know how its parameters are split: its values are not handed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from ways import error_of, named_error

WHOLE = StateDictOptions(full_state_dict=True)


def given_a_part(originals: bool) -> list[str]:
    torch.manual_seed(0)
    model = fullshard.FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), use_orig_params=originals
    )
    optimizer = torch.optim.Adam(model.parameters())
    inner: Any = model.module
    problems = []
    for what, call in {
        "get": lambda: get_model_state_dict(inner, options=WHOLE),
        "get sharded": lambda: get_model_state_dict(inner),
        "set": lambda: set_model_state_dict(inner, {}, options=WHOLE),
        "optimizer": lambda: get_optimizer_state_dict(inner, optimizer, options=WHOLE),
    }.items():
        problems += named_error(error_of(call), "give the FullyShardedDataParallel", where=what)
    if [tuple(value.shape) for value in get_model_state_dict(model, options=WHOLE).values()] != [
        (8, 4),
        (8,),
        (3, 8),
        (3,),
    ]:
        problems.append("the instance itself")
    return problems


@pytest.mark.parametrize("originals", [False, True])
def test_the_instance_is_asked_for(run_ranks, originals: bool) -> None:
    assert run_ranks(given_a_part, originals) == [[], []]
