"""Ranks that run their units in other orders than their neighbours, after passes in which the orders were equal.

Units of equal sizes would swap their parameters then, without a word from the collectives. A rank that leaves the order
compares before it gathers, so that nothing is swapped; the watcher tells all.
"""

from __future__ import annotations

import re
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import DivergenceError, fully_shard
from ways import assert_equal, example_of, on_ranks, sharded, whole_gradients

pytestmark = pytest.mark.gloo("a watcher ends what waits")

WIDTH = 8
UNITS = 4
ALIKE = tuple(range(UNITS))


class Chosen(nn.Module):
    """Equal units, run in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for index in order:
            x = torch.tanh(self.units[index](x))
        return x


EXAMPLE = example_of(Chosen, *[f"units.{index}" for index in range(UNITS)])


def loss_of(model: nn.Module, rank: int, order: tuple[int, ...] = ALIKE, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return model(x.to(dtype), order).square().mean()


def assert_step_is_right(model: nn.Module) -> None:
    rank, world, plain = dist.get_rank(), dist.get_world_size(), EXAMPLE.make(torch.float64)
    for other in range(world):
        (loss_of(plain, other) / world).backward()
    model.zero_grad()
    loss_of(model, rank).backward()
    assert_equal(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "after the error")


def make_groups_anew() -> None:
    """What the watcher ended has cut the ranks' connections: only new process groups have others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folders[0]}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))


LEFT = "left the order that all ranks share"


@pytest.mark.parametrize(
    ("way", "how"), [("rows", "evaluated"), ("flat", "not differentiated"), ("rows", "trained"), ("wrapper", "trained")]
)
@on_ranks
def test_an_order_of_one_rank_s_own(way: str, how: str) -> None:
    rank, model = dist.get_rank(), sharded(EXAMPLE, way)
    mine = ALIKE if rank == 0 else ALIKE[::-1]
    loss_of(model, rank).backward()
    with torch.no_grad():
        loss_of(model, rank)
    model.zero_grad()
    with pytest.raises(DivergenceError, match=rf"(?s)(?=.*rank 1)(?=.*rank {rank}).*{LEFT}"):
        with torch.set_grad_enabled(how != "evaluated"):
            loss = loss_of(model, rank, mine)
        (loss if how == "trained" else loss_of(model, rank)).backward()
    make_groups_anew()
    model = sharded(EXAMPLE, way)
    assert_step_is_right(model)
    with torch.no_grad():
        loss_of(model, rank)
    assert_step_is_right(model)


CASTS = {  # what is told
    "first": f"rank 0 {LEFT}",
    "second": f"rank 1 {LEFT}",
    "soon": "rank 1: has replaced parameters by parameters of a different dtype",
    "between forward and backward": f"rank 1 {LEFT}",
}


@pytest.mark.parametrize("how", CASTS)
@on_ranks
def test_another_dtype_on_one_rank(how: str) -> None:
    """Gathers of unequal sizes would end the process in native code."""
    rank, model, between = dist.get_rank(), sharded(EXAMPLE, "rows", dtype=torch.float32), how.startswith("between")
    for _ in range(1 if how == "soon" else 3):
        loss_of(model, rank, dtype=torch.float32).backward()
        model.zero_grad()
    loss = loss_of(model, rank, dtype=torch.float32) if between else None
    if rank == (how != "first"):
        (model.units[2] if between else model).double()  # twice the bytes of what the other rank gathers
    with pytest.raises(DivergenceError, match=CASTS[how]):
        (loss_of(model, rank, dtype=next(model.parameters()).dtype) if loss is None else loss).backward()
    make_groups_anew()
    assert_step_is_right(sharded(EXAMPLE, "rows"))


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_another_dtype_on_all_ranks_between_steps(way: str) -> None:
    model = sharded(EXAMPLE, way, dtype=torch.float32)
    for _ in range(3):
        loss_of(model, dist.get_rank(), dtype=torch.float32).backward()
        model.zero_grad()
    model.double()
    assert_step_is_right(model)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter = fully_shard(nn.Linear(WIDTH, WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("after a backward", "rank 1 left the order that all ranks share (at (root), step 4; ran the model's forward"),
        ("after a forward", "rank 1: uses a model, or a part of one that was sharded later, for the first time"),
    ],
)
@on_ranks
def test_a_unit_that_one_rank_alone_adds(when: str, words: str) -> None:
    """Its first use compares weights: with whatever the others do, and in native code, if nothing was said before."""
    rank, model = dist.get_rank(), fully_shard(EXAMPLE.make(torch.float64), auto_wrap_policy={nn.Linear})
    for _ in range(3):
        loss_of(model, rank).backward()
        model.zero_grad()
    loss = loss_of(model, rank)
    with pytest.raises(DivergenceError, match=re.escape(words)):
        if rank == 1:
            model.units[2] = Adapted(model.units[2])
        if when == "after a backward":
            loss.backward()
        loss_of(model, rank).backward()
    make_groups_anew()


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_a_unit_that_one_rank_runs_once_more_in_the_first_forward(way: str) -> None:
    rank, model = dist.get_rank(), sharded(EXAMPLE, way)
    with pytest.raises(DivergenceError) as error:
        loss_of(model, rank, ALIKE if rank == 0 else (*ALIKE, UNITS - 1)).backward()
    told = str(error.value)
    assert f"runs unit 'units.{UNITS - 1}'" in told and "has reached the end of unit '(root)'" in told
    assert_step_is_right(model)
