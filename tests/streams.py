"""What runs on simulated streams (`happens_before.py`), and the waits that are taken out to see that each matters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard.comm import lanes
from fullshard.comm.lanes import Lanes, Turns
from fullshard.runtime import runners_in
from fullshard.runtime.root import Root
from fullshard.shard import Unit
from happens_before import Event, InFlight, Stream, World, muted, watched
from models import Example, blocks_of
from quantised import GatheredInt8
from training import Options, shard
from wrapped import Wrapping, wrap_example


class Tower(nn.Module):
    """Three blocks, so many that the first has to go before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Quantised(Tower):
    """With weights of a class that is sent as int8."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].weight = nn.Parameter(GatheredInt8(block[0].weight.detach()))


EXAMPLE = Example(Tower, blocks_of, kind="vectors", width=4)
SUBCLASSES = replace(EXAMPLE, build=Quantised)
MIXED = Options(layout="flat", precision="bf16")
SGD = {"lr": 1e-2, "momentum": 0.9, "foreach": False}


def build(options: Options | Wrapping, example: Example = EXAMPLE) -> nn.Module:
    if isinstance(options, Wrapping):
        return wrap_example(fullshard, example.make(), example, options)
    return shard(fullshard, example.make(torch.float32), example, options)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return EXAMPLE.loss(model, EXAMPLE.batch(number, 0, torch.float32))


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


def train(model: nn.Module, micro_batches: int = 1, sync: bool = True, clips: bool = False, steps: int = 2) -> None:
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


# Streams besides the compute stream, of the user's. None of these scenarios waits for the engine's memory.


def under_side(world: World) -> Stream:
    return Stream("side", world)


def steps(model: nn.Module, number: int = 2, given: torch.optim.Optimizer | None = None) -> None:
    """Steps on the current stream."""
    optimizer = given or torch.optim.SGD(model.parameters(), **SGD)
    for step in range(number):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module, world: World) -> None:
    steps(model, 3)


def accumulating(model: nn.Module, world: World) -> None:
    train(model, micro_batches=2)


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
    layer: Any = model.blocks[0][0]  # type: ignore[index]
    handle = layer.register_full_backward_pre_hook(lambda module, grads: 1 / 0)
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


def swapped_after_accumulation(model: nn.Module, world: World) -> None:
    """A backward brings nothing home."""
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    loss_of(model, 0).backward()
    swap(model, [parameter.detach().clone() for parameter in model.parameters()])


def work_on(*streams: Stream) -> None:
    """The user's own: it gets what memory is free."""
    for stream in streams:
        with stream:
            torch.ones(8)


def unsharded_under_side(model: nn.Module, world: World) -> None:
    side, optimizer = under_side(world), torch.optim.SGD(model.parameters(), **SGD)
    block: Any = model.blocks[1]  # type: ignore[index]
    for asynchronous in (True, False, True):
        with side:
            block.unshard(async_op=asynchronous)
        work_on(world.compute, side)
        with torch.no_grad():
            loss_of(model, 0)
        work_on(side)
        with side:
            block.unshard(async_op=asynchronous)
        block.reshard()
        work_on(side)
        with side:
            handle = block.unshard(async_op=True)
        handle.wait()
        work_on(side, world.compute)
        steps(model, 1, optimizer)
        work_on(side)


def resharded_under_side(model: nn.Module, world: World) -> None:
    side = under_side(world)
    block: Any = model.blocks[1]  # type: ignore[index]
    for asynchronous in (True, False, True):
        block.unshard(async_op=asynchronous)
        with side:
            block.reshard()
        work_on(world.compute, side)
        steps(model, 1)


def evaluated_under_side(model: nn.Module, world: World) -> None:
    side = under_side(world)
    for _ in range(2):
        with side, torch.no_grad():
            loss_of(model, 0)
        work_on(world.compute)
        steps(model, 1)
        work_on(side)


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
                work_on(side, world.compute)
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
        work_on(side, world.compute)
        model.set_requires_gradient_sync(True)
        loss_of(model, 10 + step).backward()
        optimizer.step()
        optimizer.zero_grad()


