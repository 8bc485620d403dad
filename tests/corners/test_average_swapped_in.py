"""Evaluating with averaged weights: set aside, replace, evaluate, put back. In every way in which programs do it.

An assignment of `.data` gives a parameter other memory. It never writes to the memory that it had, which the program
may hold: what was set aside is what is put back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from ways import LAYOUTS, SINGLE, WAYS, but_last, inner, loss_of, mine, shard, whole_parameters, without_sync

WIDTH = 5
DECAY = 0.5
Parameters = list[nn.Parameter]


def model_of_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)), nn.Linear(WIDTH, 2))


def assign(parameters: Parameters, values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


# Each sets aside, puts the average in place, yields for the evaluation, and puts the old values back.


def all_by_data(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = [p.data for p in parameters]
    assign(parameters, average)
    yield
    assign(parameters, backup)


def all_by_detached(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = [p.detach() for p in parameters]
    assign(parameters, average)
    yield
    assign(parameters, backup)


def exchanged_in_turn(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    for _ in range(2):
        for at, parameter in enumerate(parameters):
            parameter.data, average[at] = average[at], parameter.data
        yield


def with_copies_of_the_average(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = {id(p): p.data for p in parameters}
    assign(parameters, [value.clone() for value in average])
    yield
    assign(parameters, [backup[id(p)] for p in parameters])


def twice(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    """Put back, and replaced once more, before anything runs."""
    backup = [p.data for p in parameters]
    for values in (average, backup, average):
        assign(parameters, values)
    yield
    assign(parameters, backup)


def only_weights(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    """A part of every unit's parameters."""
    yield from all_by_data(parameters[::2], average[::2])


