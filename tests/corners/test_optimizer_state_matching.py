"""Optimizer state is matched in time that grows with the model, not with its square."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from ways import WRAPPERS, every_wrapper


def calls_to_match(modules: int, orig: bool) -> int:
    """Python calls that the optimizer's state takes to be matched, with that many wrapped modules."""
    model = nn.Sequential(*(FSDP(nn.Linear(2, 2), use_orig_params=orig) for _ in range(modules)))
    root = FSDP(model, use_orig_params=orig)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    with FSDP.state_dict_type(root, fullshard.StateDictType.SHARDED_STATE_DICT):
        FSDP.optim_state_dict(root, optimizer)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            FSDP.optim_state_dict(root, optimizer)
        finally:
            sys.setprofile(None)
    return calls


@every_wrapper
def test_optimizer_state_is_matched_in_linear_time(fake_world, way):
    fake_world(2)
    assert calls_to_match(160, WRAPPERS[way]) < 2.5 * calls_to_match(80, WRAPPERS[way])
