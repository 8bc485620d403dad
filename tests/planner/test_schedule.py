"""The planner's schedule, event by event, beside the engine's own events in a fake world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import models
from fullshard import MixedPrecisionPolicy, Strategy, fully_shard, memory_use, record_events
from fullshard.insight.planner.costs import axes_of, unit_costs
from fullshard.insight.planner.profile import profile
from fullshard.insight.planner.schedule import Timeline

VERBS = ("gather", "gathered", "free", "reduce", "reduced")
WORLD = 8
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Nested(nn.Module):
    """A block with a unit inside it, called in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Nested() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """Each block runs twice: the backward reaches it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Unused(Outer):
    """The second block does not run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](self.first(x)))


def frozen() -> nn.Module:
    model = models.GPT(4)
    for block in model.blocks:
        block.mlp.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    return model


def tokens(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def rows(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    return model(torch.ones(batch, 24)).float().square().mean()


def frozen_first() -> nn.Module:
    """No gradient reaches the first two blocks: they have no backward."""
    model = models.GPT(4).requires_grad_(False)
    for module in (*model.blocks[2:], model.head):
        module.requires_grad_(True)
    return model


@dataclass
class Case:
    build: Callable[[], nn.Module]
    units: list[str]
    step: Callable[[nn.Module, int, int], torch.Tensor] = tokens
    how: dict[str, Any] = field(default_factory=dict)
    replicate: int = 1
    micro_batches: int = 1
    accumulate: str = "reduced"
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)  # by unit


BLOCKS = [f"blocks.{i}" for i in range(4)]
CASES = {
    "rows": Case(lambda: models.GPT(4), BLOCKS),
    "flat": Case(lambda: models.GPT(4), BLOCKS, how={"layout": "flat"}),
    "owner": Case(lambda: models.GPT(4), BLOCKS, how={"layout": "owner"}),
    "no prefetch": Case(lambda: models.GPT(4), BLOCKS, how={"prefetch": 0}),
    "prefetch of two": Case(lambda: models.GPT(4), BLOCKS, how={"prefetch": 2}),
    "prefetch of three": Case(lambda: models.GPT(4), BLOCKS, how={"prefetch": 3, "layout": "flat"}),
    "kept": Case(lambda: models.GPT(4), BLOCKS, how={"reshard_after_forward": False}),
    "mixed precision": Case(lambda: models.GPT(4), BLOCKS, how={"mp_policy": MIXED}),
    "mixed precision, flat": Case(lambda: models.GPT(4), BLOCKS, how={"mp_policy": MIXED, "layout": "flat"}),
    "replicas": Case(lambda: models.GPT(4), BLOCKS, replicate=2),
    "replicas, flat, mixed": Case(
        lambda: models.GPT(4), BLOCKS, how={"mp_policy": MIXED, "layout": "flat"}, replicate=4
    ),
    "replicas, two micro-batches": Case(lambda: models.GPT(4), BLOCKS, replicate=4, micro_batches=2),
    "two micro-batches": Case(lambda: models.GPT(4), BLOCKS, micro_batches=2),
    "slices kept among 2": Case(lambda: models.GPT(4), BLOCKS, how={"reshard_after_forward": 2}),
    "slices kept among 4, mixed": Case(
        lambda: models.GPT(4), BLOCKS, how={"reshard_after_forward": 4, "mp_policy": MIXED}, micro_batches=2
    ),
    "slices kept, flat": Case(lambda: models.GPT(4), BLOCKS, how={"reshard_after_forward": 4, "layout": "flat"}),
    "slices kept, replicas": Case(lambda: models.GPT(4), BLOCKS, how={"reshard_after_forward": 2}, replicate=2),
    "accumulated whole": Case(lambda: models.GPT(4), BLOCKS, micro_batches=3, accumulate="whole"),
    "accumulated whole, mixed": Case(
        lambda: models.GPT(4), BLOCKS, how={"mp_policy": MIXED, "layout": "flat"}, micro_batches=2, accumulate="whole"
    ),
    "accumulated whole, replicas": Case(
        lambda: models.GPT(4), BLOCKS, replicate=2, micro_batches=2, accumulate="whole"
    ),
    "accumulated in part": Case(lambda: models.GPT(4), BLOCKS, replicate=2, micro_batches=3, accumulate="partial"),
    "settings of a block": Case(
        lambda: models.GPT(4),
        BLOCKS,
        overrides={
            "blocks.0": {"reshard_after_forward": False},
            "blocks.1": {"layout": "flat", "mp_policy": replace(MIXED, output_dtype=torch.float32)},
            "blocks.2": {"prefetch": 2},
            "blocks.3": {"prefetch": 0},
        },
    ),
    "tied": Case(lambda: models.GPT(4, tied=True), BLOCKS),
    "frozen in part": Case(frozen, BLOCKS),
    "frozen first, kept": Case(frozen_first, BLOCKS, how={"reshard_after_forward": False}, micro_batches=3),
    "frozen first, slices kept": Case(frozen_first, BLOCKS, how={"reshard_after_forward": 2}, micro_batches=2),
    "frozen first, accumulated whole": Case(
        frozen_first,
        BLOCKS,
        how={"reshard_after_forward": False, "layout": "flat"},
        micro_batches=2,
        accumulate="whole",
    ),
    "one unit": Case(lambda: models.GPT(4), []),
    "called twice": Case(Twice, ["blocks.0", "blocks.1"], rows),
    "unused": Case(Unused, ["blocks.0", "blocks.1", "blocks.2"], rows),
    "nested": Case(Outer, ["blocks.0.inner", "blocks.0", "blocks.1.inner", "blocks.1", "blocks.2"], rows),
}


@pytest.mark.parametrize("name", CASES)
def test_the_planned_step_is_the_engines(fake_world, name):
    """Same verbs of the same units in the same order, with the same bytes gathered and in reduction after each."""
    case = CASES[name]
    fake_world(WORLD)
    how = dict(case.how)
    strategy = Strategy(accumulate=case.accumulate, **how)
    with torch.device("meta"):
        outline = case.build()
    shard = WORLD // case.replicate
    blocks = [(path, case.overrides.get(path, {})) for path in case.units]
    units = strategy.by_unit(blocks, MixedPrecisionPolicy(), shard)
    step = profile(outline, {path: unit.policy for path, unit in units.items()}, case.step, 2, 12)
    costs = unit_costs(outline, units, axes_of(shard, case.replicate, "fake"))
    planned = Timeline(step, costs, strategy, case.micro_batches)

    model = case.build()
    if case.replicate > 1:
        how["mesh"] = init_device_mesh("cpu", (case.replicate, WORLD // case.replicate), mesh_dim_names=("dp", "fsdp"))
    for path in case.units:
        fully_shard(model.get_submodule(path), **{**how, **case.overrides.get(path, {})})
    fully_shard(model, **{key: value for key, value in how.items() if key != "reshard_after_forward"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # orders are known from the second step on
        optimizer.zero_grad()
        with record_events() as events:
            for index in range(case.micro_batches):
                last = index == case.micro_batches - 1
                model.set_requires_gradient_sync(last or case.accumulate != "whole")
                model.set_requires_all_reduce(last or case.accumulate != "partial")
                case.step(model, 2, 12).backward()
        optimizer.step()
    seen = [(e.verb, e.unit.replace("(root)", ""), e.live) for e in events if e.verb in VERBS]
    assert planned.events == seen
    use = memory_use(model)
    assert sum(unit.parameters for unit in costs) == use.parameters
    assert planned.most["gradients"] == use.gradients
    assert planned.most["gathered"] <= use.peak_transient <= planned.most["gathered"] + planned.most["reducing"]
