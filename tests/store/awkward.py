"""A model with everything that checkpoints stumble over, trained and saved in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fullshard
from fullshard.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from ways import shard

WHOLE = StateDictOptions(full_state_dict=True)
STEPS = 2  # before a save, and as many after it


class Frozen(nn.Module):
    """A linear map and its transpose, never trained: a unit of its own, since a `FlatParameter` trains whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T @ self.weight * 0.1


class Part(nn.Module):
    """A unit of parameters whose rows divide by nothing, one of which is not always used."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.full((1,), 0.8))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = Frozen()
        self.never = nn.Parameter(torch.randn(3))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.frozen(torch.tanh(self.linear(x) * self.gain + self.nothing.sum()))
        return x + self.never.sum() if self.uses else x


class Awkward(nn.Module):
    """Tied weights, a channels-last kernel, a batch norm's buffers, frozen, empty and never updated parameters."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 5)
        self.kernel = nn.Parameter((0.3 * torch.randn(5, 1, 2, 2)).to(memory_format=torch.channels_last))
        self.blocks = nn.ModuleList([Part(uses), Part(True)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)  # [n, 5]
        x = x + F.conv2d(x[:, None, None, :].expand(-1, 1, 2, 5), self.kernel).amax((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parts(model: nn.Module) -> list[nn.Module]:
    return [unit for block in model.blocks for unit in (block.frozen, block)]


def make(
    way: str, seed: int = 0, uses: bool = False, like_pytorch: bool = False, **settings: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """The model, sharded so unless `way` is "plain", and its optimizer.

    `uses`: whether every parameter is used. (State of a `FlatParameter` is of all its parameters.)
    `like_pytorch`: without what its `fully_shard` cannot train (empty parameters) or save right (channels-last ones).
    """
    torch.manual_seed(seed)
    model = Awkward(uses)
    if like_pytorch:
        model.norm = nn.Identity()
        model.kernel = nn.Parameter(model.kernel.detach().contiguous())
        for block in model.blocks:
            block.nothing = nn.Parameter(torch.zeros(1, 3))
    if way != "plain":
        model = shard(model, way, parts, **settings)
    trained = [p for p in model.parameters() if p.requires_grad] if way != "wrapper" else model.parameters()
    return model, torch.optim.AdamW(trained, lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int | None = None) -> list[float]:
    """Losses of this rank."""
    losses = []
    for step in steps:
        chosen = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(100 * step + chosen)
        tokens = torch.randint(11, (6,), generator=generator)
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state by name, on every rank. Collective."""
    found = {f"model.{k}": v.clone() for k, v in get_model_state_dict(model, options=WHOLE).items()}
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    for name, own in state.items():
        found |= {f"state.{name}.{k}": torch.as_tensor(v).clone() for k, v in own.items()}
    return found


def train_and_save(
    way: str, folder: Path | str, settings: dict[str, Any] | None = None, **given: Any
) -> tuple[Any, Any]:
    """Saves after some steps; what all was then, and the losses of the steps after it."""
    model, optimizer = make(way, **(settings or {}))
    train(model, optimizer, range(STEPS))
    fullshard.save(folder, model, optimizer, step=STEPS, **given)
    then = whole(model, optimizer)
    return then, train(model, optimizer, range(STEPS, 2 * STEPS))


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise the same."""
    problems = [f"{name} is on one side only" for name in sorted(got.keys() ^ want.keys())]
    for name in got.keys() & want.keys():
        if got[name].shape != want[name].shape or not torch.equal(got[name], want[name]):
            problems.append(f"{name} differs: {got[name].flatten()[:3]} is not {want[name].flatten()[:3]}")
    return problems


def load_and_compare(
    way: str, folder: Path | str, want: dict[str, Tensor], settings: dict[str, Any] | None = None, **given: Any
) -> tuple[list[str], list[float]]:
    """Loads into a model of other numbers; what differs, and the losses of the steps after it."""
    model, optimizer = make(way, seed=1, **(settings or {}))
    found = fullshard.load(folder, model, optimizer, **given)
    assert found.step == STEPS and not found.untouched, found
    return differences(whole(model, optimizer), want), train(model, optimizer, range(STEPS, 2 * STEPS))
