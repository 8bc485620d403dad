"""What must be true of a folder of checkpoints, whatever happened to the saves of its two ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fullshard

WORLD = 2
NAME = "step-%09d"


def model_of(step: int) -> nn.Sequential:
    """Two linear maps; the rows of rank r are 10 step + r."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    fill(model, step)
    return model


def fill(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            for rank, rows in enumerate(parameter.chunk(WORLD)):
                rows.fill_(10.0 * step + rank)


def loads_whole(path: Path) -> int:
    """The step of a checkpoint; every value in it is that of this step."""
    model = model_of(0)
    found = fullshard.load(path, model, rng=False)
    for name, value in model_of(found.step).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), (path, name)
    assert found.of_ranks == {"seen": [[found.step, 0], [found.step, 1]]}, found
    return found.step


def check(folder: Path, acknowledged: int) -> list[int]:
    """The steps of the checkpoints that are there, all whole; `latest` names none before what was acknowledged."""
    root = fullshard.Folder(folder)
    names = root.names()
    steps = [loads_whole(folder / name) for name in names]
    assert steps == sorted(steps) == [root.step_of(name) for name in names]
    latest = root.latest()
    assert latest in names if acknowledged else latest is None or latest in names
    assert not acknowledged or steps[names.index(str(latest))] >= acknowledged, (latest, acknowledged)
    return steps


def check_rest(folder: Path, step: int) -> None:
    """After a save with keep_last=1: it is there, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "lock", NAME % step]
    assert fullshard.Folder(folder).latest() == NAME % step
