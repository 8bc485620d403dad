"""No two streams race, in any setting; and every wait of the design is seen to matter: without it, some race."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard import Blocks
from fullshard.comm import lanes
from fullshard.runtime.root import Root
from fullshard.shard.gradients import Gradients
from fullshard.shard.unit import Unit
from happens_before import Event, InFlight, Stream, World, muted, watched
from models import EXAMPLES
from training import Options, shard
from wrapped import Wrapping, wrap_example

SGD = {"lr": 1e-2, "momentum": 0.9, "foreach": False}


def build(options: Options | Wrapping) -> nn.Module:
    example = EXAMPLES["gpt"]
    if isinstance(options, Wrapping):
        return wrap_example(fullshard, example.make(), example, options)
    return shard(fullshard, example.make(torch.float32), example, options)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return EXAMPLES["gpt"].loss(model, EXAMPLES["gpt"].batch(number, 0, torch.float32))


def clip(model: nn.Module) -> None:
    if isinstance(model, fullshard.FullyShardedDataParallel):
        model.clip_grad_norm_(0.1)
    else:
        fullshard.clip_grad_norm_(model.parameters(), 0.1)


@torch.no_grad()
def swap(model: nn.Module, other: list[torch.Tensor]) -> None:
    """Exchange the weights and `other`'s."""
    for parameter, average in zip(model.parameters(), other, strict=True):
        kept = parameter.detach().clone()
        parameter.copy_(average)
        average.copy_(kept)


def evaluate(model: nn.Module, average: list[torch.Tensor]) -> None:
    """Two batches with the averaged weights, which are put in before and taken out right after."""
    swap(model, average)
    with torch.no_grad():
        for number in (70, 71):
            loss_of(model, number)
    swap(model, average)


def train(model: nn.Module, micro_batches: int = 1, sync: bool = True, clips: bool = False, steps: int = 3) -> None:
    """Steps with an evaluation between any two."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(steps):
        for part in range(micro_batches):
            last = part == micro_batches - 1
            if isinstance(model, fullshard.FullyShardedDataParallel):
                with nullcontext() if sync or last else model.no_sync():
                    loss_of(model, 10 * step + part).backward()
            else:
                model.set_requires_gradient_sync(sync or last)
                loss_of(model, 10 * step + part).backward()
        if clips:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(model, average)


def races_of(options: Options | Wrapping, offload: bool, **how: Any) -> tuple[list[str], set[str], int]:
    with watched(offload) as world:
        with muted(world):  # a model that is made elsewhere
            model = build(options)
        train(model, **how)
    return list(dict.fromkeys(world.races)), {stream.name for stream in world.streams}, world.kernels


CASES: dict[str, tuple[Options | Wrapping, dict[str, Any]]] = {
    "rows": (Options(), {}),
    "flat": (Options(layout="flat"), {}),
    "blocks": (Options(layout=Blocks("row")), {}),
    "bf16": (Options(precision="bf16"), {}),
    "bf16, flat, bf16 reduced": (Options(layout="flat", precision="bf16_reduce"), {}),
    "accumulation": (Options(layout="flat"), {"micro_batches": 3}),
    "accumulation, rows": (Options(precision="bf16"), {"micro_batches": 2}),
    "accumulation without sync": (Options(), {"micro_batches": 3, "sync": False}),
    "clipping": (Options(layout="flat"), {"clips": True}),
    "kept gathered": (Options(reshard=False), {}),
    "prefetch of three": (Options(prefetch=3), {}),
    "no prefetch": (Options(prefetch=0), {}),
    "wrapper": (Wrapping(), {"micro_batches": 2, "sync": False, "clips": True}),
    "wrapper, original parameters": (Wrapping(orig=True, prefetch="BACKWARD_POST"), {"micro_batches": 2}),
}
FOUR = {
    "hybrid": (Options(mesh="hybrid"), {"micro_batches": 2}),
    "hybrid, flat": (Options(mesh="hybrid", layout="flat", precision="bf16"), {"clips": True}),
    "reshard to two": (Options(reshard=2), {}),
    "wrapper, hybrid": (Wrapping(strategy="HYBRID_SHARD", groups="mesh"), {}),
}
offloads = pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])


def check(results: list[tuple[list[str], set[str], int]], offload: bool, groups: int) -> None:
    for races, streams, kernels in results:
        assert not races, "\n".join(races[:8])
        assert kernels > 500
        assert {"inward", "outward"} <= streams if offload else "inward" not in streams
        assert sum(name.startswith("group") for name in streams) >= groups


@offloads
@pytest.mark.parametrize("case", CASES)
def test_no_races(run_ranks: Callable, case: str, offload: bool) -> None:
    options, how = CASES[case]
    check(run_ranks(races_of, options, offload, **how), offload, 1)


@offloads
@pytest.mark.parametrize("case", FOUR)
def test_no_races_on_four_ranks(run_ranks: Callable, case: str, offload: bool) -> None:
    options, how = FOUR[case]
    check(run_ranks(races_of, options, offload, world=4, **how), offload, 2)


@offloads
def test_no_races_on_one_rank(run_ranks: Callable, offload: bool) -> None:
    check(run_ranks(races_of, Options(), offload, world=1, micro_batches=2), offload, 0)


# Streams besides the compute stream, of the user's. None of these scenarios waits for the engine's memory.


def under_side(world: World) -> Stream:
    return Stream("side", world)


def steps(model: nn.Module, number: int = 2) -> None:
    """Steps on the current stream."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(number):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module, world: World) -> None:
    steps(model, 3)


