"""Models of blocks that hypothesis draws, and shrinks: what blocks do to their inputs, parameters and each other.

Everything is in double precision and every value follows from the plan alone, so that equal plans make equal models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INPUTS = 4


@dataclass
class Carried:
    """What passes from block to block: blocks put their auxiliary losses into it."""

    x: Tensor
    extras: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class BlockPlan:
    """One block.

    Attributes:
        kind: what it computes; see `Block`.
        passes: how it is given its input and gives its output.
        recompute: activation checkpointing of the whole block.
        frozen: whether its first weight does not train from the start.
        tied: whether its first weight is that of the model's first block, where shapes allow it.
    """

    kind: str
    passes: str = "tensor"
    recompute: str = "no"
    frozen: bool = False
    tied: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """A model of these blocks, `[n, INPUTS]` to `[n, 1]`. `nested`: the parts of blocks are units, too."""

    blocks: tuple[BlockPlan, ...]
    width: int
    nested: bool = False


KINDS = ("layers", "layers", "norm", "odd", "unused", "twice", "skips", "either", "in place")
blocks = st.builds(
    BlockPlan,
    kind=st.sampled_from(KINDS),
    passes=st.sampled_from(["tensor", "tensor", "dict", "carried"]),
    recompute=st.sampled_from(["no", "no", "reentrant", "not reentrant"]),
    frozen=st.booleans(),
    tied=st.booleans(),
)
models = st.builds(
    ModelPlan,
    blocks=st.lists(blocks, min_size=1, max_size=4).map(tuple),
    width=st.sampled_from([5, 4, 3, 8]),
    nested=st.booleans(),
)


class Block(nn.Module):
    """See `BlockPlan`. `number` and `rank` are set from outside: which micro-batch this is, and of which rank."""

    number = rank = 0

    def __init__(self, plan: BlockPlan, width: int) -> None:
        super().__init__()
        self.plan = plan
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width, bias=plan.kind != "norm")
        if plan.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif plan.kind == "odd":
            self.scale, self.odd = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(width, 3))
        elif plan.kind == "unused":
            self.unused = nn.Linear(width, 2)
        elif plan.kind == "either":
            self.left, self.right = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
        self.up.weight.requires_grad_(not plan.frozen)

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {"x": self.compute(x["x"]), "besides": x["besides"]}
        if isinstance(x, Carried):
            y = self.compute(x.x)
            x.extras.append(y.square().mean())  # into what it was given
            return Carried(y, x.extras)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        kind = self.plan.kind
        if kind == "skips" and self.number % 3 == 1:
            return x * 1.5
        if kind == "in place":
            x = (x + 0.0).mul_(0.9).tanh_()
        if kind == "norm":
            x = self.norm(x)
        if kind == "odd":
            x = x * self.scale + (x @ self.odd).sum(-1, keepdim=True) * 0.1
        if kind == "either":  # a rank uses one, the other or both, unlike its peers
            uses = 1 + (self.number + self.rank) % 3
            x = x + (torch.tanh(x @ self.left) if uses & 1 else 0.0) + (torch.sin(x @ self.right) if uses & 2 else 0.0)
        y = self.down(torch.tanh(self.up(x)))
        return self.down(torch.tanh(self.up(y))) if kind == "twice" else x + y


class Model(nn.Module):
    """See `ModelPlan`."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(INPUTS, plan.width), nn.Linear(plan.width, 1)
        self.blocks = nn.ModuleList(Block(block, plan.width) for block in plan.blocks)
        for block, made in zip(plan.blocks, self.blocks, strict=True):
            if block.tied:
                made.up.weight = self.blocks[0].up.weight
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The prediction, and the sum of what blocks added to the loss."""
        x = torch.tanh(self.first(x))
        extras: list[Tensor] = []
        for block in self.blocks:
            x = run(block, block.plan, x, extras)
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        return self.last(x), sum(extras, x.new_zeros(()))


def run(block: nn.Module, plan: BlockPlan, x: Tensor, extras: list[Tensor]) -> Tensor:
    """A block on `x`, given and taken back in the way of its plan."""
    if plan.recompute != "no":  # without `extras`: what is run again would add its loss twice
        return checkpoint(partial(pass_through, block, plan), x, use_reentrant=plan.recompute == "reentrant")
    if plan.passes == "carried":
        return block(Carried(x, extras)).x
    return pass_through(block, plan, x)


def pass_through(block: nn.Module, plan: BlockPlan, x: Tensor) -> Tensor:
    return block({"x": x, "besides": None})["x"] if plan.passes == "dict" else block(x)


def set_turn(model: nn.Module, number: int, rank: int) -> None:
    """Tell blocks which micro-batch comes, and of which rank."""
    for module in model.modules():
        if isinstance(module, Block):
            module.number, module.rank = number, rank


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out, extra = model(x)
    return out.square().mean() + 0.1 * extra
