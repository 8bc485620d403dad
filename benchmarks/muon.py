"""Steps of the demo's GPT with `fullshard.Muon` and `OwnerOptimizer` beside AdamW, and `torch.optim.Muon` on rows.

    python benchmarks/muon.py                 # two ranks over gloo on this machine, in turns
    python benchmarks/muon.py --ranks 1

Each trains the same model of two ranks; matrices of blocks are Muon's, everything else is AdamW's. Milliseconds of a
whole training step and of the optimizers' part of it, medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from model import GPT, VOCABULARY, GPTConfig

import fullshard

BATCH, CONTEXT = 4, 128  # of a rank, as in the demo with two
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
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {}
    for name, (layout, make) in PEERS.items():
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=6, width=128, heads=4, context=CONTEXT))
        for block in model.blocks:
            fullshard.fully_shard(block, layout=layout)
        fullshard.fully_shard(model, layout=layout)
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        ids = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in ids]
        runs[name] = model, (make(matrices), torch.optim.AdamW(others)), [], []
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
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
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rounds)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, __file__, "--rank", "--rounds", str(options.rounds)], env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
