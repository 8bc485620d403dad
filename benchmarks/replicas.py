"""Optimizers on a mesh (replicate, shard): steps of every replica beside steps that are taken once in the world.

    python benchmarks/replicas.py --ranks 4      # 2 replicas x 2 shards over gloo on this machine, in turns

Each trains the demo's GPT. State: bytes on a rank, the most and over all ranks, and on a rank once a save has shown it
sharded. Bytes that a rank sends in a step, the mean of ranks: by the optimizer, within its replica and between
replicas, from the lengths of its exchanges; and by the all-reduce of gradients between replicas, as a ring sends,
2 (R - 1) / R of a slice, whose length is from its events. Milliseconds of a step and of the optimizer's part of it,
medians.

The last one has no replicas: all ranks split the parameters, and `reshard_after_forward` keeps them gathered on the
ranks of a replica between forward and backward. Its gathers and reductions over all ranks cross from replica to
replica, as a ring sends: (W - 1) / W of a buffer from each replica, which is given by rank, like the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from demo_ranks import demo_model, demo_tokens, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard

REPLICAS = 2
OwnerOptimizer = fullshard.OwnerOptimizer
PEERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "AdamW, elementwise": lambda model: OwnerOptimizer(model.parameters(), torch.optim.AdamW, elementwise=True),
    "AdamW on `optimizer_view`": lambda model: torch.optim.AdamW(fullshard.optimizer_view(model)),
    "AdamW, elementwise, on `optimizer_view`": lambda model: OwnerOptimizer(
        fullshard.optimizer_view(model), torch.optim.AdamW, elementwise=True
    ),
    "AdamW on owners": lambda model: OwnerOptimizer(model.parameters(), torch.optim.AdamW),
    "Adafactor on owners": lambda model: OwnerOptimizer(model.parameters(), torch.optim.Adafactor),
    "AdamW, all ranks split": lambda model: torch.optim.AdamW(model.parameters()),
}


@contextmanager
def counted(mesh: DeviceMesh) -> Iterator[dict[str, int]]:
    """Bytes that this rank sends to others in all-to-alls, by axis."""
    sent = dict.fromkeys(mesh.mesh_dim_names or (), 0)
    exchange = dist.all_to_all_single

    def counting(out: Any, data: Any, out_splits: Any, splits: Any, **options: Any) -> Any:
        group = options["group"]
        name = next(name for name in sent if mesh.get_group(name) is group)
        sent[name] += (sum(splits) - splits[dist.get_rank(group)]) * data.element_size()
        return exchange(out, data, out_splits, splits, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        yield sent


def over_ranks(value: float) -> list[float]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank(rounds: int) -> None:
    """One rank; the first prints the tables."""
    shape = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    flat, everyone = init_device_mesh("cpu", (dist.get_world_size(),)), tuple(range(dist.get_world_size()))
    runs: dict[str, tuple[nn.Module, torch.optim.Optimizer, list[float], list[float]]] = {}
    for name, make in PEERS.items():
        model = demo_model()
        for module in (*model.blocks, model):
            if name.endswith("all ranks split"):
                fullshard.fully_shard(module, mesh=flat, reshard_after_forward=shape[1])
            else:
                fullshard.fully_shard(module, mesh=mesh)
        runs[name] = model, make(model), [], []
    tokens = demo_tokens()
    rows = {name: [f"{name:<40}"] for name in PEERS}
    for name, (model, optimizer, *_) in runs.items():
        for _ in range(2):  # the first step compares ranks
            with fullshard.record_events() as events:
                model(tokens, tokens).backward()
            with counted(mesh) as sent:
                optimizer.step()
            model.zero_grad()
        reduced = sum(event.nbytes for event in events if event.verb == "all_reduce") * 2 * (REPLICAS - 1) / REPLICAS
        crossed = sum(
            event.nbytes for event in events if event.verb in ("gather", "reduce") and event.ranks == everyone
        )
        reduced += crossed * (len(everyone) - 1) / len(everyone) / shape[1]
        state = over_ranks(fullshard.memory_use(model, optimizer).optimizer)
        optimizer.state_dict()
        shown = over_ranks(fullshard.memory_use(model, optimizer).optimizer)
        within, between = (sum(over_ranks(sent[axis])) / dist.get_world_size() for axis in ("shard", "replicate"))
        rows[name] += [f"{n / 1e6:.2f}" for n in (max(state), sum(state), max(shown), within, between, reduced)]
    for index in range(rounds + 2):
        for model, optimizer, steps, parts in runs.values():
            dist.barrier()
            began = time.perf_counter()
            model(tokens, tokens).backward()
            dist.barrier()
            computed = time.perf_counter()
            optimizer.step()
            dist.barrier()
            if index >= 2:
                steps.append(time.perf_counter() - began)
                parts.append(time.perf_counter() - computed)
            model.zero_grad()
    if dist.get_rank() == 0:
        print(
            "| optimizer | state of a rank, MB | of all | once saved | sent within, MB | between | in the passes ",
            end="",
        )
        print("| step, ms | optimizer, ms |\n|---|---|---|---|---|---|---|---|---|")
        for name, (_, _, steps, parts) in runs.items():
            print("|", " | ".join([*rows[name], f"{median(steps) * 1e3:.1f}", f"{median(parts) * 1e3:.1f}"]), "|")


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=30))
