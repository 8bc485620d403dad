"""The table of what users may touch: `docs/architecture.md` shows it, and files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.shard import ask_at_backward, ask_at_rest, units_of

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = Path(fullshard.__file__).parent


def test_files_that_the_table_names_are_there():
    """What users may touch, in docs/architecture.md: each row ends with the file that looks at it."""
    rows = re.findall(r"^\|.*\| `([a-z_]+/[a-z_]+\.py)` \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) == 10
    assert not [file for file in rows if not (SOURCE / file).is_file()]


def test_each_moment_runs_its_own_checks(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    units = units_of(model)
    model.weight.requires_grad_(False)
    assert units[0].members[0].unsharded.requires_grad
    ask_at_backward(units)
    assert not units[0].members[0].unsharded.requires_grad
    fullshard.park(model)
    ask_at_backward(units)
    with pytest.raises(fullshard.PhaseError, match="parked"):
        ask_at_rest(units)
