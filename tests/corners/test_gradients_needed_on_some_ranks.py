"""Units of which a backward comes on some ranks only, because on others nothing before them needs a gradient.

A rank's batch goes through a weight that trains or through one that is frozen. On a rank that takes the frozen one what
follows has no graph, and autograd never comes back to it; the others gather and reduce there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.events import record_events
from ways import EXACT, gradient_problems, on_ranks, shard


class Mixed(nn.Module):
    """Two weights, of which only one trains; a batch goes through either."""

    def __init__(self) -> None:
        super().__init__()
        self.trains, self.frozen = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5, 5), requires_grad=False)

    def forward(self, x: Tensor, trains: bool) -> Tensor:
        return x @ (self.trains if trains else self.frozen)


class Chain(nn.Module):
    """A mixed module, a frozen one and one without parameters upon it, and a layer that always trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.frozen, self.bare, self.last = Mixed(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, trains: bool) -> Tensor:
        return self.last(self.bare(self.frozen(self.mixed(x, trains))))


def loss_of(model: nn.Module, step: int, rank: int, trains: bool) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)
    return model(x, trains).square().mean()


def train(way: str, units: list[str], steps: list[tuple[bool, bool]], **settings: str) -> list[str]:
    """What differs from one process; `steps`: on which of the ranks a batch goes through the weight that trains."""
    torch.manual_seed(0)
    plain, model, problems = Chain(), Chain(), []
    model.load_state_dict(plain.state_dict())
    model = shard(model, way, lambda model: [model.get_submodule(name) for name in units], **settings)
    for step, takes in enumerate(steps):
        for rank, trains in enumerate(takes):
            (loss_of(plain, step, rank, trains) / 2).backward()
        loss_of(model, step, dist.get_rank(), takes[dist.get_rank()]).backward()
        problems += gradient_problems(f"step {step}", model, plain, EXACT)
        model.zero_grad()
        plain.zero_grad()
    return problems


ON_ONE, ON_NONE, ON_BOTH = (True, False), (False, False), (True, True)
CASES = {  # the units, on which ranks a gradient is needed step by step, and settings
    "that trains": (["mixed", "last"], [ON_BOTH, ON_ONE, ON_NONE, ON_ONE[::-1]], {}),
    "frozen": (["mixed", "frozen", "last"], [ON_ONE, ON_ONE[::-1], ON_NONE, ON_BOTH], {}),
    "without parameters": (["mixed", "bare", "last"], [ON_ONE, ON_ONE[::-1], ON_NONE, ON_BOTH], {}),
    "frozen, first on none": (["mixed", "frozen", "last"], [ON_NONE, ON_ONE, ON_ONE[::-1]], {"unused": "zeros"}),
}


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@pytest.mark.parametrize("unit", CASES)
@on_ranks
def test_a_unit_needs_a_gradient_on_one_rank(way: str, unit: str) -> list[str]:
    units, steps, settings = CASES[unit]
    return train(way, units, steps, **settings)


def gathers(steps: list[tuple[bool, bool]]) -> list[int]:
    """By step, how often the frozen unit was gathered."""
    torch.manual_seed(0)
    model = shard(Chain(), "rows", lambda model: [model.frozen])
    found = []
    for step, takes in enumerate(steps):
        with record_events() as events:
            loss_of(model, step, dist.get_rank(), takes[dist.get_rank()]).backward()
        found.append(sum(event.verb == "gather" and event.unit == "frozen" for event in events))
    return found


def test_a_frozen_unit_is_gathered_again_only_where_a_rank_needs_that(run_ranks):
    """It is known from the first pass; where all ranks come to need it later they find out together."""
    assert run_ranks(gathers, [ON_NONE, ON_NONE, ON_BOTH]) == [[1, 1, 2]] * 2
    assert run_ranks(gathers, [ON_ONE, ON_NONE, ON_ONE[::-1]]) == [[2, 2, 2]] * 2
