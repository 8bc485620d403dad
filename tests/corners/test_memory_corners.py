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
from models import blocks_of
from training import assert_same
from ways import WAYS, shard, whole_gradients

WIDE = 8
BLOCKS = 8
five_ways = pytest.mark.parametrize("way", [way for way in WAYS if way != "blocks"])  # flat to the engine


class Block(nn.Module):
    """`sin(linear(change(x)))`; `change` may write to its argument, which is the unit's input."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.change(x)).sin()  # which keeps nothing of its result


def add_to_half(x: Tensor) -> Tensor:
    x[:, : WIDE // 2] += 0.5
    return x


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda x: x.mul_(1.5),
    "relu_": lambda x: F.leaky_relu(x, 0.3, inplace=True),
    "add_ to a part": add_to_half,
    "twice": lambda x: x.mul_(1.5).add_(0.1),
    "copy_": lambda x: x.copy_(x.detach() * 0.5 + x * 0.5),
}


class Pair(Block):
    """Hands its input on beside its output."""

    def forward(self, pair: Any) -> Any:
        x, kept = pair if isinstance(pair, tuple) else (pair, pair)
        return super().forward(x + kept), x


class Through(Block):
    """Returns its very input, changed by nothing but a term that keeps the parameters in the graph elsewhere."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


class ThroughView(Block):
    """Returns a view of its input beside its output."""

    def forward(self, x: Tensor) -> Any:
        return x.view(-1, WIDE), super().forward(x)


class Skipped(Block):
    """Every other one hands its input back: a layer that was dropped, on every rank."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.number = Skipped.count = Skipped.count + 1

    def forward(self, x: Tensor) -> Tensor:
        return x if self.number % 2 else super().forward(x)


class Keyword(Block):
    """Writes to an input that comes by keyword."""

    def forward(self, x: Tensor, *, more: Tensor | None = None) -> Tensor:
        return super().forward(x if more is None else x + more.mul_(0.5))


class Recomputed(Block):
    """Activation checkpointing inside of the unit; its input goes on as well."""

    def forward(self, x: Tensor) -> Any:
        return x, checkpoint(super().forward, x, use_reentrant=False)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    **{f"in place: {name}": (lambda change=change: Block(change)) for name, change in IN_PLACE.items()},
    "in place: keyword": Keyword,
    "returns: pair": Pair,
    "returns: input": Through,
    "returns: view of input": ThroughView,
    "returns: input, recomputed": Recomputed,
    "returns: input only, every other": Skipped,
}


class Network(nn.Module):
    """A layer, blocks that hand on a tensor or two, and a layer."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        Skipped.count = DroppedApart.count = 0
        self.first = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(build() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.first(x)
        for block in self.blocks:
            kind = getattr(block, "module", block)
            if isinstance(kind, (Through, ThroughView, Recomputed)):
                kept, new = block(hidden)
                hidden = kept + new
            elif isinstance(kind, Keyword):
                hidden = block(hidden, more=hidden * 0.5)
            else:
                hidden = block(hidden)
        if isinstance(hidden, tuple):
            hidden = hidden[0] + hidden[1]
        return self.last(hidden)


def batch(rank: int) -> Tensor:
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(rank))


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


def units_gathered(way: str, kind: str) -> tuple[int, list[str]]:
    """The most units gathered at once in the second step, and what was wrong with the gradients."""
    model = shard(Network(KINDS[kind]), way, blocks_of)
    plain = Network(KINDS[kind])
    for _ in range(2):
        model.zero_grad()
        with fullshard.record_events() as events:
            model(batch(dist.get_rank())).square().mean().backward()
    plain(torch.cat([batch(rank) for rank in range(dist.get_world_size())])).square().mean().backward()
    problems = [] if memory_use(model).gathered == 0 else ["something is gathered after the step"]
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    found = whole_gradients(model)
    for name, grad in wanted.items():
        got = found[name]
        if grad is None and (got is None or not got.any()):
            continue  # a flat parameter has no None in it
        if got is None or grad is None or not torch.allclose(got, grad, rtol=1e-4, atol=1e-6):
            problems.append(f"gradient of {name}")
    return most_gathered(events), problems


