"""AdamW's steps in host memory, after and beside the backward, by PyTorch's and DeepSpeed's kernels.

    python benchmarks/step_beside_backward.py     # a GPT with few tokens on one rank on this machine, in turns

One rank whose parameters are in host memory, as offloaded ones are; forward and backward run on a single thread. AdamW
is torch's default (a kernel per operation), torch's fused, or `DeepSpeedCPUAdam` where deepspeed is installed (it
compiles its kernel at first: g++ and ninja). Steps after the backward run on one thread and on two; DeepSpeed's kernel
takes as many as OMP_NUM_THREADS says, here one. Medians with the 10th and 90th percentile.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any

import torch
from demo_ranks import GPT, GPTConfig, on_ranks

import fullshard

CONTEXT, BATCH = 64, 2

WAYS: dict[str, dict[str, Any] | None] = {
    "after the backward, 1 thread": None,
    "after the backward, 2 threads": None,
    "in backward": {},
    "beside it, 1 thread": {"threads": 1},
    "beside it, 2 threads": {"threads": 2},
}


def optimizers() -> dict[str, tuple[Callable[..., torch.optim.Optimizer], bool, list[str]]]:
    """By name: how it is made, whether of `optimizer_view`, and the ways in which it steps."""
    peers: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool, list[str]]] = {
        "torch, default": (torch.optim.AdamW, False, [*WAYS]),
        "torch, fused": (partial(torch.optim.AdamW, fused=True), False, [*WAYS]),
        "torch, fused, view": (partial(torch.optim.AdamW, fused=True), True, [*WAYS][:2]),
    }
    if find_spec("deepspeed") is not None:
        kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        peers["DeepSpeedCPUAdam, view"] = kind, True, [*WAYS][:1]
    return peers


def rank(rounds: int) -> None:
    runs: dict[tuple[str, str], Any] = {}
    for name, (make, views, ways) in optimizers().items():
        for way in ways:
            torch.manual_seed(0)
            model = GPT(GPTConfig(layers=6, width=384, heads=6, context=CONTEXT))
            for block in model.blocks:
                fullshard.fully_shard(block)
            fullshard.fully_shard(model)
            optimizer = make(fullshard.optimizer_view(model) if views else model.parameters())
            if (settings := WAYS[way]) is not None:
                fullshard.step_in_backward(optimizer, **settings)
            runs[name, way] = model, optimizer, [], []
    tokens = torch.randint(0, 256, (BATCH, CONTEXT))
    for index in range(rounds + 2):
        for (_, way), (model, optimizer, steps, times) in runs.items():
            began = time.perf_counter()
            model(tokens, tokens).backward()
            after = time.perf_counter()
            torch.set_num_threads(2 if way.endswith("backward, 2 threads") else 1)
            optimizer.step()
            torch.set_num_threads(1)
            ended = time.perf_counter()
            optimizer.zero_grad()
            if index >= 2:
                steps.append(ended - after)
                times.append(ended - began)
    (model, *_), first = next(iter(runs.values())), median(next(iter(runs.values()))[3])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {BATCH * CONTEXT} tokens\n")
    print("| AdamW | steps | whole step, ms | 10th to 90th | of the first | optimizer.step(), ms |")
    print("|---|---|---|---|---|---|")
    for (name, way), (_, _, steps, times) in runs.items():
        tenths = quantiles(times, n=10)
        spread = f"{tenths[0] * 1e3:.0f} to {tenths[-1] * 1e3:.0f}"
        print(
            f"| {name} | {way} | {median(times) * 1e3:.1f} | {spread} | {median(times) / first:.2f} "
            f"| {median(steps) * 1e3:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=20))