def by_copies(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = [p.detach().clone() for p in parameters]
    for parameter, value in zip(parameters, average, strict=True):
        parameter.data.copy_(value)
    yield
    for parameter, value in zip(parameters, backup, strict=True):
        parameter.data.copy_(value)


def copied_in_and_assigned_back(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = [p.data.clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)
    yield
    assign(parameters, backup)


SWAPS: list[Callable[[Parameters, list[Tensor]], Iterator[None]]] = [
    all_by_data,
    all_by_detached,
    exchanged_in_turn,
    with_copies_of_the_average,
    twice,
    only_weights,
    by_copies,
    copied_in_and_assigned_back,
]


def train(model: nn.Module, parameters: Parameters, stepped: Any, swap: Any, inputs: Callable[[int], Tensor]) -> Any:
    """Three steps with momentum, and after each an evaluation with the average; losses of both."""
    optimizer = torch.optim.SGD(stepped, lr=0.2, momentum=0.9)
    average = [p.detach().clone() for p in parameters]
    losses = []
    for step in range(3):
        loss = loss_of(model, inputs(step))
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for value, parameter in zip(average, parameters, strict=True):
            value.mul_(DECAY).add_(parameter.detach(), alpha=1 - DECAY)
        for _ in swap(parameters, average):
            with torch.no_grad():
                losses.append(loss_of(model, inputs(step + 10)))
    return torch.stack(losses)


def same_inputs(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def test_what_was_set_aside_is_what_is_put_back(run_ranks):
    """Every rank has the same batch: losses are one process's."""
    run_ranks(swapped_every_way)


def swapped_every_way() -> None:
    problems = []
    for swap in SWAPS:
        plain = model_of_blocks()
        expected = train(plain, list(plain.parameters()), plain.parameters(), swap, same_inputs)
        for at, (way, views) in enumerate([*((way, False) for way in WAYS), ("rows", True), ("owner", True)]):
            if way == "wrapper" and swap is only_weights:
                continue  # one FlatParameter is no weight
            keep = (at + SWAPS.index(swap)) % 2 == 0
            model = shard(model_of_blocks(), way, but_last, keep=keep)
            stepped = fullshard.optimizer_view(model) if views else model.parameters()
            losses = train(model, list(model.parameters()), stepped, swap, same_inputs)
            if not torch.allclose(losses, expected, rtol=1e-4):
                problems.append(f"{swap.__name__} {way} keep={keep} views={views}: {losses.tolist()}")
            weights = whole_parameters(model)
            for name, p in plain.named_parameters():
                if not torch.allclose(weights[name], p, atol=SINGLE):
                    problems.append(f"{swap.__name__} {way} keep={keep} views={views}: {name}")
    assert not problems, "\n".join(problems)


def test_an_assignment_writes_to_no_tensor_that_somebody_holds(run_ranks):
    run_ranks(held_before)


def held_before() -> None:
    """Views of every kind, taken before; the assigned tensor is not written to by the next step either."""
    for way, keep in itertools.product(WAYS, (False, True)):
        model = shard(model_of_blocks(), way, but_last, keep=keep)
        loss_of(model, mine(0).float()).backward()
        for parameter in model.parameters():
            views = [parameter.data, parameter.detach(), getattr(parameter, "to_local", parameter.detach)()]
            before = [plain_of(view).clone() for view in views]
            assigned = parameter.detach() * 2
            parameter.data = assigned
            parameter.data = assigned * 2
            for view, values in zip(views, before, strict=True):
                assert torch.equal(plain_of(view), values), f"{way} keep={keep}"


def plain_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_what_is_assigned_is_what_is_read_and_saved_at_once(run_ranks, tmp_path):
    run_ranks(read_at_once, tmp_path)


def read_at_once(folder: Any) -> None:
    """Before any forward: whole values, and what is saved."""
    for way in WAYS:
        model = shard(model_of_blocks(), way, but_last)
        loss_of(model, mine(0).float()).backward()
        whole = whole_parameters(model)
        for parameter in inner(model).parameters():
            parameter.data = parameter.detach() * 2
        for name, value in whole_parameters(model).items():
            assert torch.equal(value, whole[name] * 2), f"{way} {name}"
        fullshard.save(folder / way, model, step=1)
        other = model_of_blocks()
        fullshard.load(folder / way, other)
        for name, value in other.named_parameters():
            assert torch.equal(value, whole[name] * 2), f"{way} {name}"


def test_gradients_and_steps_outlive_an_assignment(run_ranks):
    run_ranks(assigned_in_between)


def assigned_in_between() -> None:
    """Micro-batches, some without sync, with assignments after each, and a step with no forward in between."""
    wanted: dict[str, Tensor] = {}
    for way, views in [(None, False), *((way, False) for way in WAYS), *((way, True) for way in LAYOUTS)]:
        model: Any = model_of_blocks()
        model = shard(model, way, but_last) if way else model
        optimizer = torch.optim.SGD(fullshard.optimizer_view(model) if views else model.parameters(), lr=0.2)
        for step in range(2):
            for synced in (False, True, True):
                with contextlib.nullcontext() if synced else without_sync(model):
                    loss_of(model, same_inputs(step)).backward()
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.9
            optimizer.step()
            optimizer.zero_grad()
        if way is None:
            wanted = {name: p.detach() for name, p in model.named_parameters()}
        for name, value in whole_parameters(model).items() if way else ():
            assert torch.allclose(value, wanted[name], atol=SINGLE), f"{way} views={views}: {name}"


def test_the_average_is_swapped_into_optimizer_views(run_ranks):
    run_ranks(swapped_views)


def swapped_views() -> None:
    """What the optimizer holds is all that the program has."""
    for swap, way in itertools.product(SWAPS, LAYOUTS):
        if swap is only_weights:  # a view is of several parameters
            continue
        plain = model_of_blocks()
        expected = train(plain, list(plain.parameters()), plain.parameters(), swap, same_inputs)
        model = shard(model_of_blocks(), way, but_last)
        views = fullshard.optimizer_view(model)
        losses = train(model, views, views, swap, same_inputs)
        assert torch.allclose(losses, expected, rtol=1e-4), f"{swap.__name__} {way}: {losses} {expected}"
    views[0].data = torch.zeros(1)
    with pytest.raises(fullshard.ConfigError, match="another shape"):
        model(same_inputs(0))
