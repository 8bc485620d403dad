"""Training under `FullyShardedDataParallel`, Fullshard's or PyTorch's, and what a user sees of it."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard

LIBRARIES = {"ours": fullshard, "theirs": torch_fsdp}


def wrap(library: types.ModuleType, module: nn.Module, **keywords: Any) -> Any:
    """`module`, wrapped on the CPU by the library's class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.FullyShardedDataParallel(module, device_id=torch.device("cpu"), **keywords)


def whole(library: types.ModuleType, model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by clean name, copied; empty for a model without instances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with library.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named}


def batch(step: int, rank: int, width: int = 6, rows: int = 4) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    model: nn.Module,
    steps: int = 3,
    loss: Callable[[Any], Tensor] = lambda out: out.float().square().mean(),
    width: int = 6,
    dtype: torch.dtype = torch.float32,
    ranks: list[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """SGD with momentum on this rank's batches (or the concatenation of those of `ranks`); the losses."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        chosen = [dist.get_rank()] if ranks is None else ranks
        value = loss(model(torch.cat([batch(step, rank, width) for rank in chosen]).to(dtype)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def same(mine: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same names, dtypes and values."""
    assert list(mine) == list(expected)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
