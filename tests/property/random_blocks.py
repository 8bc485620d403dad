"""Models of blocks that hypothesis draws, and shrinks: what blocks do to their inputs, parameters and each other.

Every value follows from the plan alone, so that equal plans make equal models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INPUTS = 4


class Short:
    """A dataclass whose `repr` leaves defaults out: what a failure prints is run again."""

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass
class Carried:
    """What passes from block to block: blocks put their auxiliary losses into it."""

    x: Tensor
    extras: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class BlockPlan(Short):
    """One block.

    Attributes:
        kind: what it computes; see `Block`.
        passes: how it is given its input and gives its output.
        recompute: activation checkpointing of the whole block.
        frozen: whether its first weight does not train from the start.
        tied: whether its first weight is that of the model's first block, where shapes allow it.
        inner: a block within it.
    """

    kind: str = "layers"
    passes: str = "tensor"
    recompute: str = "no"
    frozen: bool = False
    tied: bool = False
    inner: BlockPlan | None = None


@dataclass(frozen=True, repr=False)
class ModelPlan(Short):
    """A model of these blocks, `[n, INPUTS]` to `[n, 1]`."""

    blocks: tuple[BlockPlan, ...]
    width: int = 5
    dtype: torch.dtype = torch.float64

    @property
    def all_blocks(self) -> list[BlockPlan]:
        return [each for block in self.blocks for each in (block, block.inner) if each is not None]

    @property
    def of_some_ranks(self) -> bool:
        """Whether some ranks run parts that others leave out."""
        return any(block.kind == "somewhere" for block in self.all_blocks)

    @property
    def reentrant(self) -> bool:
        return any(block.recompute == "reentrant" for block in self.all_blocks)


KINDS = (
    "layers",
    "layers",
    "norm",
    "odd",
    "unused",
    "twice",
    "skips",
    "either",
    "in place",
    "changes",
    "cut",
    "buffers",
    "again",
)


def valid_block(block: BlockPlan) -> BlockPlan:
    """What changes its input is not given it again."""
    inner_changes = block.inner is not None and block.inner.kind == "changes"
    return replace(block, recompute="no") if block.kind == "changes" or inner_changes else block


def valid(plan: ModelPlan) -> ModelPlan:
    """Units of some ranks are not recomputed in an order that ranks share: docs/divergence.md."""
    return changed(plan, recompute="no") if plan.of_some_ranks else plan


def changed(plan: ModelPlan, **fields: Any) -> ModelPlan:
    """With these fields of all blocks."""

    def change(block: BlockPlan) -> BlockPlan:
        return replace(block, **fields, inner=None if block.inner is None else change(block.inner))

    return replace(plan, blocks=tuple(map(change, plan.blocks)))


def block_plans(kinds: tuple[str, ...], inner: Any) -> Any:
    return st.builds(
        BlockPlan,
        kind=st.sampled_from(kinds),
        passes=st.sampled_from(["tensor", "tensor", "dict", "carried", "tuple", "list", "keywords"]),
        recompute=st.sampled_from(["no", "no", "reentrant", "not reentrant"]),
        frozen=st.sampled_from([False, False, True]),
        tied=st.sampled_from([False, False, True]),
        inner=inner,
    ).map(valid_block)


def model_plans(kinds: tuple[str, ...]) -> Any:
    blocks = block_plans(
        kinds,
        st.sampled_from([False, False, True]).flatmap(lambda has: block_plans(kinds, st.none()) if has else st.none()),
    )
    return st.builds(
        ModelPlan,
        blocks=st.lists(blocks, min_size=1, max_size=4).map(tuple),
        width=st.sampled_from([5, 4, 3, 8]),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float64, torch.float32]),
    ).map(valid)


models = st.sampled_from([KINDS] * 5 + [(*KINDS, *["somewhere"] * 4)]).flatmap(model_plans)


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
        elif plan.kind == "buffers":
            self.register_buffer("order", torch.randperm(width))
            self.register_buffer("mask", torch.arange(width) % 3 != 1)
            self.register_buffer("scales", torch.rand(width))
        if plan.inner is not None:
            self.inner = Block(plan.inner, width)
        self.up.weight.requires_grad_(not plan.frozen)

    def forward(self, given: Any = None, *, x: Tensor | None = None) -> Any:
        if x is not None:
            return self.compute(x)
        if isinstance(given, dict):
            return {"x": self.compute(given["x"]), "besides": given["besides"]}
        if isinstance(given, list):
            given.append(torch.tanh(given[0]))  # the caller looks there
            return self.compute(given[0])
        if isinstance(given, tuple):
            return self.compute(given[0]), [torch.tanh(given[1][0])], given[2]
        if isinstance(given, Carried):
            y = self.compute(given.x)
            given.extras.append(y.square().mean())  # into what it was given
            return Carried(y, given.extras)
        return self.compute(given)

    def compute(self, x: Tensor) -> Tensor:
        kind = self.plan.kind
        if (kind == "skips" and self.number % 3 == 1) or (kind == "somewhere" and (self.number + self.rank) % 2):
            return x * 1.5
        if kind == "in place":
            x = (x + 0.0).mul_(0.9).tanh_()
        if kind == "changes":
            x = x.mul_(0.9)
        if kind == "norm":
            x = self.norm(x)
        if kind == "odd":
            x = x * self.scale + (x @ self.odd).sum(-1, keepdim=True) * 0.1
        if kind == "buffers":
            x = x[:, self.order] * torch.where(self.mask, self.scales, 1.0).to(x.dtype)
        if kind == "either":  # a rank uses one, the other or both, unlike its peers
            uses = 1 + (self.number + self.rank) % 3
            x = x + (torch.tanh(x @ self.left) if uses & 1 else 0.0) + (torch.sin(x @ self.right) if uses & 2 else 0.0)
        y = self.down(torch.tanh(self.up(x.detach() if kind == "cut" else x)))
        if kind == "twice":
            y = self.down(torch.tanh(self.up(y)))
        if self.plan.inner is not None:
            y = run(self.inner, self.plan.inner, y, [])
        return y if kind == "twice" else x + y


class Model(nn.Module):
    """See `ModelPlan`."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.first, self.last = nn.Linear(INPUTS, plan.width), nn.Linear(plan.width, 1)
        self.blocks = nn.ModuleList(Block(block, plan.width) for block in plan.blocks)
        for block, made in zip(plan.blocks, self.blocks, strict=True):
            if block.tied:
                made.up.weight = self.blocks[0].up.weight
        self.to(plan.dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The prediction, and the sum of what blocks added to the loss."""
        x = torch.tanh(self.first(x))
        extras: list[Tensor] = []
        for block in self.blocks:
            x = run(block, block.plan, x + 0.0 if block.plan.kind == "changes" else x, extras)
            if block.plan.kind == "again":
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
    if plan.passes == "dict":
        return block({"x": x, "besides": None})["x"]
    if plan.passes == "tuple":
        x, [y], scale = block((x, [x * 0.5], 0.5))
        return x + y * scale
    if plan.passes == "list":
        given = [x]
        y = block(given)
        return y + given[1]
    return block(x=x) if plan.passes == "keywords" else block(x)


def set_turn(model: nn.Module, number: int, rank: int) -> None:
    """Tell blocks which micro-batch comes, and of which rank."""
    for module in model.modules():
        if isinstance(module, Block):
            module.number, module.rank = number, rank


def loss_of(model: nn.Module, x: Tensor, total: bool = False) -> Tensor:
    """A mean, or a `total` over the samples."""
    out, extra = (each.double() for each in model(x))
    return (out.square().sum() if total else out.square().mean()) + 0.1 * extra
