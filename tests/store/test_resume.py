"""A run that is resumed is the run that was not interrupted: with dropout, shuffled data, scheduler, loss scale."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import threads
from torch import Tensor, nn
from torch.nn import functional as F

import fullshard
from fullshard.optim import ShardedGradScaler
from ways import shard

STEPS, SAVED = 8, 4
ROWS = 24  # of the data set; a batch of all ranks together has 12
BATCH = 12


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        return x


class Shuffled:
    """A loader of shuffled rows: every rank has an order and a position of its own, and adds noise of `random`.

    Of another number of ranks it goes on from the epoch and position, in one order for all.
    """

    def __init__(self, one_order: bool) -> None:
        self.rank, self.world, self.one_order = dist.get_rank(), dist.get_world_size(), one_order
        self.epoch, self.at = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "rank": None if self.one_order else self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] in (None, self.rank)
        self.epoch, self.at = state["epoch"], state["at"]

    def next(self) -> Tensor:
        """This rank's part of a batch."""
        seed = 100 * self.epoch + (0 if self.one_order else self.rank)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        rows = order[self.at : self.at + BATCH].chunk(self.world)[self.rank]
        self.at += BATCH
        if self.at >= ROWS:
            self.epoch, self.at = self.epoch + 1, 0
        data = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))
        return data[rows] + (0.0 if self.one_order else random.random())


class Run:
    """Everything that a run consists of."""

    def __init__(self, way: str, exact: bool, seed: int) -> None:
        torch.manual_seed(seed)
        model = Net(0.3 if exact else 0.0)
        self.model = shard(model, way, lambda m: list(m.blocks))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        self.scaler = ShardedGradScaler(device="cpu", init_scale=64.0, growth_interval=3)
        self.loader = Shuffled(one_order=not exact)
        torch.manual_seed(10 + seed + dist.get_rank())  # another dropout on each rank
        random.seed(seed + dist.get_rank())

    @property
    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler, "loader": self.loader}

    def step(self) -> float:
        batch = self.loader.next()
        loss = F.mse_loss(self.model(batch), batch.roll(1, dims=1))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach() * len(batch)
        dist.all_reduce(total)
        return float(total / BATCH)


def uninterrupted(way: str, folder: Path, exact: bool, asynchronous: bool) -> list[float]:
    run = Run(way, exact, seed=0)
    losses = []
    with threads():
        for step in range(1, STEPS + 1):
            losses.append(run.step())
            if step == SAVED:
                saving = fullshard.save(
                    folder, run.model, run.optimizer, step=step, state=run.state, asynchronous=asynchronous
                )
        saving.wait()
    return losses


def resumed(way: str, folder: Path, exact: bool) -> tuple[int, list[float], float, float]:
    run = Run(way, exact, seed=5)
    found = fullshard.load(folder, run.model, run.optimizer, state=run.state, rng=exact)
    losses = [run.step() for _ in range(found.step, STEPS)]
    return found.step, losses, run.scaler.get_scale(), run.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("way", "asynchronous"),
    [("rows", False), pytest.param("wrapper", True, marks=pytest.mark.gloo("a rank waits for its writer"))],
)
def test_on_the_same_ranks_bit_for_bit(run_ranks: Any, tmp_path: Path, way: str, asynchronous: bool) -> None:
    want = run_ranks(uninterrupted, way, tmp_path, True, asynchronous)
    for losses, (step, again, scale, lr) in zip(want, run_ranks(resumed, way, tmp_path, True), strict=True):
        assert step == SAVED and again == losses[SAVED:]
        assert scale == 64.0 * 2 ** (STEPS // 3) and lr == pytest.approx(0.0, abs=1e-9)
    assert len(set(want[0])) == STEPS


@pytest.mark.parametrize(("way", "other", "world"), [("flat", "rows", 3), ("rows", "wrapper", 4), ("rows", "rows", 1)])
def test_on_other_ranks_to_rounding(run_ranks: Any, tmp_path: Path, way: str, other: str, world: int) -> None:
    want, _ = run_ranks(uninterrupted, way, tmp_path, False, False)
    for _, losses, _, _ in run_ranks(resumed, other, tmp_path, False, world=world):
        assert losses == pytest.approx(want[SAVED:], rel=1e-5)
