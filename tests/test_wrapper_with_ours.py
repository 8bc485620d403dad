"""Fullshard's own functions on models wrapped by FullyShardedDataParallel; those that are refused: tests/errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel
from training import assert_same

both = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def build(orig: bool) -> FullyShardedDataParallel:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, use_orig_params=orig)


def inner_first(orig: bool) -> list[str]:
    """Looking into an inner instance before the first forward does not make it a root."""
    model = build(orig)
    with FullyShardedDataParallel.summon_full_params(model.module[0]):
        shape = tuple(model.module[0].module.weight.shape)
    model(torch.ones(2, 5))
    problems = [] if shape == (7, 5) else [f"{shape}"]
    if not model.check_is_root() or model.module[0].check_is_root():
        problems.append("roots")
    return problems


@both
def test_an_inner_instance_looked_into_first_stays_inner(run_ranks, orig):
    assert_same(run_ranks(inner_first, orig))


def described(orig: bool) -> tuple[str, fullshard.MemoryUse]:
    model = build(orig)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return fullshard.describe(model), fullshard.memory_use(model, optimizer)


@both
def test_describe_and_memory_use(run_ranks, orig):
    """(7 * 5 + 7) elements are 48 with padding, (3 * 7 + 3) are 32: 40 of them on each of two ranks."""
    for text, use in run_ranks(described, orig):
        assert text.splitlines()[0] == "2 ranks: sharded 2 ways; gradients: mean over 2"
        assert [line.split()[:5] for line in text.splitlines()[2:4]] == [
            ["0", "flat", "float32", "2", "42"],
            ["2", "flat", "float32", "2", "24"],
        ]
        assert text.splitlines()[4].split()[:4] == ["in", "all", "4", "66"]
        assert use.parameters == 40 * 4
        assert use.gathered == 0
