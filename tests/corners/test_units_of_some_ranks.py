"""`unused="zeros"`: units that only some ranks run in a pass, exactly as one process that runs all batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.events import record_events
from ways import (
    EXACT,
    batch,
    error_of,
    gradient_problems,
    inner,
    named_error,
    on_ranks,
    shard,
    synced,
    value_problems,
)

rows_and_wrapper = pytest.mark.parametrize("way", ["rows", "wrapper"])


class Nested(nn.Module):
    """A unit around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.outer(x))


class Branches(nn.Module):
    """A trunk, branches of which a batch takes some, one with a unit inside, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 5), Nested(), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return self.head(self.middle(self.trunk(x).tanh(), taken))

    def middle(self, x: Tensor, taken: list[int]) -> Tensor:
        for index in taken:
            x = x + self.branches[index](x).tanh()
        return x


class Recomputed(Branches):
    """All branches are run forward once more in a backward, together: a rank gathers several before it reduces one."""

    reentrant = False

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return self.head(checkpoint(self.middle, self.trunk(x).tanh(), taken, use_reentrant=self.reentrant))


class Reentered(Recomputed):
    reentrant = True


class BranchesAlone(Recomputed):
    """Nothing trains that all ranks use: one comes to the end of a backward before another one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return super().forward(x.detach().requires_grad_(), taken)


class Beside(Reentered):
    """Branches beside one another: ranks come back to them in different orders, with a checkpoint around all or not."""

    recomputed = False

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return super().forward(x, taken) if self.recomputed else Branches.forward(self, x, taken)

    def middle(self, x: Tensor, taken: list[int]) -> Tensor:
        return x + sum(self.branches[index](x).tanh() for index in taken)


def units(model: Any) -> list[nn.Module]:
    return [model.branches[1].inner, *model.branches, model.trunk]


def pair(way: str, kind: type[Branches] = Branches, **settings: Any) -> tuple[Any, Branches]:
    torch.manual_seed(0)
    reference = kind()
    return shard(copy.deepcopy(reference), way, units, **{"unused": "zeros", **settings}), reference


def loss_of(model: nn.Module, x: Tensor, taken: list[int]) -> Tensor:
    return model(x, taken).square().sum(1).mean()


# By step: what each of two ranks takes. The third branch is first run in the third step, on one rank.
TAKEN = [([0, 1], [0, 1]), ([0], [1]), ([], [0, 2]), ([0, 1, 2, 3], []), ([3], [0, 1])]


def trained(way: str, first: int, micros: int, kind: type[Branches] = Branches, **settings: Any) -> list[str]:
    """What differs from one process over steps that begin with the `first`-th of `TAKEN`."""
    world, mine, problems = dist.get_world_size(), dist.get_rank(), []
    model, reference = pair(way, kind, **settings)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1) for m in (reference, model)]
    for step in range(len(TAKEN)):
        taken = TAKEN[(step + first) % len(TAKEN)]
        for micro in range(micros):
            for rank in range(world):
                (loss_of(reference, batch(step + 10 * micro, rank), taken[(rank + micro) % 2]) / world).backward()
            with synced(model, micro == micros - 1):
                loss_of(model, batch(step + 10 * micro, mine), taken[(mine + micro) % 2]).backward()
        problems += gradient_problems(f"step {step}", model, reference)
        with torch.no_grad():  # evaluated unevenly, too
            difference = model(batch(step, mine), taken[mine % 2]) - reference(batch(step, mine), taken[mine % 2])
        problems += [f"step {step}: outputs differ"] if difference.norm() > EXACT else []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return problems + value_problems("in the end", model, reference)


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_as_one_process(way: str) -> list[str]:
    """Also where the first pass of all is one in which the ranks run different units."""
    return [problem for first, micros in ((0, 1), (1, 2), (2, 1)) for problem in trained(way, first, micros)]


@rows_and_wrapper
@on_ranks(world=4)
def test_on_hybrid_meshes(way: str) -> list[str]:
    return trained(way, 1, 2, hybrid=True)


