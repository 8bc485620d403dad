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
from models import blocks_of
from ways import shard

STEPS, SAVED = 8, 4
ROWS, BATCH = 24, 12  # of the data set, and of a batch of all ranks together


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        return x


class Shuffled:
    """A loader of shuffled rows: every rank has an order and a position of its own, and adds noise of `random`."""

    def __init__(self) -> None:
        self.rank, self.epoch, self.at = dist.get_rank(), 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.epoch, self.at = state["epoch"], state["at"]

    def next(self) -> Tensor:
        """This rank's part of a batch."""
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(100 * self.epoch + self.rank))
        rows = order[self.at : self.at + BATCH].chunk(dist.get_world_size())[self.rank]
        self.at += BATCH
        if self.at >= ROWS:
            self.epoch, self.at = self.epoch + 1, 0
        return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))[rows] + random.random()


class Run:
    """Everything that a run consists of."""

    def __init__(self, way: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = shard(Net(), way, blocks_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        scaler = ShardedGradScaler(device="cpu", init_scale=64.0, growth_interval=3)
        self.state = {"scheduler": scheduler, "scaler": scaler, "loader": Shuffled()}
        torch.manual_seed(10 + seed + dist.get_rank())  # another dropout on each rank
        random.seed(seed + dist.get_rank())

    def step(self) -> float:
        scheduler, scaler, loader = self.state.values()
        batch = loader.next()
        loss = F.mse_loss(self.model(batch), batch.roll(1, dims=1))
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach() * len(batch)
        dist.all_reduce(total)
        return float(total / BATCH)


def uninterrupted(way: str, folder: Path, asynchronous: bool) -> list[float]:
    run, losses = Run(way, seed=0), []
    with threads():
        for step in range(1, STEPS + 1):
            losses.append(run.step())
            if step == SAVED:
                given = {"state": run.state, "asynchronous": asynchronous}
                saving = fullshard.save(folder, run.model, run.optimizer, step=step, **given)
        saving.wait()
    return losses


def resumed(way: str, folder: Path) -> tuple[int, list[float], float, float]:
    run = Run(way, seed=5)
    found = fullshard.load(folder, run.model, run.optimizer, state=run.state)
    losses = [run.step() for _ in range(found.step, STEPS)]
    return found.step, losses, run.state["scaler"].get_scale(), run.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("way", "asynchronous"),
    [("rows", False), pytest.param("wrapper", True, marks=pytest.mark.gloo("a rank waits for its writer"))],
)
def test_on_the_same_ranks_bit_for_bit(run_ranks: Any, tmp_path: Path, way: str, asynchronous: bool) -> None:
    want = run_ranks(uninterrupted, way, tmp_path, asynchronous)
    for losses, (step, again, scale, lr) in zip(want, run_ranks(resumed, way, tmp_path), strict=True):
        assert step == SAVED and again == losses[SAVED:]
        assert scale == 64.0 * 2 ** (STEPS // 3) and lr == pytest.approx(0.0, abs=1e-9)
    assert len(set(want[0])) == STEPS
