"""A small model and its data, and what plain PyTorch makes of them: the reference of every client's program."""

from __future__ import annotations

import torch
from torch import nn

STEPS, BATCH, WIDTH = 4, 4, 12


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