def freed_in_backward(way: str) -> list[str]:
    problems = []
    for kind in KINDS:
        most, wrong = units_gathered(way, kind)
        problems += [f"{kind}: {problem}" for problem in wrong]
        if most > 2:
            problems.append(f"{kind}: {most} of {BLOCKS} units gathered at once")
    return problems


@five_ways
def test_units_are_freed_in_backward(run_ranks, way):
    """One that computes and one that is prefetched, whatever forwards do with their inputs."""
    assert_same(run_ranks(freed_in_backward, way))


class DroppedApart(Block):
    """Hands its input back on some ranks, each rank having drawn for itself which layers it drops."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.number = DroppedApart.count = DroppedApart.count + 1

    def forward(self, x: Tensor) -> Tensor:
        return x if (self.number * 5 + dist.get_rank() * 3) % 4 < 2 else super().forward(x)


def layers_dropped_apart(way: str) -> list[str]:
    """A unit that did nothing on this rank is gathered in backward all the same: other ranks need its parts."""
    model, plain = shard(Network(DroppedApart), way, blocks_of), Network(DroppedApart)
    for each in (model, model, plain):
        each.zero_grad()
        with fullshard.record_events() as events:
            each(batch(dist.get_rank())).square().mean().backward()
        if each is model:
            most = most_gathered(events)
    problems = [] if most <= 2 else [f"{most} of {BLOCKS} units gathered at once"]
    found = whole_gradients(model)
    for name, p in plain.named_parameters():
        total = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(total)
        got = found[name]
        if not torch.allclose(torch.zeros_like(p) if got is None else got, total / dist.get_world_size(), atol=1e-7):
            problems.append(f"gradient of {name}")
    return problems


@five_ways
def test_layers_dropped_on_some_ranks(run_ranks, way):
    assert_same(run_ranks(layers_dropped_apart, way))


# What is gathered before the first forward is counted once.


def early(layout: str) -> list[str]:
    model: Any = shard(Network(Block), layout, blocks_of)
    problems = []

    def check(when: str, gathered: int | None) -> None:
        held = memory_use(model)
        if min(held.gathered, held.reducing, held.total, held.peak_transient) < 0:
            problems.append(f"{when}: negative: {held}")
        if gathered is not None and held.gathered != gathered:
            problems.append(f"{when}: {held.gathered} bytes gathered, wanted {gathered}")
        if held.peak_transient < held.gathered + held.reducing:
            problems.append(f"{when}: peak {held.peak_transient} below what is held now")

    check("at first", 0)
    model.blocks[0].unshard()
    once = memory_use(model).gathered
    if once < 4 * WIDE * (WIDE + 1):  # whole rows and a whole bias
        problems.append(f"a gathered block counts {once} bytes")
    check("after unshard", once)
    model.blocks[0].reshard()
    check("after reshard", 0)
    model.blocks[0].unshard()
    model.blocks[1].unshard(async_op=True)
    check("after another unshard", 2 * once)
    with fullshard.record_events() as events:
        loss = model(batch(0)).square().mean()
        check("after forward", None)
        loss.backward()
    check("after backward", 0)
    problems += [f"event {e.verb} {e.unit}: {e.live} bytes live" for e in events if e.live < 0]
    model.blocks[0].unshard()
    check("after unshard in a later step", once)
    model.blocks[0].reshard()
    check("at last", 0)
    return problems


@pytest.mark.parametrize("layout", ["rows", "flat", "owner"])
def test_unshard_before_the_first_forward_is_counted_once(run_ranks, layout):
    assert_same(run_ranks(early, layout))


def two_roots(layout: str) -> list[str]:
    """Units that ran alone before have accounts of their own; those of a deleted root start anew."""
    model: Any = Network(Block)
    for block in model.blocks:
        fullshard.fully_shard(block, layout=layout)
    problems = []
    for block in model.blocks[:2]:
        block.unshard()
        block(batch(0)).sum().backward()
        block.reshard()
        if (held := memory_use(block)).gathered or held.total < 0:
            problems.append(f"alone: {held}")
    return problems


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_unshard_of_units_without_a_root(run_ranks, layout):
    assert_same(run_ranks(two_roots, layout))
