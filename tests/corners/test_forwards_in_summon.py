"""Calls of an instance's wrapped module while only the instance's own parameters are summoned, as generation does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import LIBRARIES, WRAPPERS
from torch import Tensor, nn

from fullshard.errors import UsageError
from ways import wrap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    """Two instances' modules between layers of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Some calls, each on what the one before gave."""
        for _ in range(3):
            x = self.features(x)
        return self(x)


def nets(originals: bool, library: Any = LIBRARIES["ours"]) -> tuple[Any, Net]:
    torch.manual_seed(0)
    reference = Net().double()
    torch.manual_seed(0)
    model = Net().double()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block, library, use_orig_params=originals)
    return wrap(model, library, use_orig_params=originals), reference


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def step_both(model: Any, reference: nn.Module, optimizers: Any, step: int) -> None:
    ranks = range(dist.get_world_size())
    model(inputs(step, dist.get_rank())).square().mean().backward()
    reference(torch.cat([inputs(step, rank) for rank in ranks])).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("originals", WRAPPERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_generation_between_steps(run_ranks, library, originals, before):
    """Before the first forward and after steps; training goes on as if there had been none."""
    assert all(run_ranks(generation, library, originals, before))


def generation(library: str, originals: bool, before: int) -> bool:
    model, reference = nets(originals, LIBRARIES[library])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    summon = LIBRARIES[library].FullyShardedDataParallel.summon_full_params
    for step in range(before):
        step_both(model, reference, optimizers, step)
    for step in range(before, before + 3):
        with summon(model, recurse=False, writeback=step == 1):
            for rank in range(2):
                found = model.module.generate(inputs(step, rank))
                torch.testing.assert_close(found, reference.generate(inputs(step, rank)))
                found = model.module(inputs(step, rank))  # with a graph that nobody goes back over
                torch.testing.assert_close(found, reference(inputs(step, rank)))
        step_both(model, reference, optimizers, step)
    torch.testing.assert_close(model(inputs(9, 0)), reference(inputs(9, 0)))
    return True


@pytest.mark.parametrize("originals", WRAPPERS)
def test_generation_while_all_is_summoned(run_ranks, originals):
    """Without gradients, as Transformers' `Seq2SeqTrainer` evaluates: of the model and of the wrapped module.

    PyTorch's wrapper loses its whole parameters in the first such call.
    """
    assert all(run_ranks(generation_of_all, originals))


def generation_of_all(originals: bool) -> bool:
    model, reference = nets(originals)
    summon = LIBRARIES["ours"].FullyShardedDataParallel.summon_full_params
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(3):
        with summon(model, writeback=step == 1):
            for _ in range(1 + dist.get_rank()):  # nothing is gathered: ranks may call as often as they like
                x = inputs(step, dist.get_rank())
                torch.testing.assert_close(model.module.generate(x), reference.generate(x))
                torch.testing.assert_close(model(x), reference(x))  # with gradients enabled, too
        step_both(model, reference, optimizers, step)
    torch.testing.assert_close(model(inputs(9, 0)), reference(inputs(9, 0)))
    with summon(model, writeback=False, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            torch.testing.assert_close(model(inputs(9, 0)), reference(inputs(9, 0)))
        else:
            with pytest.raises(UsageError, match="whole parameters"):
                model(inputs(9, 0))
    return True


@pytest.mark.parametrize("originals", WRAPPERS)
def test_backwards_through_what_is_summoned_are_refused_by_name(run_ranks, originals):
    """And of what is around it; forwards are right, and the model trains on."""
    assert all(run_ranks(refused, originals))


def reference_of(call: Any, model: Any, reference: Net) -> nn.Module:
    return reference if call in (model, model.module) else reference.blocks[0]


def refused(originals: bool) -> bool:
    model, reference = nets(originals)
    summon = LIBRARIES["ours"].FullyShardedDataParallel.summon_full_params
    x = inputs(0, dist.get_rank())
    inner = model.module.blocks[0]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        for what, recurse, call in (
            (model, True, model),
            (model, True, model.module),
            (model, True, inner),
            (model, False, model),
            (inner, True, inner),
            (inner, True, model) if step else (inner, True, inner),
        ):
            with summon(what, recurse=recurse):
                output = call(x)
                torch.testing.assert_close(output, reference_of(call, model, reference)(x))
                with pytest.raises(UsageError, match="summon_full_params"):
                    output.sum().backward()
        with summon(model, recurse=False), pytest.raises(UsageError, match="summon_full_params"):
            model.module(x).sum().backward()
        with summon(model, recurse=False):
            output = model.module(x).sum()
        with pytest.raises(RuntimeError if originals else UsageError, match=r"size|summon_full_params"):
            output.backward()
        model.zero_grad()
        step_both(model, reference, optimizers, step)
    torch.testing.assert_close(model(inputs(9, 0)), reference(inputs(9, 0)))
    return True
