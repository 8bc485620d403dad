"""`state_dict()` from another thread while steps run: training is what it is without, values are sharded."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from ways import layers, loss_of, mine, shard

STEPS = 12


class Reader(threading.Thread):
    """Reads a model's state dict over and over, with the shapes and kinds of what it got."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.over, self.reads = model, threading.Event(), 0
        self.kinds: set[tuple[str, str, tuple[int, ...], int]] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                for name, value in self.model.state_dict().items():
                    local = value.to_local() if hasattr(value, "to_local") else value
                    self.kinds.add((name, type(value).__name__, tuple(value.shape), local.numel()))
                    local.sum()
                self.reads += 1
        except BaseException as error:
            self.error = error


def train(way: str, reading: bool) -> tuple[list[float], dict[str, Tensor], int, set[Any], set[Any]]:
    torch.manual_seed(0)
    model = shard(layers(), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reader, losses = Reader(model), []
    if reading:
        reader.start()
    for step in range(STEPS):
        loss = loss_of(model, mine(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reader.over.set()
    if reading:
        reader.join()
        if reader.error is not None:
            raise reader.error
    once = Reader(model)
    threading.Timer(0.05, once.over.set).start()
    once.run()
    if once.error is not None:
        raise once.error
    local = {n: (v.to_local() if hasattr(v, "to_local") else v).clone() for n, v in model.state_dict().items()}
    return losses, local, reader.reads, reader.kinds, once.kinds


def test_reading_beside_a_step_changes_nothing(run_ranks: Any) -> None:
    alone = run_ranks(train, "rows", False)
    for (losses, values, _, _, _), (again, read, reads, kinds, once) in zip(
        alone, run_ranks(train, "rows", True), strict=True
    ):
        assert again == losses and reads > 0
        assert all(torch.equal(values[name], read[name]) for name in values)
        assert kinds == once  # whatever was gathered then: always the same sharded values
