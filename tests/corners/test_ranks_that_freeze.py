"""`requires_grad` that changes between steps: alike on all ranks it is followed, on some ranks only it is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import DivergenceError, FullyShardedDataParallel, fully_shard
from fullshard.runtime import runners_in
from training import full
from ways import on_ranks

WAYS = ("functional", "wrapper")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])


def shard(model: nn.Sequential, way: str) -> nn.Module:
    if way == "wrapper":
        return FullyShardedDataParallel(model, auto_wrap_policy={nn.Sequential}, use_orig_params=True)
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().sum().backward()


@on_ranks
def test_a_parameter_that_one_rank_freezes_is_named() -> None:
    """Its unit is reduced as before: nothing but its gradient would be wrong."""
    for way in WAYS:
        inner = build()
        model = shard(inner, way)
        for _ in range(3):
            step(model)
            model.zero_grad()
        inner[1][0].weight.requires_grad_(dist.get_rank() != 1)
        with pytest.raises(DivergenceError, match=r"(?s)parameters train.*1\.0\.weight.*True on rank 0 and False"):
            for _ in range(3):  # devices compare two backwards later
                step(model)


@on_ranks
def test_ranks_that_train_different_blocks_raise_before_they_reduce() -> None:
    """As with an adapter for each task. Each rank would reduce a bucket of which the other sends nothing."""
    for way in WAYS:
        inner = build().requires_grad_(False)
        inner[0][0].requires_grad_(True)
        model = shard(inner, way)
        for _ in range(3):
            step(model)
            model.zero_grad()
        inner[0][0].requires_grad_(False)
        inner[dist.get_rank()][2].requires_grad_(True)
        with pytest.raises(DivergenceError, match=r"(?s)about to issue different collectives.*begins a backward"):
            step(model)


@on_ranks
def test_blocks_that_all_ranks_freeze_in_turns_are_followed() -> None:
    """The ranks compare until they know the pattern, and no more."""
    for way in WAYS:
        inner, whole = build(), build()
        model = shard(inner, way)
        compared: list[int] = []
        for turn in range(12):
            for each in (inner, whole):
                each[0].requires_grad_(turn % 2 == 0)
                each[1].requires_grad_(turn % 2 == 1)
            for each in (model, whole):
                each.zero_grad()
                step(each)
            for own, reference in zip(inner.parameters(), whole.parameters(), strict=True):
                if way == "functional":  # the wrapper's are slices
                    assert (own.grad is None) == (reference.grad is None)
                if way == "functional" and reference.grad is not None:
                    torch.testing.assert_close(full(own.grad), reference.grad)
            if turn == 5:
                position = runners_in(model)[0].root.position
                position._compare = compared.append
        assert not compared


@on_ranks
def test_ranks_that_divide_differently_are_refused() -> None:
    model = shard(build(), "functional")
    model[0].set_gradient_divide_factor(10.0 + dist.get_rank())
    with pytest.raises(DivergenceError, match=r"(?s)divided by 10, .*divided by 11, "):
        step(model)
