"""State dicts through torch.distributed.checkpoint: saved on 2 ranks, loaded on 4, on 2 and on 1, in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fullshard
from fullshard import Blocks
from models import EXAMPLES
from training import (
    FP64,
    OPTIMIZER,
    Options,
    assert_same,
    compare_tensors,
    full_parameters,
    reference,
    shard,
    take_step,
)

STEPS = 2  # before the checkpoint, and as many after it


def sharded(name: str, layout: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    example = EXAMPLES[name]
    options = Options(layout=layout, dtype=torch.float64)
    model = shard(fullshard, example.make(torch.float64), example, options)
    return model, torch.optim.AdamW(model.parameters(), **OPTIMIZER)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range, ranks: list[int]) -> None:
    for step in steps:
        take_step(model, EXAMPLES[name], step, ranks, Options(dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()


def save(name: str, layout: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Trains, saves model and optimizer, and returns what every parameter was."""
    model, optimizer = sharded(name, layout)
    train(model, optimizer, name, range(STEPS), [dist.get_rank()])
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return full_parameters(model)


def load(name: str, layout: Any, folder: Path, want: dict[str, torch.Tensor]) -> list[str]:
    """Loads into a model with other numbers; every rank must then hold its part of the saved ones."""
    model, _ = sharded(name, layout)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return compare_tensors("loaded", full_parameters(model), want, 0.0)


def resume(name: str, layout: Any, folder: Path) -> list[str]:
    model, optimizer = sharded(name, layout)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, name, range(STEPS, 2 * STEPS), [dist.get_rank()])
    world = dist.get_world_size()
    want = reference(name, Options(dtype=torch.float64, steps=2 * STEPS), world).parameters
    return compare_tensors("after resuming", full_parameters(model), want, FP64)


@pytest.mark.parametrize(
    ("name", "saved_as", "loaded_as"),
    [
        ("tied_across", "rows", "flat"),
        ("odd_mlp", "flat", "owner"),
        ("odd_mlp", "owner", Blocks("row")),
        ("odd_mlp", Blocks(5), "rows"),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_layout_loads_in_another(run_ranks, tmp_path, name, saved_as, loaded_as):
    """On twice as many ranks; in one process without a group; and, with AdamW's state, in a run that goes on."""
    values = run_ranks(save, name, saved_as, tmp_path)[0]
    want = reference(name, Options(dtype=torch.float64, steps=STEPS), 2).parameters
    assert_same([compare_tensors("saved", values, want, FP64)])
    assert_same(run_ranks(load, name, loaded_as, tmp_path, values, world=4))
    assert_same(run_ranks(resume, name, loaded_as, tmp_path))
    model = EXAMPLES[name].make(torch.float64)
    state = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    model.load_state_dict(state["model"])
    assert_same([compare_tensors("loaded by PyTorch alone", full_parameters(model), values, 0.0)])


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_plain_checkpoint_loads_sharded(run_ranks, tmp_path, layout):
    """The other way round: written by one process from a plain model."""
    model = EXAMPLES["odd_mlp"].make(torch.float64)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(run_ranks(load, "odd_mlp", layout, tmp_path, full_parameters(model), world=4))
