"""A network in the manner of image libraries, without one: batch norms, depthwise convolutions, residuals."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANNELS, CLASSES, SIZE = 6, 3, 8


class Residual(nn.Module):
    """Depthwise and pointwise convolutions, each with a batch norm, around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
        self.first, self.second = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.pointwise = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.depthwise(x)))
        return torch.relu(x + self.second(self.pointwise(y)))


class Network(nn.Module):
    """Images [batch, 3, SIZE, SIZE] -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def network() -> Network:
    """The same on every rank; double precision."""
    torch.manual_seed(2)
    return Network().double()


def images(step: int, rank: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    """A rank's images and their classes."""
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, 3, SIZE, SIZE, generator=source, dtype=torch.float64)
    return x, torch.randint(CLASSES, (samples,), generator=source)


def units(model: nn.Module) -> list[nn.Module]:
    """What is sharded apart, besides the whole."""
    return [model.stem, *model.blocks]  # type: ignore[union-attr,list-item,misc]
