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
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import fully_shard
from fullshard.optim import outside
from ways import on_ranks

pytestmark = pytest.mark.gloo("DDP needs a backend in C++, and parameters are looked at once a process")

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
    with warnings.catch_warnings(record=True) as told, mock.patch.object(outside, "LOOKED", []):
        warnings.simplefilter("always")
        for step in range(2):
            model(torch.tensor([dist.get_rank(), step])).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in told if "parameters that no unit holds" in str(one.message)]


SGD = partial(torch.optim.SGD, lr=0.1)


def without_the_root(form: str, separately: bool) -> list[str]:
    model = Model()
    shard_blocks(model, form)
    apart = [model.embedding.weight, model.head.weight]
    if separately:
        return told_at_steps(model, SGD(model.blocks.parameters()), SGD(apart))
    return told_at_steps(model, SGD(model.parameters()))


@on_ranks
def test_a_root_that_was_forgotten_is_named_once() -> None:
    for form, separately in itertools.product(FORMS, [False, True]):
        (told,) = without_the_root(form, separately)
        assert "embedding.weight, head.weight" in told, (form, separately)
        assert "call fully_shard(model) on the whole model" in told


def hooked(model: Model) -> None:
    model.embedding.weight.register_hook(lambda gradient: gradient / 2)
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))


def under_ddp(model: Any) -> None:
    model.embedding, model.head = (DistributedDataParallel(part) for part in (model.embedding, model.head))


AVERAGED: dict[str, Callable[[Any], object]] = {  # models of which everything is averaged, or said to be
    "all in units": fully_shard,
    "ignored": lambda model: fully_shard(model, ignored_params={model.embedding.weight, model.head.weight}),
    "hooks of the user's": hooked,
    "frozen": lambda model: [part.requires_grad_(False) for part in (model.embedding, model.head)],
    "under DDP": under_ddp,
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


def unfinished(how: str) -> object:
    """Something that keeps a module alive whose `nn.Module.__init__` has not run."""
    if how == "made by __new__":
        return nn.Linear.__new__(nn.Linear)
    with pytest.raises(fullshard.ConfigError) as refused:
        fullshard.FullyShardedDataParallel(nn.Linear(4, 4), process_group=(1, 2))
    return refused  # its traceback holds the wrapper


@pytest.mark.parametrize("how", ["made by __new__", "refused by the wrapper"])
def test_modules_that_were_never_finished_are_passed_over(fake_world, how):
    fake_world(2)
    kept = unfinished(how)
    assert len(without_the_root("fully_shard", separately=False)) == 1, kept
