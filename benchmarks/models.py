"""The models that are measured: stacks of equal blocks, each block one unit, sized by their arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyBlock(nn.Module):
    """LayerNorm and two square Linear: six parameters, next to no arithmetic. [tokens, width] -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and 4x MLP: 12 * width^2 weights. [batch, time, width] -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class OddBlock(nn.Module):
    """Three Linear whose dim 0 is 7, 13 and 1023: sizes that no world divides. [tokens, 1023] -> same."""

    SIZES = (1023, 7, 13, 1023)

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.SIZES[:-1], self.SIZES[1:], strict=True)
        self.layers = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Stack(nn.Module):
    """Blocks in a row; with norm_width > 0 a final LayerNorm, which is the root unit's."""

    def __init__(self, blocks: list[nn.Module], norm_width: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(norm_width) if norm_width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def tiny_stack(blocks: int, width: int = 16) -> Stack:
    """`blocks` of LayerNorm + two Linear; the root holds no parameters."""
    return Stack([TinyBlock(width) for _ in range(blocks)])


def transformer_stack(blocks: int, width: int) -> Stack:
    """`blocks` transformer blocks; the root holds a LayerNorm."""
    return Stack([TransformerBlock(width) for _ in range(blocks)], norm_width=width)


def odd_stack(blocks: int) -> Stack:
    """`blocks` with dim 0 of 7, 13 and 1023."""
    return Stack([OddBlock() for _ in range(blocks)])
