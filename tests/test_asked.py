"""What users may touch: `ask` runs its checks, and the files in the table of `docs/architecture.md` are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.shard import When, ask, units_of

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
SOURCE = Path(fullshard.__file__).parent


def test_files_that_the_page_names_are_there():
    table = ARCHITECTURE.read_text().split(
        "| users | compared | when | what follows | file |\n|---|---|---|---|---|\n"
    )[1]
    rows = table.split("\n\n")[0].splitlines()
    files = [row.split(" | ")[-1].strip(" `|") for row in rows]
    assert len(files) == 10 and all((SOURCE / file).is_file() for file in files), files


def test_each_moment_runs_its_own_checks(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    units = units_of(model)
    model.weight.requires_grad_(False)
    assert units[0].members[0].unsharded.requires_grad
    ask(When.BACKWARD, units)
    assert not units[0].members[0].unsharded.requires_grad
    fullshard.park(model)
    ask(When.BACKWARD, units)
    with pytest.raises(fullshard.PhaseError, match="parked"):
        ask(When.REST, units)
