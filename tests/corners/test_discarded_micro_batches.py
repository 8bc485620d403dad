"""A micro-batch accumulated without sync is given up by `zero_grad`, as it is without sharding.

without sync    zero_grad     with sync      step
(1st batch) ----X             (2nd batch) -> the 2nd batch alone
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ways import (
    LAYOUTS,
    batch,
    but_last,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    synced,
)


def by_children(model: nn.Module, optimizer: Any) -> None:
    """Unit by unit, none of them the root."""
    root = inner(model)
    for child in root.children():
        child.zero_grad()
    if "_flat_param" in dict(root.named_parameters(recurse=False)):  # the root's own, which no child shows
        root._flat_param.grad = None


DISCARDS: dict[str, Callable[[Any, Any], object]] = {
    "by model": lambda model, optimizer: model.zero_grad(),
    "by optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "by optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(parameter, "grad", None) for parameter in model.parameters()],
    "by children": by_children,
}


def of_batch(model: nn.Module, seed: int) -> Tensor:
    is_sharded = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
    return loss_of(model, mine(seed) if is_sharded else batch(seed))


def accumulate(model: nn.Module, *syncs: bool) -> None:
    """A backward for each, with sync or without."""
    for seed, sync in enumerate(syncs, start=1):
        with synced(model, sync):
            of_batch(model, seed).backward()


# What may have happened before zero_grad: backwards with sync or without, and perhaps a forward alone after them.
BEFORE = [((False, False), True), ((True, False), False), ((False, True), False)]


@some_ways
@pytest.mark.parametrize("discard", DISCARDS)
@on_ranks
def test_zero_grad_gives_up_what_was_not_synced(discard: str, way: str) -> list[str]:
    """Also between a forward and its backward: nothing of the backward that follows."""
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last), layers()
    for (syncs, forward), between in itertools.product(BEFORE, (False, True)):
        for each in (model, reference):
            accumulate(each, *syncs)
            if forward:
                of_batch(each, 4)
            loss = of_batch(each, 3) if between else None
            DISCARDS[discard](each, torch.optim.SGD(each.parameters(), lr=0.1))
            (of_batch(each, 3) if loss is None else loss).backward()
        problems += gradient_problems(f"{syncs} {forward} {between}", model, reference)[:1]
        model.zero_grad(), reference.zero_grad()
    return problems


@pytest.mark.parametrize("way", ["rows", "wrapper", "originals"])
@on_ranks
def test_some_parameters_gradients_are_given_up(way: str) -> list[str]:
    """The others' accumulated gradients stay: two optimizers that each zero their own."""
    problems: list[str] = []
    for partly in ("a unit", *([] if way == "wrapper" else ["half a unit"])):  # which has one gradient there
        model, reference = shard(layers(), way, but_last), layers()
        for each in (model, reference):
            accumulate(each, False)
            unit = inner(each)[0]
            if partly == "a unit":
                torch.optim.SGD([*unit.parameters()], lr=0.1).zero_grad()
            for name, parameter in unit.named_parameters() if partly == "half a unit" else ():
                if "weight" in name:
                    parameter.grad = None
            of_batch(each, 3).backward()
        problems += gradient_problems(partly, model, reference)
    return problems


@some_ways
@on_ranks
def test_accumulation_without_zero_grad_is_complete(way: str) -> list[str]:
    """The other side: what reads and changes gradients without dropping them gives nothing up."""
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        for _ in range(3):
            accumulate(each, False)
            with torch.no_grad():
                of_batch(each, 9)  # an evaluation between
            each.requires_grad_(True)
            [parameter.grad for parameter in each.parameters()]
            each.train()
        of_batch(each, 3).backward()
    return gradient_problems("three without sync, one with it", model, reference)


@pytest.mark.parametrize("way", LAYOUTS)
@on_ranks(world=4)
def test_zero_grad_gives_up_what_was_not_reduced_over_replicas(way: str) -> list[str]:
    """Hybrid: `set_requires_all_reduce(False)` keeps slices that are reduced over one axis only."""
    problems = []
    for discard in ("by model", "by optimizer", "by hand"):
        model, reference = shard(layers(), way, but_last, hybrid=True), layers()
        model.set_requires_all_reduce(False)
        of_batch(model, 1).backward()
        model.set_requires_all_reduce(True)
        DISCARDS[discard](model, torch.optim.SGD(model.parameters(), lr=0.1))
        of_batch(model, 3).backward(), of_batch(reference, 3).backward()
        problems += gradient_problems(discard, model, reference)
    return problems
