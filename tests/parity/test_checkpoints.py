"""State dicts through torch.distributed.checkpoint: saved on 2 ranks, loaded on 4 and on 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fullshard
from models import EXAMPLES
from training import (
    FP64,
    LAYOUTS,
    OPTIMIZER,
    Options,
    assert_same,
    compare_tensors,
    full_parameters,
    reference,
    shard,
    take_step,
)

NAMES = ["odd_mlp", "tied_across"]
STEPS = 2  # before the checkpoint, and as many after it


def sharded(name: str, layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    example = EXAMPLES[name]
    options = Options(layout=layout, dtype=torch.float64)
    model = shard(fullshard, example.make(torch.float64), example, options)
    return model, torch.optim.AdamW(model.parameters(), **OPTIMIZER)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range, ranks: list[int]) -> None:
    for step in steps:
        take_step(model, EXAMPLES[name], step, ranks, Options(dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()


def save(name: str, layout: str, folder: Path) -> dict[str, torch.Tensor]:
    """Trains, saves model and optimizer, and returns what every parameter was."""
    model, optimizer = sharded(name, layout)
    train(model, optimizer, name, range(STEPS), [dist.get_rank()])
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return full_parameters(model)


def load(name: str, layout: str, folder: Path, want: dict[str, torch.Tensor]) -> list[str]:
    """Loads into a model with other numbers; every rank must then hold its part of the saved ones."""
    model, _ = sharded(name, layout)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return compare_tensors("loaded", full_parameters(model), want, 0.0)


@pytest.fixture(scope="module")
def saved(rank_pools, tmp_path_factory):
    """Each example's checkpoint in each layout, written on 2 ranks when first asked for."""
    checkpoints = {}

    def get(name: str, layout: str):
        if (name, layout) not in checkpoints:
            folder = tmp_path_factory.mktemp(f"{name}-{layout}")
            checkpoints[name, layout] = folder, rank_pools.run(save, name, layout, folder)[0]
        return checkpoints[name, layout]

    return get


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_saved_parameters_are_those_of_one_process(saved, name, saved_as):
    _, got = saved(name, saved_as)
    want = reference(name, Options(dtype=torch.float64, steps=STEPS), 2).parameters
    problems = compare_tensors("saved", got, want, FP64)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loaded_as", LAYOUTS)
@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_loads_on_four_ranks(run_ranks, saved, saved_as, loaded_as, name):
    folder, want = saved(name, saved_as)
    assert_same(run_ranks(load, name, loaded_as, folder, want, world=4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_loads_in_one_process_without_a_group(saved, saved_as, name):
    """Into the plain model, by PyTorch alone: the file holds ordinary tensors under ordinary names."""
    folder, want = saved(name, saved_as)
    model = EXAMPLES[name].make(torch.float64)
    state = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    problems = compare_tensors("loaded", full_parameters(model), want, 0.0)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_checkpoint_loads_sharded(run_ranks, tmp_path, layout):
    """The other way round: written by one process from a plain model."""
    model = EXAMPLES["odd_mlp"].make(torch.float64)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(run_ranks(load, "odd_mlp", layout, tmp_path, full_parameters(model), world=4))


@pytest.mark.parametrize("loaded_as", LAYOUTS)
@pytest.mark.parametrize("saved_as", LAYOUTS)
def test_training_goes_on_with_its_optimizer_state(run_ranks, saved, saved_as, loaded_as):
    """AdamW's moments and step counts too: the steps after it equal those of a run without interruption."""
    folder, _ = saved("odd_mlp", saved_as)
    assert_same(run_ranks(resume, "odd_mlp", loaded_as, folder))


def resume(name: str, layout: str, folder: Path) -> list[str]:
    model, optimizer = sharded(name, layout)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, name, range(STEPS, 2 * STEPS), [dist.get_rank()])
    world = dist.get_world_size()
    want = reference(name, Options(dtype=torch.float64, steps=2 * STEPS), world).parameters
    return compare_tensors("after resuming", full_parameters(model), want, FP64)