def called_under_side(model: nn.Module, world: World) -> None:
    """A block runs under a stream of the user's, its backward ends under that of its input: another block's output."""
    side, compute = under_side(world), world.compute

    def switch(stream: Stream) -> None:
        stream.wait_stream(world.current)
        world.current = stream

    class Opened(torch.autograd.Function):
        """On a device autograd runs hooks on a tensor under the stream that the tensor was made under."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            switch(compute)
            return grad

    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            switch(compute)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            switch(side)
            return grad

    def chain(x: torch.Tensor) -> torch.Tensor:
        first, second, third = model.blocks  # type: ignore[misc]
        x = first(model.stem(x))  # type: ignore[operator]
        switch(side)
        x = Closed.apply(second(x))
        return model.head(third(x))  # type: ignore[operator]

    linear: Any = model.blocks[1][0]  # type: ignore[index]
    forward = linear.forward
    linear.forward = lambda x: forward(Opened.apply(x))
    model.forward = chain
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(4):
        loss_of(model, step).backward()
        work_on(side, compute)
        optimizer.step()
        optimizer.zero_grad()


def state_on_host(model: nn.Module, world: World, inside: bool = False) -> None:
    if runners_in(model)[0].unit.buckets[0].home is not None:
        return  # with parameters in the host's memory, state is there anyway

    def page_locked(numel: int) -> torch.Tensor:
        memory = torch.empty(numel, dtype=torch.int64)
        world.number(memory.untyped_storage(), pinned=True)
        return memory

    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    module = importlib.import_module("fullshard.optim.state_on_host")
    with mock.patch.object(module, "host_buffer", page_locked):
        state = fullshard.optimizer_state_on_host(optimizer)
        if inside:
            fullshard.step_in_backward(optimizer)
        steps(model, 4, optimizer)
        assert state is not None and state.nbytes
        for entries in optimizer.state.values():
            entries["momentum_buffer"].mul_(0.5)  # by the host
        steps(model, 2, optimizer)


def state_on_host_in_backward(model: nn.Module, world: World) -> None:
    state_on_host(model, world, inside=True)


SCENARIOS: dict[str, Callable[[nn.Module, World], None]] = {
    one.__name__: one
    for one in (
        plain, accumulating, evaluating, swapped_while_unsharded, swapped_after_a_gather_in_vain,
        swapped_after_a_failure, swapped_after_a_broken_backward, swapped_after_accumulation, stepped_by_hooks,
        unsharded_under_side, resharded_under_side, evaluated_under_side, trained_under_side, accumulated_under_side,
        called_under_side,
        state_on_host, state_on_host_in_backward,
    )
}  # fmt: skip

# Waits, taken out one at a time.


def without(owner: type, name: str, when: Callable[..., bool] = lambda *given: True) -> AbstractContextManager[Any]:
    """The method does nothing, where `when` says so of what it is called with."""
    original = getattr(owner, name)

    def mutated(self: Any, *given: Any) -> Any:
        return None if when(self, *given) else original(self, *given)

    return mock.patch.object(owner, name, mutated)


def inside(function: str) -> bool:
    """Whether a function of that name is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def unheld_slices() -> AbstractContextManager[Any]:
    leaving = lanes._Leaving
    return mock.patch.object(lanes, "_Leaving", lambda reduced, *rest: leaving(None, *rest))


def unheld_shards() -> AbstractContextManager[Any]:
    issue = Unit.issue_gather

    def mutated(self: Unit, *given: Any, **named: Any) -> None:
        issue(self, *given, **named)
        if self.gathered.comm is None:
            self.gathered.spend()

    return mock.patch.object(Unit, "issue_gather", mutated)


def no_settle(caller: str) -> AbstractContextManager[Any]:
    return without(Lanes, "settle", lambda self: inside(caller))


def no_turn(method: str, caller: str) -> AbstractContextManager[Any]:
    return without(Turns, method, lambda self: sys._getframe(2).f_code.co_name == caller)


def named(stream: str) -> Callable[..., bool]:
    return lambda waiter, *given: waiter.name == stream


def of(stream: str) -> Callable[..., bool]:
    """Events of this stream."""
    return lambda *given: given[-1].stream.name == stream


def issued(verb: str) -> Callable[..., bool]:
    return lambda collective: collective.verb == verb


