"""Steps of the demo's GPT with `fullshard.Muon` and `OwnerOptimizer` beside AdamW, and `torch.optim.Muon` on rows.

    python benchmarks/muon.py                 # two ranks over gloo on this machine, in turns
    python benchmarks/muon.py --ranks 1

Each trains the same model of two ranks; matrices of blocks are Muon's, everything else is AdamW's. Milliseconds of a
whole training step and of the optimizers' part of it, medians.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from demo_ranks import demo_model, demo_tokens, on_ranks
from torch import nn

import fullshard

PEERS: dict[str, tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "AdamW, rows": ("rows", torch.optim.AdamW),
    "Muon, rows": ("rows", fullshard.Muon),
    "Muon, flat": ("flat", fullshard.Muon),
    "torch.optim.Muon, rows": ("rows", torch.optim.Muon),
    "torch.optim.Muon on owners": ("rows", partial(fullshard.OwnerOptimizer, optimizer_class=torch.optim.Muon)),
    "AdamW on owners": ("rows", partial(fullshard.OwnerOptimizer, optimizer_class=torch.optim.AdamW)),
    "Adafactor on owners": ("rows", partial(fullshard.OwnerOptimizer, optimizer_class=torch.optim.Adafactor)),
}


def rank(rounds: int) -> None:
    """One rank; the first prints the table."""
    runs = {}
    for name, (layout, make) in PEERS.items():
        model = demo_model()
        for block in model.blocks:
            fullshard.fully_shard(block, layout=layout)
        fullshard.fully_shard(model, layout=layout)
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        ids = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in ids]
        runs[name] = model, (make(matrices), torch.optim.AdamW(others)), [], []
    tokens = demo_tokens()
    for index in range(rounds + 2):
        for model, optimizers, steps, parts in runs.values():
            dist.barrier()
            began = time.perf_counter()
            model(tokens, tokens).backward()
            computed = time.perf_counter()
            for optimizer in optimizers:
                optimizer.step()
            dist.barrier()
            if index >= 2:
                steps.append(time.perf_counter() - began)
                parts.append(time.perf_counter() - computed)
            model.zero_grad()
    if dist.get_rank() == 0:
        first = median(runs["AdamW, rows"][2])
        print("| optimizer of the matrices | step, ms | of AdamW's | optimizers, ms |\n|---|---|---|---|")
        for name, (_, _, steps, parts) in runs.items():
            step = median(steps)
            print(f"| {name} | {step * 1e3:.1f} | {step / first:.2f} | {median(parts) * 1e3:.1f} |")


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=40))
