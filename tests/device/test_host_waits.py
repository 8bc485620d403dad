"""How often the host waits for the device in a steady step, and reads a value of its: never, but where it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from simulated import Device, ReadTooEarly, by_nccl, simulated

WIDTH, BLOCKS, WARM_UP, STEPS = 4, 4, 5, 4


def sharded(mesh: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def backward(model: nn.Module, number: int = 0) -> None:
    data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
    model(data).square().sum().backward()


Step = Callable[[], object]
"""One step, without the optimizer's."""


def default() -> tuple[nn.Module, Step]:
    model = sharded()
    return model, lambda: backward(model)


def flat() -> tuple[nn.Module, Step]:
    model = sharded(layout="flat")
    return model, lambda: backward(model)


def wrapper() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    made = fullshard.FullyShardedDataParallel(model, auto_wrap_policy={nn.Sequential}, use_orig_params=True)
    return made, lambda: backward(made)


def accumulation() -> tuple[nn.Module, Step]:
    """Of 64 micro-batches, of which the last is reduced."""
    model: Any = sharded()

    def step() -> None:
        for part in range(64):
            model.set_requires_gradient_sync(part == 63)
            backward(model, part)

    return model, step


def kept_units() -> tuple[nn.Module, Step]:
    """As pipeline stages do it: gathered once for all micro-batches."""
    model: Any = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)

    def step() -> None:
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            backward(model, part)

    return model, step


def kept_for_tokens() -> tuple[nn.Module, Step]:
    """Generation of some tokens in every step, with parameters that stay gathered."""
    model = sharded()

    def step() -> None:
        with fullshard.keep_gathered(model), torch.no_grad():
            for number in range(6):
                model(torch.ones(1, WIDTH) * number)
        backward(model)

    return model, step


def evaluation() -> tuple[nn.Module, Step]:
    model = sharded()

    def step() -> None:
        backward(model)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH)), model(torch.ones(2, WIDTH))
        model.train()

    return model, step


class Skips(nn.Module):
    """The second layer is used on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sometimes(self.always(x)) if dist.get_rank() == 0 else self.always(x)


def unused() -> tuple[nn.Module, Step]:
    model = fully_shard(Skips())
    return model, lambda: backward(model)


def unused_zeros() -> tuple[nn.Module, Step]:
    """Units of their own, one of which other ranks run."""
    model = Skips()
    for layer in (model.always, model.sometimes):
        fully_shard(layer, unused="zeros")
    made = fully_shard(model, unused="zeros")
    return made, lambda: backward(made)


def hybrid() -> tuple[nn.Module, Step]:
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model, lambda: backward(model)


def counted_tokens() -> tuple[nn.Module, Step]:
    model: Any = sharded()
    model.set_gradient_reduction("tokens")

    def step() -> None:
        model.add_tokens(torch.tensor(3))
        backward(model)

    return model, step


CASES: dict[Callable[[], tuple[nn.Module, Step]], tuple[int, bool, dict[str, int]]] = {
    # ranks, whether shards live on the host, and waits in `STEPS` steps by where they are
    default: (2, False, {}),
    flat: (2, False, {}),
    wrapper: (2, False, {}),
    accumulation: (2, False, {}),
    kept_units: (2, False, {}),
    kept_for_tokens: (2, False, {}),
    evaluation: (2, False, {}),
    unused: (2, False, {}),
    unused_zeros: (2, False, {}),
    hybrid: (4, False, {}),
    counted_tokens: (2, False, {}),
    default: (2, False, {}),
}


def waits_of(case: Callable[[], tuple[nn.Module, Step]], offload: bool) -> dict[str, int]:
    with by_nccl(), simulated(offload) as device:
        model, step = case()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                device.waits.clear()
            step()
            optimizer.step()
            optimizer.zero_grad()
        return dict(Counter(device.waits))