def accumulating(model: nn.Module, world: World) -> None:
    train(model, micro_batches=2, steps=2)


def evaluating(model: nn.Module, world: World) -> None:
    """No backward."""
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        evaluate(model, average)


def swapped_while_unsharded(model: nn.Module, world: World) -> None:
    """The weights of a unit that the user gathered are exchanged."""
    block: Any = model.blocks[0]  # type: ignore[index]
    sharded = list(block.parameters())
    average = [parameter.detach().clone() for parameter in sharded]
    for _ in range(2):
        block.unshard()
        with torch.no_grad():
            for parameter, values in zip(sharded, average, strict=True):
                parameter.copy_(values)
        block.reshard()


def swapped_after_a_gather_in_vain(model: nn.Module, world: World) -> None:
    block: Any = model.blocks[0]  # type: ignore[index]
    block.unshard(async_op=True)
    block.reshard()
    swap(block, [parameter.detach().clone() for parameter in block.parameters()])


def swapped_after_a_failure(model: nn.Module, world: World) -> None:
    """A forward raises; the weights are exchanged."""
    steps(model, 1)
    head: Any = model.head
    handle = head.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    handle.remove()
    swap(model, average)


def swapped_after_a_broken_backward(model: nn.Module, world: World) -> None:
    average = [parameter.detach().clone() for parameter in model.parameters()]
    norm: Any = model.blocks[0].norm1  # type: ignore[index]
    handle = norm.register_full_backward_pre_hook(lambda module, grads: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0).backward()
    handle.remove()
    swap(model, average)
    steps(model, 1)


def stepped_by_hooks(model: nn.Module, world: World) -> None:
    """Parameters are stepped as they get their gradients."""

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-2)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        loss_of(model, number).backward()


def unsharded_under_side(model: nn.Module, world: World) -> None:
    side = under_side(world)
    block: Any = model.blocks[1]  # type: ignore[index]
    for _ in range(2):
        with side:
            block.unshard(async_op=True)
        steps(model, 1)
        with side:
            block.unshard()
        steps(model, 1)


def resharded_under_side(model: nn.Module, world: World) -> None:
    side = under_side(world)
    block: Any = model.blocks[1]  # type: ignore[index]
    for _ in range(2):
        block.unshard()
        with side:
            block.reshard()
        steps(model, 1)
        block.unshard(async_op=True)
        with side:
            block.reshard()
        steps(model, 1)


def evaluated_under_side(model: nn.Module, world: World) -> None:
    side = under_side(world)
    for _ in range(2):
        with side, torch.no_grad():
            loss_of(model, 0)
        steps(model, 1)


@contextmanager
def ends_under(stream: Stream) -> Iterator[None]:
    """Autograd runs a backward under the streams of its forward, and what comes at its end under the caller's."""
    end = Root.end_backward

    def ended(root: Root) -> None:
        with stream:
            end(root)

    with mock.patch.object(Root, "end_backward", ended):
        yield


def trained_under_side(model: nn.Module, world: World, micro_batches: int = 1) -> None:
    """Forward and backward under a stream of the user's, optimizer under the compute stream."""
    side = under_side(world)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(4):
        with ends_under(world.compute):
            for part in range(micro_batches):
                with side if step % 2 == 0 else nullcontext():
                    loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_under_side(model: nn.Module, world: World) -> None:
    """The first of two batches under a stream of the user's, not reduced."""
    side = under_side(world)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(3):
        model.set_requires_gradient_sync(False)
        with ends_under(world.compute), side:
            loss_of(model, step).backward()
        if step == 1:
            optimizer.zero_grad()
        model.set_requires_gradient_sync(True)
        loss_of(model, 10 + step).backward()
        optimizer.step()
        optimizer.zero_grad()


SCENARIOS: dict[str, Callable[[nn.Module, World], None]] = {
    scenario.__name__: scenario
    for scenario in (
        plain,
        accumulating,
        evaluating,
        swapped_while_unsharded,
        swapped_after_a_gather_in_vain,
        swapped_after_a_failure,
        swapped_after_a_broken_backward,
        stepped_by_hooks,
        unsharded_under_side,
        resharded_under_side,
        evaluated_under_side,
        trained_under_side,
        accumulated_under_side,
    )
}


def races_in(scenario: str, options: Options, offload: bool, mutation: str | None = None) -> list[str]:
    with watched(offload) as world:
        with muted(world):
            model = build(options)
        with nullcontext() if mutation is None else MUTATIONS[mutation]():
            SCENARIOS[scenario](model, world)
    return list(dict.fromkeys(world.races))
