"""Parameters whose data are exchanged, tied or copied after sharding: as in one process, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from ways import PER_PARAMETER, assert_equal, every_way, example_of, sharded, whole_gradients, whole_parameters


class Blocks(nn.Module):
    """Three blocks of two layers of one shape, and a norm whose two parameters are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


EXAMPLE = example_of(Blocks, "blocks.0", "blocks.1", "blocks.2")


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def swap_models(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def swap_detached(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data, q.data = q.detach(), p.detach()


def layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def rotate_blocks(model: nn.Module) -> None:
    """Every block takes the data of the next one, last the first's."""
    data = [(layer.weight.data, layer.bias.data) for layer in layers(model)]
    for layer, (weight, bias) in zip(layers(model), data[2:] + data[:2], strict=True):
        layer.weight.data, layer.bias.data = weight, bias


def step(model: nn.Module, number: int, ranks: list[int] | None = None) -> None:
    for rank in ranks or [dist.get_rank()]:
        (model(batch(number, rank)).square().mean() / len(ranks or [0])).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


@every_way
@pytest.mark.parametrize("swap", [swap_models, swap_detached])
def test_the_weights_of_a_model_and_its_copy_are_exchanged(run_ranks, way, swap):
    """And back: what averages of weights do around an evaluation."""
    assert all(run_ranks(exchanged, way, swap, timeout=30))


def exchanged(way: str, swap: Callable[[nn.Module, nn.Module], None]) -> bool:
    everyone = list(range(dist.get_world_size()))
    model, plain = sharded(EXAMPLE, way), EXAMPLE.make(torch.float64)
    average, plain_average = copy.deepcopy(model), copy.deepcopy(plain)
    step(model, 0)
    step(plain, 0, everyone)
    for number in (1, 2):
        swap(model, average)
        swap(plain, plain_average)
        with torch.no_grad():
            assert torch.allclose(model(batch(9, 0)), plain(batch(9, 0)))
        step(average, number)
        step(plain_average, number, everyone)
    for name, ours, theirs in (("model", model, plain), ("average", average, plain_average)):
        wanted = {n: p.detach() for n, p in theirs.named_parameters()}
        assert_equal(whole_parameters(ours), wanted, name, 1e-10)
    return True


@pytest.mark.parametrize("way", [way for way in PER_PARAMETER if way != "originals"])
def test_blocks_take_each_others_data(run_ranks, way):
    assert all(run_ranks(rotated, way, timeout=30))


def rotated(way: str) -> bool:
    model, plain = sharded(EXAMPLE, way), EXAMPLE.make(torch.float64)
    for number in range(2):
        rotate_blocks(model)
        rotate_blocks(plain)
        step(model, number)
        step(plain, number, list(range(dist.get_world_size())))
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in plain.named_parameters()}, way, 1e-10)
    return True


@pytest.mark.parametrize("way", PER_PARAMETER)
@pytest.mark.parametrize("late", [False, True])
def test_a_tie_inside_a_unit_after_sharding_is_refused_by_name(run_ranks, way, late):
    assert all(run_ranks(tied, way, late, timeout=30))


def tied(way: str, late: bool) -> bool:
    model = sharded(EXAMPLE, way)
    if late:
        step(model, 0)
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
    norm.bias = norm.weight
    with pytest.raises(fullshard.FullshardError, match=r"norm\.bias"):
        model(batch(0, dist.get_rank()))
    return True


@every_way
def test_a_copy_has_no_gradients(run_ranks, way):
    """As torch's own parameters do not copy theirs: a step of the copy's optimizer would be one too many."""
    assert all(run_ranks(copied, way, timeout=30))


def copied(way: str) -> bool:
    model = sharded(EXAMPLE, way)
    model(batch(0, dist.get_rank())).sum().backward()
    before = whole_gradients(model)
    new = copy.deepcopy(model)
    assert all(p.grad is None for p in new.parameters())
    assert_equal(whole_gradients(model), before, "of the model itself")
    new(batch(0, dist.get_rank())).sum().backward()
    assert_equal(whole_gradients(new), before, "of the copy")
    return True


def test_a_step_inside_summon_full_params_is_told_of(run_ranks):
    assert all(run_ranks(stepped_inside, timeout=30))


def stepped_inside() -> bool:
    """One FlatParameter: the step counts, and whole values from before are not written over it."""
    model, other = sharded(EXAMPLE, "wrapper"), sharded(EXAMPLE, "wrapper")
    for one in (model, other):
        one(batch(0, dist.get_rank())).square().mean().backward()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    optimizers[1].step()
    inside = pytest.raises(RuntimeError, match="inside summon_full_params")
    with inside, FullyShardedDataParallel.summon_full_params(model):
        optimizers[0].step()
    assert_equal(whole_parameters(model), whole_parameters(other), "weights")
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        optimizers[0].step()
    return True
