"""A small model and its data, and what plain PyTorch makes of them: the reference of every client's program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH, WIDTH = 4, 4, 12
ACCUMULATE, MAX_NORM = 2, 0.3
ROWS = 2 * BATCH * STEPS * ACCUMULATE
"""Of two ranks, in all steps of as many micro-batches."""


class Block(nn.Module):
    """A residual block; what policies wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 18), nn.Linear(18, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    """The same on every rank."""
    torch.manual_seed(7)
    return Net()


def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` inputs [WIDTH] with their classes."""
    source = torch.Generator().manual_seed(3)
    return [(torch.randn(WIDTH, generator=source), torch.randint(5, (), generator=source)) for _ in range(count)]


def loader(batch: int = BATCH, sampled: bool = True, count: int = ROWS) -> DataLoader[Any]:
    """This rank's rows in order, or all of them, for a library to give each rank its own."""
    data: Any = rows(count)
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, shuffle=False) if sampled else None)


def reference(
    order: Iterable[int] = range(STEPS), taken: int = 2 * BATCH * ACCUMULATE, max_norm: float = MAX_NORM
) -> tuple[list[float], Net]:
    """Losses by step of one process on the batches of both ranks, and the trained model.

    Args:
        order: of the batches that steps take.
        taken: rows in each, of both ranks and all micro-batches together.
        max_norm: that gradients are clipped to.
    """
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = rows(max(ROWS, taken * STEPS))
    for step in order:
        x, y = (torch.stack(column) for column in zip(*data[step * taken : (step + 1) * taken], strict=True))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def joined(value: torch.Tensor) -> float:
    """A rank's loss, averaged over all."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def script(*arguments: str, code: int = 0, **environment: str) -> str:
    """What a Python process prints; it has to end with `code`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
