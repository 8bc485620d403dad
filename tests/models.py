"""Small deterministic models, each as an Example: how to build it, what its units are, its batch and loss.

No parameter here has a gradient that is zero but for rounding (no key bias, no bias before a norm), so
gradients can be compared tensor by tensor, relative to their own norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 67
WIDTH = 24
LENGTH = 12
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

Batch = tuple[Tensor, ...]
Units = list[nn.Module | list[nn.Module]]


class Attention(nn.Module):
    """Causal self-attention without biases on queries, keys and values. [n, length, width] to the same."""

    def __init__(self, width: int = WIDTH, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, width)
        )


class Block(nn.Module):
    """A pre-norm transformer block, `[n, length, width]` to the same."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens `[n, length]` to logits `[n, length, vocabulary]`."""

    def __init__(self, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def run_block(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index](x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for index in range(len(self.blocks)):
            x = self.run_block(index, x)
        return self.head(self.norm(x))


class SkippingGPT(GPT):
    """Never calls its second block: those parameters keep no gradient."""

    def run_block(self, index: int, x: Tensor) -> Tensor:
        return x if index == 1 else super().run_block(index, x)


class RepeatingGPT(GPT):
    """Calls each block twice in one forward."""

    def run_block(self, index: int, x: Tensor) -> Tensor:
        return super().run_block(index, super().run_block(index, x))


class CheckpointingGPT(GPT):
    """Recomputes each block in backward; the checkpoint is outside of the unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def run_block(self, index: int, x: Tensor) -> Tensor:
        return checkpoint(super().run_block, index, x, use_reentrant=self.reentrant)


class CheckpointingBlock(Block):
    """Recomputes its own forward in backward; the checkpoint is inside of the unit."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class OddMLP(nn.Module):
    """Layers with dim-0 sizes of 13, 1023, 3, 7 and 1: none divides, some are smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [7, 13, 1023, 3, 7, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.scale = nn.Parameter(torch.full((1, 5), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale.sum()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Parcel:
    left: Tensor
    right: Tensor
    note: str = "not a tensor"


class Branches(nn.Module):
    """Two tensors in, two tensors out, in a container of the given kind."""

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, pair: object, *, gain: float = 1.0) -> object:
        if isinstance(pair, dict):
            left, right = pair["left"], pair["right"]
        elif isinstance(pair, Parcel):
            left, right = pair.left, pair.right
        else:
            left, right = pair[:2]
        left, right = torch.tanh(self.left(right)), gain * torch.tanh(self.right(left))
        return {
            "tuple": lambda: (left, right, None, 3),
            "dict": lambda: {"left": left, "right": right, "note": "not a tensor"},
            "dataclass": lambda: Parcel(left, right),
            "namedtuple": lambda: Pair(left, right),
        }[self.kind]()


class Containers(nn.Module):
    """Blocks that hand each other a tuple, a dict, a dataclass or a named tuple."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches(kind) for kind in kinds)
        self.out = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pair: object = (x, 2 * x)
        for block in self.blocks:
            pair = block(pair, gain=0.9)
        left, right = (pair.left, pair.right) if isinstance(pair, Parcel) else pair[:2]
        return self.out(left + right * 0.5)


class Norms(nn.Module):
    """Batch norm with running statistics, and a buffer of its own that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, 1, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TwoWays(nn.Module):
    """A block with two methods that compute: `forward` and `project`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)

    def project(self, x: Tensor, *, gain: float) -> Tensor:
        return gain * torch.sin(x @ self.weight.T)


class Scorer(nn.Module):
    """Trained through `score`, which goes through its blocks' `project`. Never through a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoWays() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def score(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.project(x, gain=1.5)
        return self.out(x)


class TwoTypes(nn.Module):
    """Blocks that hold parameters of two storage dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoTypesBlock() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TwoTypesBlock(nn.Module):
    """A weight in fp32, a gain and a shift in double precision, and integers that only choose rows of the shift."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.rand(5, WIDTH, dtype=torch.float64))
        self.rows = nn.Parameter(torch.tensor([4, 0, 2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.gain + self.shift[self.rows].sum(0)).to(x.dtype)


class Shapes(nn.Module):
    """One element, none at all, a channels-last kernel and a transposed weight; a scalar if asked for."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.8 if scalar else [0.8]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.kernel = nn.Parameter((0.3 * torch.randn(5, 3, 2, 2)).to(memory_format=torch.channels_last))
        self.weight = nn.Parameter((0.3 * torch.randn(20, 7)).T)

    def forward(self, x: Tensor) -> Tensor:
        image = F.conv2d(x.view(-1, 3, 3, 3), self.kernel).flatten(1)  # [n, 20]
        return torch.tanh(image @ self.weight.T * self.gain + self.nothing.sum()).sum(1, keepdim=True)


@dataclass(frozen=True)
class Example:
    """A model with everything that training it needs.

    `units` gives the modules that become units of their own, bottom-up, without the root. `torch_is_right` is
    False where PyTorch's fully_shard is known not to equal single-process training. `per_rank` says that the
    loss of a concatenated batch is not the mean over ranks (batch norm), so the reference goes rank by rank.
    """

    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], Units]
    kind: str = "tokens"  # of batch: "tokens" or "vectors"
    width: int = WIDTH  # of vectors
    torch_is_right: bool = True
    per_rank: bool = False
    layouts: tuple[str, ...] = ("rows", "flat")  # that can hold it
    weight: float = 1.0  # of the loss

    def make(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The same model with the same numbers on every call."""
        torch.manual_seed(7)
        model = self.build()
        return model if dtype is torch.float32 else model.to(dtype)

    def batch(self, step: int, rank: int, dtype: torch.dtype = torch.float32, samples: int = 2) -> Batch:
        """What `rank` trains on in `step`: inputs and targets, `samples` of each."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        if self.kind == "tokens":
            tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        x = torch.randn(4 * samples, self.width, generator=generator).to(dtype)
        return x, x.sin().sum(1, keepdim=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.weight * self.loss_of(model(batch[0]), batch[1])

    def loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "tokens":
            return F.cross_entropy(
                outputs.flatten(0, 1).to(torch.promote_types(outputs.dtype, torch.float32)), targets.flatten()
            )
        return F.mse_loss(outputs, targets.to(outputs.dtype))


def concatenate(batches: list[Batch]) -> Batch:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def blocks_of(model: nn.Module) -> Units:
    return list(model.blocks)


def nested_units(model: nn.Module) -> Units:
    """Attention and MLP of each block, then the block, which keeps only its norms."""
    return [unit for block in model.blocks for unit in (block.attention, block.mlp, block)]


def frozen_gpt() -> nn.Module:
    """One unit wholly frozen, one partly, and the frozen embedding in the root."""
    model = GPT(blocks=3)
    for module in (model.tokens, model.blocks[0], model.blocks[1].attention.qkv, model.blocks[1].norm2):
        module.requires_grad_(False)
    return model


def checkpointing_blocks(reentrant: bool) -> nn.Module:
    model = GPT(blocks=0)
    model.blocks = nn.ModuleList(CheckpointingBlock() for _ in range(2))
    for block in model.blocks:
        block.reentrant = reentrant
    return model


EXAMPLES: dict[str, Example] = {
    "gpt": Example(GPT, blocks_of),
    "gpt_one_unit": Example(GPT, lambda model: []),
    "gpt_list_unit": Example(GPT, lambda model: [model.blocks[0], [model.norm, model.head]]),
    "nested": Example(GPT, nested_units),
    "odd_mlp": Example(OddMLP, lambda model: list(model.layers), kind="vectors", width=7),
    "odd_mlp_one_unit": Example(OddMLP, lambda model: [], kind="vectors", width=7),
    "tied_within": Example(partial(GPT, tied=True), blocks_of),
    "tied_across": Example(
        partial(GPT, tied=True), lambda model: [model.tokens, *model.blocks, model.head], torch_is_right=False
    ),
    "frozen": Example(frozen_gpt, blocks_of),
    "unused": Example(partial(SkippingGPT, blocks=3), blocks_of),
    "repeated": Example(RepeatingGPT, blocks_of),
    "checkpoint_outside": Example(partial(CheckpointingGPT, reentrant=False), blocks_of),
    "checkpoint_outside_reentrant": Example(partial(CheckpointingGPT, reentrant=True), blocks_of),
    "checkpoint_outside_nested": Example(partial(CheckpointingGPT, reentrant=True), nested_units),
    "checkpoint_inside": Example(partial(checkpointing_blocks, False), blocks_of),
    "checkpoint_inside_reentrant": Example(partial(checkpointing_blocks, True), blocks_of),
    "tuple_and_dict": Example(partial(Containers, ("tuple", "dict", "namedtuple")), blocks_of, kind="vectors"),
    "dataclass": Example(
        partial(Containers, ("dataclass", "dataclass")),
        blocks_of,
        kind="vectors",
        torch_is_right=TORCH >= (2, 13),  # that of 2.11 raises in backward: it does not look into dataclasses
    ),
    "two_types": Example(TwoTypes, blocks_of, kind="vectors", torch_is_right=False),  # PyTorch's raises
    "shapes": Example(Shapes, lambda model: [], kind="vectors", width=27, torch_is_right=False),  # as before
    "scalar": Example(
        partial(Shapes, scalar=True),
        lambda model: [],
        kind="vectors",
        width=27,
        torch_is_right=False,  # as before
        layouts=("flat",),
    ),
    "two_ways": Example(Scorer, blocks_of, kind="vectors"),
    "batch_norm": Example(Norms, blocks_of, kind="vectors", per_rank=True),
}
