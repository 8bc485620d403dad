"""AdamW's steps in host memory beside the backward, with a budget of processor threads, beside PyTorch's fused AdamW.

    python benchmarks/step_beside_backward.py     # a GPT with few tokens on one rank on this machine, in turns

One rank whose parameters are in host memory, as offloaded ones are; forward and backward run on a single thread. AdamW
is torch's default (a kernel per operation) or fused. Medians with the 10th and 90th percentile.
"""

from __future__ import annotations

import sys
import time
from statistics import median, quantiles
from typing import Any

import torch
from demo_ranks import GPT, GPTConfig, on_ranks

import fullshard

CONTEXT, BATCH = 64, 2

WAYS: dict[str, dict[str, Any] | None] = {
    "after the backward": None,
    "in backward": {},
    "beside it, 1 thread": {"threads": 1},
    "beside it, 2 threads": {"threads": 2},
}


def rank(rounds: int) -> None:
    runs: dict[tuple[bool, str], Any] = {}
    for fused in (False, True):
        for way, settings in WAYS.items():
            torch.manual_seed(0)
            model = GPT(GPTConfig(layers=6, width=384, heads=6, context=CONTEXT))
            for block in model.blocks:
                fullshard.fully_shard(block)
            fullshard.fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            if settings is not None:
                fullshard.step_in_backward(optimizer, **settings)
            runs[fused, way] = model, optimizer, [], []
    tokens = torch.randint(0, 256, (BATCH, CONTEXT))
    for index in range(rounds + 2):
        for model, optimizer, steps, times in runs.values():
            began = time.perf_counter()
            model(tokens, tokens).backward()
            after = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            optimizer.zero_grad()
            if index >= 2:
                steps.append(ended - after)
                times.append(ended - began)
    (model, *_), first = next(iter(runs.values())), median(next(iter(runs.values()))[3])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {BATCH * CONTEXT} tokens\n")
    print("| AdamW | steps | whole step, ms | 10th to 90th | of the first | optimizer.step(), ms |")
    print("|---|---|---|---|---|---|")
    for (fused, way), (_, _, steps, times) in runs.items():
        tenths = quantiles(times, n=10)
        spread = f"{tenths[0] * 1e3:.0f} to {tenths[-1] * 1e3:.0f}"
        name = "fused" if fused else "default"
        print(
            f"| {name} | {way} | {median(times) * 1e3:.1f} | {spread} | {median(times) / first:.2f} "
            f"| {median(steps) * 1e3:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=20))
