"""What watching and comparing cost: processor time of a block's forward and backward, by `check=`.

On the fake group at world 64, as host_cost.py, where nothing is compared: "nothing" does not note what is issued
either. On two gloo ranks, where ranks do compare: steps of all kinds in turn, on the same machine at the same time.

    python benchmarks/checks.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

import torch
import torch.distributed as dist
from host_cost import BLOCKS, WARM_UP, WIDTH, WORLD
from peers import fake_world
from torch import Tensor, nn

import fullshard
from fullshard.agreement import Position
from fullshard.runtime import root
from models import tiny_stack

CHECKS = ("first", "step", "every")
NOTHING = "nothing"


class Silent(Position):
    """Notes nothing."""

    def begin(self, verb: int, index: int) -> None:
        """A pass begins."""

    def issue(self, verb: int, index: int) -> None:
        """Something is issued."""

    def end(self) -> None:
        """The pass is over."""


def sharded(check: str) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_stack(BLOCKS, WIDTH)
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model, check=check)


def step(model: nn.Module, x: Tensor, clock: object) -> float:
    """Microseconds of `clock` per block, forward and backward."""
    start = clock()  # type: ignore[operator]
    model(x).sum().backward()
    spent = clock() - start  # type: ignore[operator]
    model.zero_grad(set_to_none=True)
    return spent / BLOCKS * 1e6


def rounds(models: dict[str, nn.Module], count: int, clock: object) -> dict[str, list[float]]:
    """Samples of each, in turn."""
    x, samples = torch.randn(4, WIDTH), defaultdict(list)
    for number in range(count + WARM_UP):
        for name, model in models.items():
            with mock.patch.object(root, "Position", Silent) if name == NOTHING and not number else nullcontext():
                spent = step(model, x, clock)  # the first of which makes the root
            if number >= WARM_UP:
                samples[name].append(spent)
        if number == WARM_UP:
            gc.collect()
            gc.freeze()
    return samples


def rank_main(rank: int, folder: str, count: int, results: object) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    samples = rounds({check: sharded(check) for check in CHECKS}, count, time.perf_counter)
    dist.barrier()
    if rank == 0:
        results.put(dict(samples))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def show(title: str, samples: dict[str, list[float]], against: str) -> None:
    base = statistics.median(samples[against])
    print(f"\n{title}\n\n| | median, us | over {against} |\n|---|---|---|")
    for name, found in samples.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.1f} | {(median / base - 1) * 100:+.1f}% |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind")
    count = parser.parse_args().rounds
    context = get_context("spawn")
    results = context.Queue()
    folder = mkdtemp(prefix=Path(__file__).stem)
    ranks = [context.Process(target=rank_main, args=(rank, folder, count, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    compared = results.get(timeout=100)
    for rank in ranks:
        rank.join()
    torch.set_num_threads(1)
    fake_world(WORLD)
    noted = rounds({NOTHING: sharded("first"), "first": sharded("first")}, 5 * count, time.process_time)
    show(f"{BLOCKS} blocks, world {WORLD} (fake group): processor time per block and step", noted, NOTHING)
    show(f"{BLOCKS} blocks, 2 gloo ranks: time per block and step", compared, "first")


if __name__ == "__main__":
    main()
