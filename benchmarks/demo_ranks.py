"""What benchmarks on the demo's GPT share: its model and tokens, and starting ranks over gloo on this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from model import GPT, VOCABULARY, GPTConfig

BATCH, CONTEXT = 4, 128  # of a rank, as in the demo with two


def demo_model() -> GPT:
    """The same weights each time."""
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=6, width=128, heads=4, context=CONTEXT))


def demo_tokens() -> torch.Tensor:
    """`[BATCH, CONTEXT]`, random."""
    return torch.randint(0, VOCABULARY, (BATCH, CONTEXT))


def on_ranks(file: str, description: str | None, rank: Callable[[int], None], rounds: int) -> int:
    """A benchmark's `main`: run `rank(rounds)` in as many processes as its options say, with one thread each."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank(options.rounds)
        dist.destroy_process_group()
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, file, "--rank", "--rounds", str(options.rounds)], env=environment, check=False
    ).returncode
