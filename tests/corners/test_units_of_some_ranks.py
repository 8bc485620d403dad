"""`unused="zeros"`: units that only some ranks run in a pass, exactly as one process that runs all batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
import ways
from ways import EXACT, error_of, every_way, gradient_problems, named_error, shard, synced, value_problems


class Branches(nn.Module):
    """A trunk, branches of which a batch takes some, one with a unit inside, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 5), Nested(), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        x = self.trunk(x).tanh()
        for index in taken:
            x = x + self.branches[index](x).tanh()
        return self.head(x)


class Nested(nn.Module):
    """A unit around a unit, which it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(5, 5), nn.Linear(5, 5)
        self.through = True

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.outer(x)) if self.through else self.outer(x)


class Recomputed(Branches):
    """All branches are run forward once more in a backward, together: a rank gathers several before it reduces one."""

    reentrant = False

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        x = self.trunk(x).tanh()
        return self.head(checkpoint(self.middle, x, taken, use_reentrant=self.reentrant))

    def middle(self, x: Tensor, taken: list[int]) -> Tensor:
        for index in taken:
            x = x + self.branches[index](x).tanh()
        return x


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


def units(model: nn.Module) -> list[nn.Module]:
    return [model.branches[1].inner, *model.branches, model.trunk]


# By step: what each of two ranks takes. The third branch is first run in the third step, on one rank.
TAKEN = [([0, 1], [0, 1]), ([0], [1]), ([], [0, 2]), ([0, 1, 2, 3], []), ([3], [0, 1])]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def trained(way: str, accumulate: bool, first: int, kind: str = "Branches", **settings: object) -> list[str]:
    """What differs from one process over steps that begin with the `first`-th of `TAKEN`."""
    world, mine = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    reference = globals()[kind]()
    model = shard(copy.deepcopy(reference), way, units, unused="zeros", **settings)
    optimizers = [optimizer_of(reference), optimizer_of(model)]
    problems = []
    for step in range(len(TAKEN)):
        taken = TAKEN[(step + first) % len(TAKEN)]
        for micro in range(2 if accumulate else 1):
            for rank in range(world):
                (loss_of(reference, batch(step + 10 * micro, rank), taken[(rank + micro) % 2]) / world).backward()
            with synced(model, micro == (1 if accumulate else 0)):
                loss_of(model, batch(step + 10 * micro, mine), taken[(mine + micro) % 2]).backward()
        problems += gradient_problems(f"step {step}", model, reference)
        with torch.no_grad():
            for rank in range(world):
                together = reference(batch(step, rank), taken[rank % 2])
                if rank == mine:
                    wanted = together
            out = model(batch(step, mine), taken[mine % 2])  # evaluated unevenly, too
            if (out - wanted).norm() > EXACT:
                problems.append(f"step {step}: outputs differ")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return problems + value_problems("in the end", model, reference)


def loss_of(model: nn.Module, x: Tensor, taken: list[int]) -> Tensor:
    return model(x, taken).square().sum(1).mean()


@pytest.mark.parametrize("accumulate", [False, True], ids=["each", "accumulated"])
@every_way
def test_as_one_process(run_ranks, way, accumulate):
    """Also where the first pass of all is one in which the ranks run different units."""
    for first in (0, 1, 2):
        for problems in run_ranks(trained, way, accumulate, first):
            assert not problems, problems


@pytest.mark.parametrize("kind", ["Recomputed", "Reentered"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["each", "accumulated"])
@every_way
def test_recomputed_together(run_ranks, way, accumulate, kind):
    """Ranks say what comes next in backwards, too."""
    for first in (0, 1, 2):
        for problems in run_ranks(trained, way, accumulate, first, kind, check="every"):
            assert not problems, problems


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
def test_a_rank_that_is_done_with_its_backward_takes_part_in_those_of_others(run_ranks, way):
    for problems in run_ranks(trained, way, False, 3, "BranchesAlone", check="every"):
        assert not problems, problems


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_recomputed_together_on_hybrid_meshes(run_ranks, way):
    for problems in run_ranks(trained, way, True, 1, "Recomputed", check="every", hybrid=True, world=4):
        assert not problems, problems


@pytest.mark.parametrize("way", ["rows", "originals"])
def test_recomputed_together_needs_every_check(run_ranks, way):
    for problems in run_ranks(unchecked, way):
        assert not problems, problems


def unchecked(way: str) -> list[str]:
    torch.manual_seed(0)
    model = shard(Recomputed(), way, units, unused="zeros")
    error = error_of(lambda: loss_of(model, batch(0, 0), [[0, 1], [0]][dist.get_rank()]).backward())
    return named_error(error, "branches.1", "rank 1", 'check="every"', kinds=fullshard.DivergenceError)


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_on_hybrid_meshes(run_ranks, way):
    for problems in run_ranks(trained, way, True, 1, hybrid=True, world=4):
        assert not problems, problems


@pytest.mark.parametrize("way", ["rows", "originals"])
def test_without_it_the_unit_is_named(run_ranks, way):
    for problems in run_ranks(refused, way):
        assert not problems, problems


def refused(way: str) -> list[str]:
    torch.manual_seed(0)
    model = shard(Branches(), way, units)
    error = error_of(lambda: model(batch(0, 0), [0] if dist.get_rank() else [1]))
    return named_error(error, "branches.0", "rank 1", kinds=fullshard.DivergenceError)


class Repeats(Branches):
    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        x = self.trunk(x).tanh()
        for index in taken:
            x = x + self.branches[index](x).tanh()
        return self.head(x)


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
def test_units_in_any_order_and_often_with_every_check(run_ranks, way):
    for problems in run_ranks(in_any_order, way):
        assert not problems, problems


def in_any_order(way: str) -> list[str]:
    torch.manual_seed(0)
    reference = Repeats()
    model = shard(copy.deepcopy(reference), way, units, unused="zeros", check="every")
    orders = [([0, 2, 0], [2]), ([3, 0], [0, 0, 0]), ([], [2, 1, 2])]
    problems = []
    for step, order in enumerate(orders):
        for rank in range(2):
            (loss_of(reference, batch(step, rank), order[rank]) / 2).backward()
        loss_of(model, batch(step, dist.get_rank()), order[dist.get_rank()]).backward()
        problems += gradient_problems(f"step {step}", model, reference)
        reference.zero_grad()
        model.zero_grad()
    return problems


class Beside(Recomputed):
    """Branches beside one another: ranks come back to them in different orders, with a checkpoint around all or not."""

    recomputed = False
    reentrant = True

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        return super().forward(x, taken) if self.recomputed else self.head(self.middle(self.trunk(x).tanh(), taken))

    def middle(self, x: Tensor, taken: list[int]) -> Tensor:
        return x + sum(self.branches[index](x).tanh() for index in taken)


@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
def test_backwards_in_different_orders_reduce_each_unit_once(run_ranks, way, recomputed):
    for problems in run_ranks(beside, way, recomputed):
        assert not problems, problems


def beside(way: str, recomputed: bool) -> list[str]:
    torch.manual_seed(0)
    reference, mine = Beside(), dist.get_rank()
    model = shard(copy.deepcopy(reference), way, units, unused="zeros", check="every")
    ways.inner(model).recomputed = reference.recomputed = recomputed
    if way != "wrapper":
        model.set_reshard_after_backward(False)  # what stays has to stay on all ranks
    problems = []
    orders = [([1], [1, 0]), ([0], [0]), ([0, 1, 2, 3], [3, 1]), ([2], [0, 3])]  # of each rank's forwards, two a step
    for step in range(2):
        for one, who, world in ((reference, (0, 1), 2), (model, (mine,), 1)):
            for rank in who:
                first, second = (loss_of(one, batch(i, rank), orders[2 * step + i][rank]) for i in range(2))
                (second / world).backward()
                (first / world).backward()
        problems += gradient_problems(f"step {step}", model, reference)
        reference.zero_grad()
        model.zero_grad()
    return problems


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_another_order_than_at_first_is_refused_by_name(run_ranks, way):
    for problems in run_ranks(reordered, way):
        assert not problems, problems


def reordered(way: str) -> list[str]:
    torch.manual_seed(0)
    model = shard(Branches(), way, units, unused="zeros")
    model(batch(0, 0), [0, 2]).sum().backward()
    error = error_of(lambda: model(batch(0, 0), [2, 0]))
    return named_error(error, "branches.0", 'check="every"', kinds=fullshard.DivergenceError)
