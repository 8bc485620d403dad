"""Memory in odd places: forwards that write to or return their inputs, layers that are dropped, early `unshard()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import memory_use
from fullshard.torch_private.local_tensor import plain_access
from models import blocks_of
from training import LAYOUTS
from ways import alone, backward, gradient_problems, on_ranks, shard

WIDE = 6
BLOCKS = 6


class Block(nn.Module):
    """`sin(linear(change(x)))`, which keeps nothing of its result; `give` is what it returns of its input and that."""

    def __init__(self, change: Callable = lambda x: x, give: Callable = lambda x, y: y, number: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.change, self.give, self.number = change, give, number

    def compute(self, x: Tensor) -> Tensor:
        return self.linear(self.change(x)).sin()

    def forward(self, x: Any, *, more: Tensor | None = None) -> Any:
        if isinstance(x, tuple):
            x = x[0] + x[1]
        if more is not None:
            x = x + more.mul_(0.5)
        return self.give(x, self.compute(x))


class Recomputed(Block):
    """Activation checkpointing inside of the unit."""

    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(super().compute, x, use_reentrant=False)


class Dropped(Block):
    """Hands its input back: a layer that was dropped, on every rank, or on those that drew it."""

    apart = False

    def forward(self, x: Any, *, more: Tensor | None = None) -> Any:
        drawn = (self.number * 5 + dist.get_rank() * 3) % 4 < 2 if self.apart else self.number % 2
        return x if drawn else super().forward(x)


class DroppedApart(Dropped):
    apart = True


def add_to_half(x: Tensor) -> Tensor:
    x[:, : WIDE // 2] += 0.5
    return x


KINDS: dict[str, Callable[[int], Block]] = {
    "plain": lambda number: Block(),
    "in place: mul_": lambda number: Block(lambda x: x.mul_(1.5)),
    "in place: relu_": lambda number: Block(lambda x: F.leaky_relu(x, 0.3, inplace=True)),
    "in place: a part": lambda number: Block(add_to_half),
    "in place: twice": lambda number: Block(lambda x: x.mul_(1.5).add_(0.1)),
    "in place: copy_": lambda number: Block(lambda x: x.copy_(x.detach() * 0.5 + x * 0.5)),
    "in place: keyword": lambda number: Block(),
    "returns: input": lambda number: Block(give=lambda x, y: (x, y)),
    "returns: pair": lambda number: Block(give=lambda x, y: (y, x)),
    "returns: view of input": lambda number: Block(give=lambda x, y: (x.view(-1, WIDE), y)),
    "returns: input, recomputed": lambda number: Recomputed(give=lambda x, y: (x, y)),
    "returns: input only, every other": lambda number: Dropped(number=number),
    "returns: input only, on some ranks": lambda number: DroppedApart(number=number),
}


class Network(nn.Module):
    """A layer, blocks that hand on a tensor or two, and a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(KINDS[kind](number) for number in range(BLOCKS))
        self.last = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.first(x)
        for block in self.blocks:
            hidden = block(hidden, more=hidden * 0.5) if "keyword" in self.kind else block(hidden)
        return self.last(hidden[0] + hidden[1] if isinstance(hidden, tuple) else hidden)


def most_gathered(events: Iterable[fullshard.Event]) -> int:
    """How many units, besides the root, were gathered or on their way at once."""
    now: set[str] = set()
    most = 0
    for event in events:
        if event.verb == "gather" and event.unit != "(root)":
            now.add(event.unit)
        elif event.verb == "free":
            now.discard(event.unit)
        most = max(most, len(now))
    return most


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_units_are_freed_in_backward(way: str) -> list[str]:
    """One that computes and one that is prefetched, whatever forwards do with their inputs."""
    problems = []
    for kind in KINDS:
        model, plain = shard(Network(kind), way, blocks_of), Network(kind)
        for _ in range(2):
            model.zero_grad()
            with fullshard.record_events() as events:
                backward(model, 0)
        backward(plain, 0, [dist.get_rank()])
        for parameter in plain.parameters():  # rank by rank: what is dropped is a rank's own
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            has = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(total), dist.all_reduce(has)
            parameter.grad = total / dist.get_world_size() if has else None
        problems += gradient_problems(kind, model, plain)
        if memory_use(model).gathered or (most := most_gathered(events)) > 2:
            problems.append(f"{kind}: {most} of {BLOCKS} units gathered at once")
    return problems


# What is gathered before the first forward is counted once.


@pytest.mark.parametrize("way", ["rows", "flat"])
def test_unshard_before_the_first_forward_is_counted_once(fake_world, way):
    fake_world(2)
    model: Any = shard(Network("plain"), way, blocks_of)
    one, two = model.blocks[:2]

    def check(gathered: int | None) -> None:
        held = memory_use(model)
        assert min(held.gathered, held.reducing, held.total, held.peak_transient) >= 0
        assert gathered is None or 0.9 * gathered <= held.gathered <= 1.1 * gathered  # one in flight is padded less
        assert held.peak_transient >= held.gathered + held.reducing

    check(0)
    one.unshard()
    once = memory_use(model).gathered
    assert once >= 4 * WIDE * (WIDE + 1), "whole rows and a whole bias"
    check(once)
    one.reshard()
    check(0)
    one.unshard(), two.unshard(async_op=True)
    check(2 * once)
    with fullshard.record_events() as events:
        loss = model(torch.ones(2, WIDE)).square().mean()
        check(None)
        loss.backward()
    check(0)
    assert all(event.live >= 0 for event in events)
    one.unshard()
    check(once)
    one.reshard()
    check(0)
    for unit in Network("plain").blocks[:2]:  # units that run alone have accounts of their own
        block: Any = shard(unit, way, alone)
        block.unshard()
        block(torch.ones(2, WIDE)).sum().backward()
        block.reshard()
        held = memory_use(block)
        assert held.gathered == 0 and held.total >= 0


class Marked(nn.Parameter):
    """A Parameter's subclass with memory of its own."""


@pytest.mark.parametrize("kind", [nn.Parameter, Marked])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_original_keeps_no_values(fake_world, layout, kind):
    fake_world(2)
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = original = kind(torch.ones(8, 8))
    values = original.untyped_storage()
    fullshard.fully_shard(layer, layout=layout)
    with plain_access():
        assert original.untyped_storage().data_ptr() != values.data_ptr()
        assert original.untyped_storage().nbytes() == 0