@rows_and_wrapper
@pytest.mark.parametrize("kind", [Recomputed, Reentered, BranchesAlone])
@on_ranks
def test_recomputed_together(way: str, kind: type[Branches]) -> list[str]:
    """Ranks say what comes next in backwards, too; one that is done with its own takes part in those of others."""
    return trained(way, 1, 1, kind, check="every")


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Branches, {"unused": "error"}, ("branches.0", "rank 1")),
        (Recomputed, {}, ("branches.1", "rank 1", 'check="every"')),
    ],
)
@on_ranks
def test_what_is_needed_is_named(kind: type[Branches], settings: dict, words: tuple[str, ...]) -> list[str]:
    """Without `unused="zeros"` the unit; where branches are recomputed together `check="every"`."""
    model, _ = pair("rows", kind, **settings)
    taken = [[0, 1], [0]] if kind is Recomputed else [[1], [0]]
    error = error_of(lambda: loss_of(model, batch(0, 0), taken[dist.get_rank()]).backward())
    return named_error(error, *words, kinds=fullshard.DivergenceError)


@rows_and_wrapper
@on_ranks
def test_units_in_another_order_need_every_check(way: str) -> list[str]:
    """Refused by name without it; with it they are run in any order, and as often as they like."""
    model, _ = pair(way)
    model(batch(0, 0), [0, 2]).sum().backward()
    error = error_of(lambda: model(batch(0, 0), [2, 0]))
    problems = named_error(error, "branches.0", 'check="every"', kinds=fullshard.DivergenceError)
    checked, reference = pair(way, check="every")
    for step, order in enumerate([([0, 2, 0], [2]), ([3, 0], [0, 0, 0]), ([], [2, 1, 2])]):
        for rank in range(2):
            (loss_of(reference, batch(step, rank), order[rank]) / 2).backward()
        loss_of(checked, batch(step, dist.get_rank()), order[dist.get_rank()]).backward()
        problems += gradient_problems(f"step {step}", checked, reference)
        reference.zero_grad(), checked.zero_grad()
    return problems


@rows_and_wrapper
@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
@on_ranks
def test_backwards_in_different_orders_reduce_each_unit_once(way: str, recomputed: bool) -> list[str]:
    model, reference = pair(way, Beside, check="every")
    inner(model).recomputed = reference.recomputed = recomputed
    if way != "wrapper":
        model.set_reshard_after_backward(False)  # what stays has to stay on all ranks
    problems = []
    orders = [([1], [1, 0]), ([0], [0]), ([0, 1, 2, 3], [3, 1]), ([2], [0, 3])]  # of each rank's forwards, two a step
    for step in range(2):
        for one, ranks in ((reference, (0, 1)), (model, (dist.get_rank(),))):
            for rank in ranks:
                first, second = (loss_of(one, batch(i, rank), orders[2 * step + i][rank]) for i in range(2))
                (second / len(ranks)).backward()
                (first / len(ranks)).backward()
        problems += gradient_problems(f"step {step}", model, reference)
        reference.zero_grad()
        model.zero_grad()
    return problems


# Units of which a backward comes on some ranks only: the others had nothing to train before them.


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


def loss_of_chain(model: nn.Module, step: int, rank: int, trains: bool) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)
    return model(x, trains).square().mean()


def train_chain(way: str, units: list[str], steps: list[tuple[bool, bool]], **settings: str) -> list[str]:
    """What differs from one process; `steps`: on which of the ranks a batch goes through the weight that trains."""
    torch.manual_seed(0)
    plain, model, problems = Chain(), Chain(), []
    model.load_state_dict(plain.state_dict())
    model = shard(model, way, lambda model: [model.get_submodule(name) for name in units], **settings)
    for step, takes in enumerate(steps):
        for rank, trains in enumerate(takes):
            (loss_of_chain(plain, step, rank, trains) / 2).backward()
        loss_of_chain(model, step, dist.get_rank(), takes[dist.get_rank()]).backward()
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
    return train_chain(way, units, steps, **settings)


def gathers(steps: list[tuple[bool, bool]]) -> list[int]:
    """By step, how often the frozen unit was gathered."""
    torch.manual_seed(0)
    model = shard(Chain(), "rows", lambda model: [model.frozen])
    found = []
    for step, takes in enumerate(steps):
        with record_events() as events:
            loss_of_chain(model, step, dist.get_rank(), takes[dist.get_rank()]).backward()
        found.append(sum(event.verb == "gather" and event.unit == "frozen" for event in events))
    return found


def test_a_frozen_unit_is_gathered_again_only_where_a_rank_needs_that(run_ranks):
    """It is known from the first pass; where all ranks come to need it later they find out together."""
    assert run_ranks(gathers, [ON_NONE, ON_NONE, ON_BOTH]) == [[1, 1, 2]] * 2
    assert run_ranks(gathers, [ON_ONE, ON_NONE, ON_ONE[::-1]]) == [[2, 2, 2]] * 2
