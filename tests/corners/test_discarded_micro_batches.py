"""A micro-batch accumulated without sync is given up by `zero_grad`, as it is without sharding.

without sync    zero_grad     with sync      step
(1st batch) ----X             (2nd batch) -> the 2nd batch alone
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from training import assert_same
from ways import (
    LAYOUTS,
    WRAPPERS,
    batch,
    but_last,
    every_way,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    shard,
    value_problems,
    without_sync,
    wrap,
)


def quietly(action: Callable[[], Any]) -> Any:
    """Without the warnings that PyTorch's own give on a machine without accelerator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action()


def by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def by_optimizer_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_children(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Unit by unit, none of them the root."""
    root = inner(model)
    for child in root.children():
        child.zero_grad()
    if "_flat_param" in dict(root.named_parameters(recurse=False)):  # the root's own, which no child shows
        root._flat_param.grad = None


DISCARDS: dict[str, Callable] = {
    name: value for name, value in list(globals().items()) if name.startswith("by_") and callable(value)
}


# What may have happened before zero_grad, each with the same seeds in the same order on either model.


def batch_of(model: nn.Module, seed: int, sharded: bool) -> torch.Tensor:
    return loss_of(model, mine(seed) if sharded else batch(seed))


def one_unsynced(model: nn.Module, sharded: bool) -> None:
    with without_sync(model):
        batch_of(model, 1, sharded).backward()


def two_unsynced(model: nn.Module, sharded: bool) -> None:
    one_unsynced(model, sharded)
    one_unsynced(model, sharded)


def synced_then_unsynced(model: nn.Module, sharded: bool) -> None:
    batch_of(model, 2, sharded).backward()
    one_unsynced(model, sharded)


def unsynced_then_synced(model: nn.Module, sharded: bool) -> None:
    one_unsynced(model, sharded)
    batch_of(model, 2, sharded).backward()


def unsynced_then_forward(model: nn.Module, sharded: bool) -> None:
    """A forward alone after it: `zero_grad` comes between a forward and its backward."""
    one_unsynced(model, sharded)
    batch_of(model, 2, sharded)


def synced(model: nn.Module, sharded: bool) -> None:
    batch_of(model, 2, sharded).backward()


BEFORE = {
    f.__name__: f
    for f in (one_unsynced, two_unsynced, synced_then_unsynced, unsynced_then_synced, unsynced_then_forward, synced)
}


@every_way
@pytest.mark.parametrize("discard", DISCARDS)
def test_zero_grad_gives_up_what_was_not_synced(run_ranks, discard, way):
    assert_same(run_ranks(given_up, discard, way))


def given_up(discard: str, way: str) -> list[str]:
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last), layers()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for name, before in BEFORE.items():
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            before(each, each is model)
            DISCARDS[discard](each, optimizer)
            batch_of(each, 3, each is model).backward()
        found = gradient_problems(name, model, reference)[:1]
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.step()
            each.zero_grad()
        if found := found or value_problems(name, model, reference)[:1]:
            problems += found
            model, reference = shard(layers(), way, but_last), layers()
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    return problems


@every_way
@pytest.mark.parametrize("discard", ["by_model", "by_optimizer", "by_hand"])
def test_zero_grad_between_forward_and_backward(run_ranks, discard, way):
    """Gives up what came before, and nothing of the backward that follows."""
    assert_same(run_ranks(given_up_between, discard, way))


def given_up_between(discard: str, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        one_unsynced(each, each is model)
        loss = batch_of(each, 3, each is model)
        DISCARDS[discard](each, optimizer)
        loss.backward()
    return gradient_problems("after one backward", model, reference)


@every_way
@pytest.mark.parametrize("partly", ["a unit", "some parameters' optimizer", "half a unit"])
def test_some_parameters_gradients_are_given_up(run_ranks, partly, way):
    """The others' accumulated gradients stay: two optimizers that each zero their own."""
    assert_same(run_ranks(partly_given_up, partly, way))


def partly_given_up(partly: str, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        one_unsynced(each, each is model)
        if partly == "a unit":
            inner(each)[0].zero_grad()
        elif partly == "some parameters' optimizer":
            torch.optim.SGD([*inner(each)[0].parameters()], lr=0.1).zero_grad()
        elif way == "wrapper":
            return []  # one gradient for all of a unit
        else:
            for name, parameter in inner(each)[0].named_parameters():
                if "weight" in name:
                    parameter.grad = None
        batch_of(each, 3, each is model).backward()
    return gradient_problems(partly, model, reference)


@every_way
def test_accumulation_without_zero_grad_is_complete(run_ranks, way):
    """The other side: what reads and changes gradients without dropping them gives nothing up."""
    assert_same(run_ranks(accumulated, way))


def accumulated(way: str) -> list[str]:
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        each.zero_grad()
        for seed in range(3):
            with without_sync(each):
                batch_of(each, seed, each is model).backward()
            with torch.no_grad():
                batch_of(each, 9, each is model)  # an evaluation between
            each.requires_grad_(True)
            [parameter.grad for parameter in each.parameters()]
            each.train()
        batch_of(each, 3, each is model).backward()
    problems += gradient_problems("three without sync, one with it", model, reference)
    for each in (model, reference):
        each.zero_grad()
        batch_of(each, 4, each is model).backward()
    return problems + gradient_problems("the batch after", model, reference)


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("discard", ["by_model", "by_optimizer", "by_hand"])
def test_zero_grad_gives_up_what_was_not_reduced_over_replicas(run_ranks, discard, way):
    """Hybrid: `set_requires_all_reduce(False)` keeps slices that are reduced over one axis only."""
    assert_same(run_ranks(partial_given_up, discard, way, world=4))


def partial_given_up(discard: str, way: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = shard(layers(), way, but_last, mesh=mesh), layers()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        if each is model:
            model.set_requires_all_reduce(False)
        batch_of(each, 1, each is model).backward()
        if each is model:
            model.set_requires_all_reduce(True)
        DISCARDS[discard](each, optimizer)
        batch_of(each, 3, each is model).backward()
    return gradient_problems("after one backward", model, reference)


@pytest.mark.parametrize("way", WRAPPERS)
def test_pytorchs_wrapper_gives_it_up_too(run_ranks, way):
    """The contract, from outside: PyTorch's wrapper ends with the same parameters as the unsharded model."""
    assert_same(run_ranks(given_up_by_pytorchs, way))


def given_up_by_pytorchs(way: str) -> list[str]:
    problems: list[str] = []
    for discard in ("by_model", "by_optimizer"):
        plain, model = layers(), layers()
        model = quietly(lambda model=model: wrap(model, torch_fsdp, use_orig_params=WRAPPERS[way]))
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            one_unsynced(each, each is model)
            DISCARDS[discard](each, optimizer)
            batch_of(each, 3, each is model).backward()
            optimizer.step()
        state = quietly(model.state_dict)
        problems += [n for n, p in plain.named_parameters() if not torch.allclose(state[n], p, rtol=1e-10)]
    return problems


@every_way
def test_memory_of_what_is_given_up_comes_back(run_ranks, way):
    assert_same(run_ranks(memory_given_back, way))


def memory_given_back(way: str) -> list[str]:
    """After `zero_grad` and the next pass nothing of the unreduced gradients is held."""
    model = shard(layers(), way, but_last)
    one_unsynced(model, True)
    held = fullshard.memory_use(model).reducing
    model.zero_grad()
    with torch.no_grad():
        model(mine(2))
    left = fullshard.memory_use(model).reducing
    return [] if held and not left else [f"{left} bytes wait to be reduced after zero_grad, {held} before it"]
