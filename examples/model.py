"""A byte-level GPT, which examples/pretrain.py trains. Plain PyTorch: nothing here knows of sharding.

Letters in shape comments: B sequences, T bytes each, C width, H heads, D = C / H, V = 256 byte values.
With the defaults of pretrain.py on two ranks: B = 4 on each, T = 128, C = 128, H = 4, D = 32.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class GPTConfig:
    """The sizes that fix the shapes of all parameters, and the longest context."""

    layers: int
    width: int
    heads: int
    context: int  # bytes


def rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary position angles, each [T, D / 2] (Su et al. 2021, "RoFormer", section 3.4.2).

    Computed in every forward: a buffer would have to be filled again after a start on the meta device.
    """
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)  # [D / 2]
    angle = torch.outer(torch.arange(length, device=device), frequency)  # [T, D / 2]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of components of x [B, H, T, D] by the angle of its position."""
    left, right = x.chunk(2, dim=-1)  # each [B, H, T, D / 2]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class Block(nn.Module):
    """One transformer block, and one unit of sharding: it is gathered, used and freed as a whole."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)  # weight [3C, C]
        self.attention_out = nn.Linear(width, width, bias=False)  # weight [C, C]
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)  # weight [4C, C]
        self.mlp_out = nn.Linear(4 * width, width, bias=False)  # weight [C, 4C]

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.norm_attention(x), cosine, sine)
        hidden = F.relu(self.mlp_in(self.norm_mlp(x))).square()  # [B, T, 4C]
        return x + self.mlp_out(hidden)

    def attention(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Causal self-attention, [B, T, C] -> [B, T, C]."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [B, H, T, D]
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Embedding, blocks, norm, head. The root unit holds what is not in a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)  # weight [V, C]
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm_head = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)  # weight [V, C]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss in nats per byte, a scalar, if `targets` [B, T] are given; else logits [B, T, V]."""
        config = self.config
        cosine, sine = rotary_angles(tokens.shape[1], config.width // config.heads, tokens.device)
        x = self.embedding(tokens)  # [B, T, C]
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm_head(x)).float()  # [B, T, V]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def demo_model() -> GPT:
    """The model of `make demo`: fullshard plan examples/model.py:demo_model --sequence 128"""
    return GPT(GPTConfig(layers=6, width=128, heads=4, context=128))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The whole starting value of one parameter, fp32 on the CPU: a function of its name and the seed alone.

    Norms start at one; what writes into the residual stream, and the head, at zero; the rest is normal
    with standard deviation fan_in ** -0.5.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith(("attention_out.weight", "mlp_out.weight", "head.weight")):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
