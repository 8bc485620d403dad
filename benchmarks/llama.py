"""A Llama-like model of several sizes, with experts, adapters, checkpoints or a loss in chunks where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """A model and its batch. Widths in elements."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the MLP; of an expert a sixteenth
    vocabulary: int
    batch: int  # sequences per step
    time: int  # tokens per sequence
    experts: int = 64


SIZES = {
    "tiny": Size(2, 64, 4, 2, 128, 256, batch=2, time=16, experts=4),
    "narrow": Size(16, 256, 4, 2, 512, 1024, batch=1, time=128),  # little for the GPU to do: shows the host
    "1b": Size(16, 2048, 32, 8, 8192, 32000, batch=4, time=2048),  # 1.10e9 parameters
    "3b": Size(28, 3072, 24, 8, 8192, 32000, batch=2, time=2048),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32. [..., width] -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv:2104.09864, 3.2). x [B, H, T, D], angles [T, D / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU. [..., width] -> same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each expert has its share of the tokens, in their order. [B, T, width] -> same."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.flatten(0, 1).chunk(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]).view_as(x)


class Block(nn.Module):
    """Pre-norm grouped-query attention with RoPE, and SwiGLU. [B, T, width] -> same."""

    def __init__(self, size: Size, experts: int) -> None:
        super().__init__()
        head = size.width // size.heads
        self.head, self.kv_heads = head, size.kv_heads
        self.norm_attention = RMSNorm(size.width)
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.kv = nn.Linear(size.width, 2 * size.kv_heads * head, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = RMSNorm(size.width)
        self.mlp = Experts(size.width, size.hidden // 16, experts) if experts else MLP(size.width, size.hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        normed = self.norm_attention(x)
        q = rotate(self.q(normed).view(batch, time_, -1, self.head).transpose(1, 2), angles)
        kv = self.kv(normed).view(batch, time_, 2, self.kv_heads, self.head)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, kv_heads, T, head]
        mixed = F.scaled_dot_product_attention(q, rotate(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, -1))
        return x + self.mlp(self.norm_mlp(x))


class Adapted(nn.Module):
    """A frozen matrix and a trained product of rank 16 (LoRA, arXiv:2106.09685)."""

    def __init__(self, inner: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 16, bias=False, device=inner.weight.device, dtype=dtype)
        self.up = nn.Linear(16, inner.out_features, bias=False, device=inner.weight.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))

    @classmethod
    def put_into(cls, model: Llama, dtype: torch.dtype) -> None:
        """Adapt the attention of every block, in `dtype`, and train nothing else."""
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("q", "kv", "out"):
                setattr(block, name, cls(getattr(block, name), dtype))


class Llama(nn.Module):
    """Tokens [B, T + 1] -> the mean loss of predicting each from those before. Embedding, norm and head are the root's.

    Args:
        experts: in place of each MLP; 0: none.
        chunks: in which logits are made; those of more than one are made again in backward.
        checkpoints: whether blocks are run again in backward.
    """

    def __init__(self, size: Size, experts: int = 0, chunks: int = 1, checkpoints: bool = False) -> None:
        super().__init__()
        self.chunks, self.checkpoints = chunks, checkpoints
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, experts) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("angles", torch.outer(torch.arange(size.time), frequency), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, self.angles, use_reentrant=False) if self.checkpoints else block(x, self.angles)
        hidden, targets = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        if self.chunks == 1:
            return self._loss(hidden, targets) / len(targets)
        parts = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), strict=True)
        losses = [checkpoint(self._loss, part, wanted, use_reentrant=False) for part, wanted in parts]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")