MUTATIONS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, bool]] = {
    # what takes a wait out; where it is missed, and whether with shards in the host's memory
    "inward waits for compute": (partial(without, Stream, "wait_stream", named("inward")), "plain", True),
    "a gather waits for the copy in": (
        lambda: mock.patch.object(Lanes, "gathering", lambda self, comm: comm),
        "plain",
        True,
    ),
    "compute waits for the lane": (partial(without, Stream, "wait_event", of("inward")), "plain", True),
    "compute waits for a gather": (partial(without, InFlight, "order", issued("gather")), "plain", False),
    "compute waits for a reduction": (partial(without, InFlight, "order", issued("reduce")), "plain", False),
    "compute waits for an all-reduce": (partial(without, InFlight, "order", issued("all_reduce")), "plain", False),
    "a staged shard is held": (unheld_shards, "plain", True),
    "outward waits for compute": (partial(without, Stream, "wait_stream", named("outward")), "plain", True),
    "a slice is held": (unheld_slices, "plain", True),
    "compute waits for the third last slice": (partial(without, Stream, "wait_event", of("outward")), "plain", True),
    "the host waits before it adds": (partial(without, Event, "synchronize", of("outward")), "accumulating", True),
    "the host waits for gradients": (partial(without, Stream, "synchronize", named("outward")), "plain", True),
    "the host waits at the end of a pass": (partial(no_settle, "_settle"), "evaluating", True),
    "the host waits at the end of a backward": (
        partial(without, Event, "synchronize", lambda e: e.stream.name == "inward" and inside("end")),
        "swapped_after_accumulation",
        True,
    ),
    "the host waits for unshard": (partial(no_settle, "wait_unshard"), "swapped_while_unsharded", True),
    "the host waits in reshard": (partial(no_settle, "free_for_user"), "swapped_after_a_gather_in_vain", True),
    "the host waits in recovery": (partial(no_settle, "recover"), "swapped_after_a_broken_backward", True),
    "the host waits before hooks": (partial(no_settle, "_run_hooks"), "stepped_by_hooks", True),
    "a step waits for its state": (
        partial(
            without, Stream, "wait_stream", lambda waiter, other: (waiter.name, other.name) == ("compute", "inward")
        ),
        "state_on_host",
        False,
    ),
    "inward waits for state that leaves": (partial(without, Turns, "wait"), "state_on_host", False),
    "outward waits for a step": (partial(without, Stream, "wait_stream", named("outward")), "state_on_host", False),
    "state that leaves is held": (unheld_slices, "state_on_host", False),
    "the host waits for state": (partial(no_settle, "_finish"), "state_on_host", False),
    "a stream waits for the one before it": (partial(without, Turns, "take"), "trained_under_side", False),
    "memory goes back to who has waited": (partial(without, Turns, "give"), "unsharded_under_side", True),
    "... when a gather is waited for": (partial(no_turn, "take", "finish_gather"), "unsharded_under_side", False),
    "... when a unit is freed": (partial(no_turn, "take", "free"), "resharded_under_side", False),
    "... when a reduction is waited for": (partial(no_turn, "take", "wait"), "trained_under_side", False),
    "... of what was staged": (partial(no_turn, "give", "finish_gather"), "unsharded_under_side", False),
    "... of a freed unit": (partial(no_turn, "give", "free"), "unsharded_under_side", False),
    "... of collected gradients": (partial(no_turn, "give", "collect"), "accumulated_under_side", False),
    "... of gradients that are reduced as last time": (partial(no_turn, "give", "close"), "called_under_side", False),
}
OTHERWISE = {  # than `MIXED`, of two ranks
    "compute waits for the lane": (MIXED, 1),
    "compute waits for an all-reduce": (Options(mesh="hybrid"), 4),
    "a staged shard is held": (replace(MIXED, prefetch=3), 2),
}


def races_in(
    scenario: str, options: Options, offload: bool, mutation: str | None = None, example: Example = EXAMPLE
) -> list[str]:
    with watched(offload) as world:
        with muted(world):
            model = build(options, example)
        with nullcontext() if mutation is None else MUTATIONS[mutation][0]():
            for runner in runners_in(model):
                runner.unit.drop_plans()  # bound methods, from before the mutation
            SCENARIOS[scenario](model, world)
    return list(dict.fromkeys(world.races))
