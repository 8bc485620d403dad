"""Calls of an instance's wrapped module while only the instance's own parameters are summoned, as generation does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel
from fullshard.errors import UsageError
from ways import WIDE, Block, every_wrapper, named, on_ranks, shard, wide_batch

summon = FullyShardedDataParallel.summon_full_params


class Net(nn.Module):
    """Two instances' modules between layers of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Some calls, each on what the one before gave."""
        for _ in range(3):
            x = self.features(x)
        return self(x)


class Both:
    """A wrapped model and its reference, which see the same, and their optimizers."""

    def __init__(self, way: str) -> None:
        self.model: Any = shard(Net(), way, named("blocks.0", "blocks.1"))
        self.reference = Net()
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.model, self.reference)]

    def step(self, number: int) -> None:
        self.model(wide_batch(number, dist.get_rank())).square().mean().backward()
        self.reference(wide_batch(number)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(self.model(wide_batch(9, 0)), self.reference(wide_batch(9, 0)))

    def generates(self, x: Tensor) -> None:
        """And, with gradients enabled, computes a graph that nobody goes back over."""
        torch.testing.assert_close(self.model.module.generate(x), self.reference.generate(x))
        torch.testing.assert_close(self.model.module(x), self.reference(x))


@every_wrapper
@pytest.mark.parametrize("before", [0, 2])
@on_ranks
def test_generation_between_steps(way: str, before: int) -> None:
    """Before the first forward and after steps; training goes on as if there had been none."""
    both = Both(way)
    for step in range(before):
        both.step(step)
    for step in range(before, before + 3):
        with summon(both.model, recurse=False, writeback=step == 1):
            for rank in range(2):
                both.generates(wide_batch(step, rank))
        both.step(step)


@every_wrapper
@on_ranks
def test_generation_while_all_is_summoned(way: str) -> None:
    """Without gradients, as Transformers' `Seq2SeqTrainer` evaluates: of the model and of the wrapped module.

    PyTorch's wrapper loses its whole parameters in the first such call.
    """
    both, x = Both(way), wide_batch(9, 0)
    for step in range(3):
        with summon(both.model, writeback=step == 1):
            for _ in range(1 + dist.get_rank()):  # nothing is gathered: ranks may call as often as they like
                both.generates(wide_batch(step, dist.get_rank()))
                torch.testing.assert_close(both.model(x), both.reference(x))
        both.step(step)
    with summon(both.model, writeback=False, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            torch.testing.assert_close(both.model(x), both.reference(x))
        else:
            with pytest.raises(UsageError, match="whole parameters"):
                both.model(x)


@every_wrapper
@on_ranks
def test_backwards_through_what_is_summoned_are_refused_by_name(way: str) -> None:
    """And of what is around it; forwards are right, and the model trains on."""
    both = Both(way)
    model, reference, x = both.model, both.reference, wide_batch(0, dist.get_rank())
    block = model.module.blocks[0]
    for step in range(2):
        # What is summoned, whether with what is below it, and what is called.
        cases = [(model, True, model), (model, True, model.module), (model, True, block), (model, False, model)]
        for what, recurse, call in [*cases, (model, False, model.module), (block, True, block), (block, True, model)]:
            if call is model and what is block and not step:
                continue
            with summon(what, recurse=recurse):
                output = call(x)
                torch.testing.assert_close(output, (reference.blocks[0] if call is block else reference)(x))
                with pytest.raises(UsageError, match="summon_full_params"):
                    output.sum().backward()
        with summon(model, recurse=False):
            output = model.module(x).sum()
        with pytest.raises(RuntimeError if way == "originals" else UsageError, match=r"size|summon_full_params"):
            output.backward()
        model.zero_grad()
        both.step(step)
