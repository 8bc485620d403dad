"""AdamW's state in memory and in a memory-mapped file: what a process holds, and what a step takes.

    python benchmarks/state_on_disk.py --folder /tmp     # a process each, one after the other

A stack of linear layers on one rank, fused AdamW that steps in the backward. Memory of the process by kind, from
`/proc/self/status`: RssAnon cannot leave memory without swap; RssFile are pages of the file, which the system writes
and drops when memory is needed. Median seconds of a step after the first two, with all pages in memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import fullshard


def resident(kind: str) -> float:
    """MiB of this process in memory, of that kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


def measure(folder: str | None, layers: int, width: int, steps: int) -> str:
    """The figures of one process; `folder` None: state in memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])
    for layer in model:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fullshard.step_in_backward(optimizer)
    nbytes = 0 if folder is None else fullshard.optimizer_state_on_disk(optimizer, folder).nbytes
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    kinds = " | ".join(f"{resident(kind):.0f}" for kind in ("RssAnon", "RssFile"))
    return f"{kinds} | {nbytes / 2**20:.0f} | {median(seconds[2:]):.3f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.layers, options.width, options.steps
    if options.one is not None:
        print(measure(options.folder if options.one == "disk" else None, *sizes))
        return 0
    print(f"{options.layers * options.width * (options.width + 1) / 1e6:.1f} million parameters\n")
    print("| state | RssAnon, MiB | RssFile, MiB | file, MiB | step, s |\n|---|---|---|---|---|")
    for one in ("memory", "disk"):
        names = [f"--{name}={value}" for name, value in vars(options).items() if name != "one"]
        command = [sys.executable, __file__, f"--one={one}", *names]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {one} | {ran.stdout.strip().splitlines()[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
