"""`state_dict()` from another thread while steps run: training is what it is without, values are sharded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ways import differences, layers, loss_of, mine, shard

STEPS = 12


Kinds = set[tuple[str, str, tuple[int, ...], int]]


def read(model: nn.Module, over: threading.Event) -> Kinds:
    """The state dict over and over: shapes and kinds of what it got."""
    kinds: Kinds = set()
    while True:
        for name, value in model.state_dict().items():
            kinds.add((name, type(value).__name__, tuple(value.shape), value.to_local().clone().numel()))
        if over.is_set():
            return kinds


def train(way: str, reading: bool) -> tuple[list[float], dict[str, Tensor], Kinds, Kinds]:
    torch.manual_seed(0)
    model = shard(layers(), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    over, losses = threading.Event(), []
    with ThreadPoolExecutor(1) as reader:
        kinds = reader.submit(read, model, over) if reading else None
        for step in range(STEPS):
            loss = loss_of(model, mine(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        over.set()
    local = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    return losses, local, kinds.result() if kinds else set(), read(model, over)


def test_reading_beside_a_step_changes_nothing(run_ranks: Any) -> None:
    alone, beside = run_ranks(train, "rows", False), run_ranks(train, "rows", True)
    for (losses, values, _, _), (again, read, kinds, once) in zip(alone, beside, strict=True):
        assert again == losses and not differences("values", read, values, 0.0)
        assert kinds == once  # whatever was gathered then: always the same sharded values
