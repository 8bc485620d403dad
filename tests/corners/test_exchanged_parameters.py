"""Parameters whose data are exchanged, tied or copied after sharding: as in one process, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from ways import (
    WIDTH,
    assert_equal,
    batch,
    but_last,
    differences,
    gradient_problems,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    value_problems,
    whole_parameters,
)


def swap(one: nn.Module, other: nn.Module, detached: bool = False) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data, q.data = (q.detach(), p.detach()) if detached else (q.data, p.data)


def step(model: nn.Module, inputs: Tensor) -> None:
    loss_of(model, inputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@some_ways
@pytest.mark.parametrize("detached", [False, True], ids=["data", "detached"])
@on_ranks
def test_the_weights_of_a_model_and_its_copy_are_exchanged(way: str, detached: bool) -> list[str]:
    """And back: what averages of weights do around an evaluation. A copy has no gradients, as torch's have none."""
    model, plain = shard(layers(), way, but_last), layers()
    loss_of(model, mine(0)).backward(), loss_of(plain, batch(0)).backward()
    average, plain_average = copy.deepcopy(model), copy.deepcopy(plain)
    plain_average.zero_grad()
    assert all(p.grad is None for p in average.parameters())
    problems = gradient_problems("of the model itself", model, plain)
    model.zero_grad(), plain.zero_grad()
    step(model, mine(0)), step(plain, batch(0))
    for number in (1, 2):
        swap(model, average, detached), swap(plain, plain_average)
        with torch.no_grad():
            problems += differences("output", {"": model(mine(9))}, {"": plain(mine(9))})
        step(average, mine(number)), step(plain_average, batch(number))
    return problems + value_problems("model", model, plain) + value_problems("its copy", average, plain_average)


def rotate(model: nn.Module) -> None:
    """The two blocks take each other's data, layer by layer."""
    squares = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == WIDTH]
    data = [(layer.weight.data, layer.bias.data) for layer in squares]
    for layer, (weight, bias) in zip(squares, data[2:] + data[:2], strict=True):
        layer.weight.data, layer.bias.data = weight, bias


@pytest.mark.parametrize("way", ["rows", "flat", "owner"])
@on_ranks
def test_blocks_take_each_others_data(way: str) -> list[str]:
    model, plain = shard(layers(), way, but_last), layers()
    for number in range(2):
        rotate(model), rotate(plain)
        step(model, mine(number)), step(plain, batch(number))
    return value_problems("rotated", model, plain)


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@pytest.mark.parametrize("late", [False, True])
def test_a_tie_inside_a_unit_after_sharding_is_refused_by_name(fake_world, way, late):
    fake_world(2)
    norm = nn.LayerNorm(WIDTH).double()
    model = shard(nn.Sequential(*layers()[:2], norm), way, but_last)
    if late:
        step(model, mine(0))
    norm.bias = norm.weight
    with pytest.raises(fullshard.FullshardError, match=r"2\.bias"):
        model(mine(0))


@on_ranks
def test_a_step_inside_summon_full_params_is_told_of() -> None:
    """One FlatParameter: the step counts, and whole values from before are not written over it."""
    model, other = (shard(layers(), "wrapper", but_last) for _ in range(2))
    for one in (model, other):
        loss_of(one, mine(0)).backward()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    optimizers[1].step()
    inside = pytest.raises(RuntimeError, match="inside summon_full_params")
    with inside, FullyShardedDataParallel.summon_full_params(model):
        optimizers[0].step()
    assert_equal(whole_parameters(model), whole_parameters(other), "weights")
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        optimizers[0].step()
