"""`join`: ranks with unequal numbers of batches, exactly as one process with the batches that there are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from memory_ranks import leave_in_flight
from training import assert_same
from ways import error_of, gradient_problems, named_error, on_ranks, shard, synced, value_problems

COUNTS = {2: (5, 2), 4: (3, 1, 4, 4)}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def units(model: nn.Module) -> list[nn.Module]:
    return [model[0], model[2]]


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


def joined(way: str, micro: int, **settings: Any) -> list[str]:
    """What differs from one process; `micro` batches to a step, all but the last accumulated without sync."""
    counts, mine = COUNTS[dist.get_world_size()], dist.get_rank()
    reference = model_of()
    model = shard(copy.deepcopy(reference), way, units, **settings)
    optimizers = [optimizer_of(reference), optimizer_of(model)]
    given = fullshard.join(model, (batch(mine, number) for number in range(counts[mine])))
    problems, number = [], 0
    for x in given:
        own = [rank for rank, count in enumerate(counts) if number < count]
        if (given.active, given.ranks) != (mine in own, len(own)) or not torch.equal(
            x, batch(mine, min(number, counts[mine] - 1))
        ):
            problems.append(f"batch {number}: {given.active}, {given.ranks}")
        for rank in own:
            (loss_of(reference, batch(rank, number)) / len(own)).backward()
        last = number % micro == micro - 1
        with synced(model, last):
            loss_of(model, x).backward()
        number += 1
        if not last:
            continue
        problems += gradient_problems(f"batch {number - 1}", model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if number != max(counts):
        problems.append(f"{number} batches")
    problems += value_problems("in the end", model, reference)
    next_step = loss_of(model, batch(mine, 99))
    next_step.backward()  # outside of it all ranks count again
    reference.zero_grad()
    model.zero_grad()
    return problems


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
def test_as_one_process(run_ranks, way):
    for micro in (1, 2):
        assert_same(run_ranks(joined, way, micro))


def test_on_hybrid_meshes(run_ranks):
    assert_same(run_ranks(joined, "rows", 1, hybrid=True, world=4))


@on_ranks
def test_a_rank_without_any_batch() -> list[str]:
    reference, mine = model_of(), dist.get_rank()
    model = shard(copy.deepcopy(reference), "rows", units)
    mine_only = [batch(0, 0)] if mine == 0 else []
    error = error_of(lambda: next(iter(fullshard.join(model, mine_only))))
    problems = named_error(error, "example", kinds=fullshard.ConfigError)
    loss_of(reference, batch(0, 0)).backward()
    for x in fullshard.join(model, mine_only, example=torch.full((3, 5), torch.nan, dtype=torch.float64)):
        loss_of(model, x).backward()  # what a rank without data computes, NaN here, is dropped
    problems += gradient_problems("in the end", model, reference)
    assert not list(fullshard.join(model, [])), "batches where nobody has any"
    return problems


@on_ranks
def test_after_a_loop_that_is_left_early_all_ranks_count() -> list[str]:
    reference, mine = model_of(), dist.get_rank()
    model = shard(copy.deepcopy(reference), "rows", units)
    for number, x in enumerate(fullshard.join(model, [batch(mine, n) for n in range(3 - 2 * mine)])):
        loss_of(model, x).backward()
        if number == 1:
            break
    leave_in_flight()  # the count of the next batches: a rank that leaves because of an error must not wait
    model.zero_grad()
    for rank in range(2):
        (loss_of(reference, batch(rank, 7)) / 2).backward()
    loss_of(model, batch(mine, 7)).backward()
    return gradient_problems("afterwards", model, reference)


def test_what_is_no_sharded_model_is_refused():
    with pytest.raises(fullshard.ConfigError, match="no units"):
        fullshard.join(nn.Linear(2, 2), [])
