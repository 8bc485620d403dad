"""What tests of programs written for PyTorch's FSDP share: both libraries, and training beside one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard

LIBRARIES = {"ours": fullshard, "theirs": torch_fsdp}
WRAPPERS = (False, True)  # use_orig_params


def shard(model: nn.Sequential, **keywords: Any) -> nn.Sequential:
    """Every part of a sequence that has parameters is a unit, and so is the whole."""
    for part in model:
        if any(True for _ in part.parameters()):
            fullshard.fully_shard(part, **keywords)
    fullshard.fully_shard(model, **keywords)
    return model


def layers(seed: int = 0, width: int = 5) -> nn.Sequential:
    """[batch, 4] -> [batch, 3], sizes that two ranks cannot share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def losses_of(model: Callable[[Tensor], Tensor], parameters: Any, whole: bool, steps: int = 3) -> list[float]:
    """SGD on this rank's batches, or on all ranks' at once; the losses, of all ranks."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ranks = range(dist.get_world_size()) if whole else [dist.get_rank()]
    losses = []
    for step in range(steps):
        loss = model(torch.cat([batch(step, rank) for rank in ranks])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().double()
        if not whole:
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            value /= dist.get_world_size()
        losses.append(value.item())
    return losses


def trains_as(model: nn.Module, reference: nn.Module, rtol: float = 1e-9) -> bool:
    """Three steps of both from where they are; fails where the losses differ."""
    got = losses_of(model, model.parameters(), whole=False)
    want = losses_of(reference, reference.parameters(), whole=True)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=0.0)
    return True


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def notices() -> Iterator[list[str]]:
    """Collects what is warned or logged as a warning meanwhile: "Category: text", "Log: text"."""
    kept, said = _Kept(), []
    logger = logging.getLogger("fullshard")
    logger.addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [f"{w.category.__name__}: {w.message}" for w in caught] + [f"Log: {line}" for line in kept.lines]
    finally:
        logger.removeHandler(kept)
