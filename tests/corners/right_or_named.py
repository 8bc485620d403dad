"""Small models of three units on every front-end, held to one process: right, or an error of ours by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP

WIDE = 6
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "flat": {"layout": "flat"},
    "flat parameter": {"use_orig_params": False},
    "original parameters": {"use_orig_params": True},
}
front_ends = pytest.mark.parametrize("front", FRONT_ENDS)
Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model and its batch


class Block(nn.Module):
    """Two layers; what it returns besides is up to `give`."""

    def __init__(self, give: Callable[[Block, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        y = self.down(torch.tanh(self.up(x)))
        return y if self.give is None else self.give(self, y)


class Network(nn.Module):
    """Three blocks, of which the one in the middle is `middle`; `join` makes a tensor of what that one returns."""

    def __init__(self, middle: Callable[[], nn.Module], join: Callable[[Any], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), middle(), Block()])
        self.gain = nn.Parameter(torch.rand(WIDE))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self.join(self.blocks[1](x))
        return self.blocks[2](x) * self.gain


def sharded(front: str, model: Any) -> nn.Module:
    given = FRONT_ENDS[front]
    if "layout" in given:
        for block in model.blocks:
            fullshard.fully_shard(block, **given)
        return fullshard.fully_shard(model, **given)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **given)
    return FSDP(model, **given)


def inner(module: nn.Module) -> Any:
    """The module that an instance wraps, or the module itself."""
    return module.module if isinstance(module, FSDP) else module


def batch(step: int, ranks: list[int]) -> Tensor:
    """[4 a rank, WIDE]."""
    parts = [torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
    return torch.cat(parts)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by the unwrapped model's names."""
    if not isinstance(model, FSDP):
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def differences(model: nn.Module, plain: nn.Module, what: str) -> list[str]:
    problems = []
    got = gradients(model)
    for name, p in plain.named_parameters():
        grad, want = got[name], p.grad
        if want is None or grad is None:
            if (want is not None and want.any()) or (grad is not None and grad.any()):
                problems.append(f"{what}: gradient of {name}: {grad} where {want} is wanted")
        elif not torch.allclose(grad, want, rtol=1e-4, atol=1e-6):
            problems.append(f"{what}: gradient of {name} is off by {(grad - want).norm() / want.norm():.1e}")
    return problems


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def right_or_named(
    front: str, build: Callable[[], nn.Module], loss: Loss, names: tuple[str, ...], after: Loss | None = mean_square
) -> list[str]:
    """Gradients of two steps against one process, or an error of ours with every fragment in `names`; then a step.

    Args:
        names: empty: an error is not right.
        after: the ordinary step that must be right afterwards; None: there is none.
    """
    ranks = list(range(dist.get_world_size()))
    model, plain = sharded(front, build()), build()
    problems: list[str] = []
    losses: list[Tensor] = []
    try:
        for step in range(2):
            for each, x in ((model, batch(step, [dist.get_rank()])), (plain, batch(step, ranks))):
                each.zero_grad()
                value = loss(each, x)
                value.backward()
                losses.append(value.detach())
            mine, want = losses[-2:]
            dist.all_reduce(mine)
            if not torch.allclose(mine / len(ranks), want, rtol=1e-4):
                problems.append(f"step {step}: loss {mine / len(ranks)} where {want} is wanted")
            problems += differences(model, plain, f"step {step}")
    except fullshard.FullshardError as error:
        missing = [name for name in names if name not in str(error)]
        if not names or missing:
            problems.append(f"{type(error).__name__} does not say {missing}: {error}")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {str(error)[:300]}")
    if after is not None:
        try:
            for each, x in ((model, batch(5, [dist.get_rank()])), (plain, batch(5, ranks))):
                each.zero_grad()
                after(each, x).backward()
            problems += differences(model, plain, "afterwards")
        except Exception as error:
            problems.append(f"afterwards: {type(error).__name__}: {str(error)[:300]}")
    return problems
