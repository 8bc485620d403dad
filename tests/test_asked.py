"""The table of what users may touch: `docs/architecture.md` shows it, and files that it names are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.shard import CHECKS, When, ask, units_of

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = Path(fullshard.__file__).parent


def table() -> str:
    rows = [f"| {c.name} | {c.compares} | {c.when.value} | {c.does} | `{c.where}` |" for c in CHECKS]
    return "\n".join(["| users | compared | when | what follows | file |", "|---|---|---|---|---|", *rows])


def test_the_page_shows_the_table():
    assert f"\n{table()}\n" in (DOCS / "architecture.md").read_text(), f"docs/architecture.md is to have:\n{table()}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_files_that_check_are_there(check):
    assert (SOURCE / check.where).is_file()


def test_each_moment_runs_its_own_checks(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    units = units_of(model)
    model.weight.requires_grad_(False)
    ask(When.GATHER, units)
    assert units[0].members[0].unsharded.requires_grad
    ask(When.BACKWARD, units)
    assert not units[0].members[0].unsharded.requires_grad
    fullshard.park(model)
    ask(When.BACKWARD, units)
    with pytest.raises(fullshard.PhaseError, match="parked"):
        ask(When.REST, units)
