"""What users may touch: `ask` runs its checks, and the files in the table of `docs/architecture.md` are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.forms import OWNER_KEY
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


@pytest.mark.parametrize("layout", ["rows", "flat", "wrapper"])
@pytest.mark.parametrize("refused", ["shape", "dtype"])
def test_a_refused_replacement_changes_nothing(fake_world, layout, refused):
    fake_world(2)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wraps = layout == "wrapper"
    model = FullyShardedDataParallel(layers, use_orig_params=True) if wraps else fully_shard(layers, layout=layout)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    first, second = layers
    before, kept = first.weight, second.weight
    first.weight = fitting = nn.Parameter(torch.ones(4, 4) if wraps else before.detach() * 2)
    second.weight = nn.Parameter(torch.zeros(3) if refused == "shape" else kept.detach().bfloat16())
    with pytest.raises(fullshard.ConfigError):
        model(x)
    assert fitting.shape == (4, 4) and OWNER_KEY not in vars(fitting)
    second.weight = kept
    model(x).sum().backward()
    assert first.weight is fitting and fitting.grad is not None and before.grad is None
