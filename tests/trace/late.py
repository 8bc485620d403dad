"""What ranks run in the tests of traces: a stack of blocks, of which one may be slow."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard

DELAY = 0.25  # seconds that the late rank sleeps
SLOW = 2  # the block before whose forward it does


def stack(width: int = 128, blocks: int = 5, shape: tuple[int, ...] = (), reshard: bool | int = True) -> nn.Sequential:
    """Blocks, each a unit, and a head in the root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))
    model.append(nn.Linear(width, 4))
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    for block in list(model)[:-1]:
        fullshard.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fullshard.fully_shard(model, mesh=mesh)


def late_steps(
    folder: str,
    late: int | None,
    steps: int = 4,
    marks: bool = False,
    shape: tuple[int, ...] = (),
    reshard: bool | int = True,
) -> None:
    """Trace steps; rank `late` sleeps in each."""
    model, rank = stack(shape=shape, reshard=reshard), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(8, 128)
    if rank == late:
        model[SLOW].register_forward_pre_hook(lambda *_: time.sleep(DELAY))

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # so that connections are open and plans made
    with fullshard.trace(Path(folder)) as recording:
        for _ in range(steps):
            step()
            if marks:
                recording.step()
