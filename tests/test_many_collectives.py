"""Several collectives in one call of the group, as accelerators' backends have it; gloo's methods show it is right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard.comm import Costs
from fullshard.torch_private.collectives import all_gather_many, reduce_scatter_many
from models import EXAMPLES
from training import full_gradients, full_parameters


class Apart(fullshard.TorchComm):
    """Says that one more collective costs nothing, so that every parameter has its own."""

    def costs(self, axis: Any) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1.0)


class Together(Apart):
    """In one call whatever the backend. Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reduces = 0

    def gather_many(self, axis: Any, outs: Any, shards: Any) -> Any:
        self.gathers += 1
        return all_gather_many(outs, shards, axis.group)

    def reduce_many(self, axis: Any, outs: Any, buffers: Any, mean: bool) -> Any:
        self.reduces += 1
        return reduce_scatter_many(outs, buffers, axis.group, mean)


def test_many_at_once_are_as_one_after_the_other(run_ranks):
    assert all(run_ranks(at_once, world=2))


def at_once() -> bool:
    example, results = EXAMPLES["odd_mlp"], []
    for comm in (Apart(), Together()):
        model = example.make(torch.float64)
        for unit in (*example.units(model), model):
            fullshard.fully_shard(unit, comm=comm)
        inputs, targets = example.batch(0, dist.get_rank(), torch.float64)
        loss = example.loss_of(model(inputs), targets)
        loss.backward()
        results.append((loss.detach(), full_gradients(model), full_parameters(model)))
        if isinstance(comm, Together):
            assert comm.gathers and comm.reduces, "no bucket has several segments: this shows nothing"
    (loss, grads, values), (loss_too, grads_too, values_too) = results
    assert torch.equal(loss, loss_too)
    for name, value in values.items():
        assert torch.equal(value, values_too[name]), name
        assert torch.allclose(grads[name], grads_too[name], rtol=1e-12, atol=1e-15), name
    return True
