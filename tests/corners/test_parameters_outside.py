"""Parameters that no unit holds, in an optimizer beside sharded ones: each rank would train its own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.optim import guard
from ways import on_ranks

pytestmark = pytest.mark.gloo("it is said once a process")

FORMS = ["fully_shard", "wrapper"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def shard_blocks(model: Model, form: str) -> None:
    for index, block in enumerate(model.blocks):
        if form == "wrapper":
            model.blocks[index] = fullshard.FullyShardedDataParallel(block, use_orig_params=True)
        else:
            fully_shard(block)


def told_at_steps(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    """What two steps warn of."""
    with warnings.catch_warnings(record=True) as told, mock.patch.object(guard, "_warned", set()):
        warnings.simplefilter("always")
        for step in range(2):
            model(torch.tensor([dist.get_rank(), step])).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return [str(one.message) for one in told if "parameters that no unit holds" in str(one.message)]


SGD = partial(torch.optim.SGD, lr=0.1)


def without_the_root(form: str, with_names: bool) -> list[str]:
    model = Model()
    shard_blocks(model, form)
    optimizers = [SGD(model.named_parameters() if with_names else model.parameters()) for _ in range(2)]
    return told_at_steps(model, *optimizers)


@on_ranks
def test_a_root_that_was_forgotten_is_named_once() -> None:
    for form, with_names in itertools.product(FORMS, [False, True]):
        (told,) = without_the_root(form, with_names)
        names = "embedding.weight, head.weight" if with_names else "of shape (8, 4), of shape (8, 4)"
        assert f"parameter: {names}\n" in told, (form, with_names, told)
        assert "call fully_shard(model) on the whole model" in told


def hooked(model: Model) -> None:
    model.embedding.weight.register_hook(lambda gradient: gradient / 2)
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))


AVERAGED: dict[str, Callable[[Any], object]] = {  # models of which everything is averaged, or said to be
    "all in units": fully_shard,
    "ignored": lambda model: fully_shard(model, ignored_params={model.embedding.weight, model.head.weight}),
    "hooks of the user's": hooked,
    "frozen": lambda model: [part.requires_grad_(False) for part in (model.embedding, model.head)],
}


@on_ranks
def test_no_word_where_gradients_are_averaged() -> None:
    for how, average in AVERAGED.items():
        model = Model()
        shard_blocks(model, "fully_shard")
        average(model)
        assert told_at_steps(model, SGD(model.parameters())) == [], how
    model, beside = fully_shard(Model()), nn.Linear(4, 4)  # a model of its own
    beside(torch.ones(1, 4)).sum().backward()
    assert told_at_steps(model, SGD(model.parameters()), SGD(beside.parameters())) == []


def test_one_rank_drifts_from_nobody(fake_world):
    fake_world(1)
    model = Model()
    shard_blocks(model, "fully_shard")
    assert told_at_steps(model, SGD(model.parameters())) == []
