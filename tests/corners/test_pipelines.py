"""Stages of PyTorch's pipelines, sharded: also under schedules that compute gradients of parameters after the inputs'.

These list the parameters of a stage and look for them in the graph, where sharded ones are not: FSDP2 trains some of
them wrongly, and others not at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard
from ways import on_ranks

STAGES, MICRO_BATCHES, WIDTH = 2, 3, 6


class Stage(nn.Module):
    """Two units, and a parameter that is ignored: pipelines find it in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@on_ranks(timeout=120)
def test_stages_learn_as_in_one_process(kind: str, reshard: bool) -> None:
    """Each rank is a pipeline by itself, whose stages take turns; data parallel over both ranks."""
    world, rank, cpu = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    alone = [dist.new_group([each]) for each in range(world)][rank]
    stages_of_rank = 1 if kind == "GPipe" else STAGES

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*[Stage() for _ in range(stages_of_rank)])

    plain, model = build(), build()
    mesh = init_device_mesh("cpu", (world,))
    for part in model:
        how: Any = {"mesh": mesh, "reshard_after_forward": reshard}
        for layer in part.layers:
            fully_shard(layer, **how)
        fully_shard(part, ignored_params={part.scale}, **how)
    stages = [pipelining.PipelineStage(part, i, stages_of_rank, cpu, group=alone) for i, part in enumerate(model)]
    loss: Any = nn.functional.mse_loss
    schedule: Any = getattr(pipelining, f"Schedule{kind}")(
        stages[0] if kind == "GPipe" else stages, n_microbatches=MICRO_BATCHES, loss_fn=loss
    )
    data = torch.randn(2, world, 2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for step in range(2):
        mine, everything = data[step, rank], data[step].flatten(0, 1)
        schedule.step(mine, target=mine.flip(0), losses=[])
        loss(plain(everything), data[step].flip(1).flatten(0, 1)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None, name
            if "scale" in name:  # ignored: nobody else reduces it
                dist.all_reduce(ours.grad)
                ours.grad /= world
            whole = ours.grad if "scale" in name else ours.grad.full_tensor()
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-4, atol=1e-6, msg=f"{name}: {whole} {theirs.grad}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
