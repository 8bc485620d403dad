"""Stages of PyTorch's pipelines, sharded: also under schedules that compute gradients of parameters after the inputs'.

These list the parameters of a stage and look for them in the graph, where sharded ones are not: FSDP2 trains some of
them wrongly, and others not at all.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard
from models import TORCH
from ways import on_ranks

MICRO_BATCHES, WIDTH = 4, 6

two_stages_in_a_row = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 sends from a stage to the next one on the same rank, which gloo cannot"
)


class Stage(nn.Module):
    """Two units, and a parameter that is ignored: pipelines find it in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale  # once: in torch 2.11 these schedules count a parameter's uses twice


@pytest.mark.gloo("a pipeline sends and receives")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *("GPipe", "Interleaved1F1B", "InterleavedZeroBubble"),
        *[pytest.param(kind, marks=two_stages_in_a_row) for kind in ("ZBVZeroBubble", "DualPipeV")],
    ],
)
@on_ranks(world=4, timeout=120)
def test_stages_learn_as_in_one_process(kind: str, reshard: bool) -> None:
    """Two pipelines of two ranks; ranks of the same stages are data parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, replicas, cpu = mesh["pp"], mesh["dp"], torch.device("cpu")
    place, replica = pipeline.get_local_rank(), replicas.get_local_rank()
    count = 2 if kind == "GPipe" else 4
    of_rank = (
        [place] if kind == "GPipe" else [place, 3 - place if kind in ("ZBVZeroBubble", "DualPipeV") else place + 2]
    )

    torch.manual_seed(1)
    plain = nn.Sequential(*[Stage() for _ in range(count)])
    parts = {index: copy.deepcopy(plain[index]) for index in of_rank}
    for part in parts.values():
        how: Any = {"mesh": replicas, "reshard_after_forward": reshard}
        for layer in part.layers:
            fully_shard(layer, **how)
        fully_shard(part, ignored_params={part.scale}, **how)
    group = pipeline.get_group()
    stages = [pipelining.PipelineStage(part, index, count, cpu, group=group) for index, part in parts.items()]
    loss: Any = nn.functional.mse_loss
    schedule: Any = getattr(pipelining, f"Schedule{kind}")(
        stages[0] if kind == "GPipe" else stages, n_microbatches=MICRO_BATCHES, loss_fn=loss
    )
    data = torch.randn(2, 2, 2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, *parts.values())]
    for step in range(2):
        inputs = (data[step, replica],) if 0 in parts else ()
        targets = {"target": data[step, replica].flip(0), "losses": []} if count - 1 in parts else {}
        schedule.step(*inputs, **targets)
        loss(plain(data[step].flatten(0, 1)), data[step].flip(1).flatten(0, 1)).backward()
        for index, part in parts.items():
            for (name, ours), theirs in zip(part.named_parameters(), plain[index].parameters(), strict=True):
                assert ours.grad is not None, name
                if name == "scale":  # ignored: nobody else reduces it
                    dist.all_reduce(ours.grad, group=replicas.get_group())
                    ours.grad /= 2
                whole = ours.grad if name == "scale" else ours.grad.full_tensor()
                assert torch.allclose(whole, theirs.grad, rtol=1e-4, atol=1e-6), (name, whole, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
