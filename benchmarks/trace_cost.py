"""What `fullshard.trace` costs: steps in and outside of its block, in turns, on two gloo ranks of one process each.

    python benchmarks/trace_cost.py [--rounds N] [--out FILE.md]

A round is one step traced and two steps not, in random order, after a barrier. The second of the two not traced says
what the machine's noise is. Entering and leaving the block is timed apart.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import fake_world
from report import hardware

from fullshard import fully_shard, record_events, trace
from models import tiny_stack, transformer_stack

BLOCKS, WIDTH, BATCH, TIME = 12, 512, 2, 64
EVENTS = 12 * BLOCKS + 8  # of a step: twelve of a block (gathered twice, reduced once), eight of the root


def rank_main(rank: int, rounds: int, folder: str) -> None:
    """Time steps on one rank; rank 0 writes its seconds, by kind."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = transformer_stack(BLOCKS, WIDTH)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(BATCH, TIME, WIDTH)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    for _ in range(4):
        step()
    seconds: dict[str, list[float]] = {"off": [], "off again": [], "on": [], "ends of the block": []}
    order = random.Random(0)
    for _ in range(rounds):
        for kind in order.sample(["off", "off again", "on"], 3):
            dist.barrier()
            if kind != "on":
                seconds[kind].append(step())
                continue
            start = time.perf_counter()
            with trace(folder):
                seconds[kind].append(step())
            seconds["ends of the block"].append(time.perf_counter() - start - seconds[kind][-1])
    if rank == 0:
        torch.save(seconds, f"{folder}/seconds")
    dist.destroy_process_group()


def table(seconds: dict[str, list[float]], rounds: int) -> str:
    """The figures as Markdown."""
    lines = ["| step | median ms | quartiles ms | of `off`, median of rounds | quartiles |", "|---|---|---|---|---|"]
    for kind in ("off", "off again", "on"):
        own = [1e3 * second for second in seconds[kind]]
        ratios = [one / off for one, off in zip(seconds[kind], seconds["off"], strict=True)]
        low, _, high = quantiles(own)
        first, _, third = quantiles(ratios)
        shares = f"{median(ratios):.4f} | {first:.3f} to {third:.3f}" if kind != "off" else "1 | "
        lines.append(f"| {kind} | {median(own):.1f} | {low:.1f} to {high:.1f} | {shares} |")
    ends = f"Both ends of the block together (clocks, the file): {1e3 * median(seconds['ends of the block']):.1f} ms."
    cost = event_cost()
    share = f"{100 * EVENTS * cost / median(seconds['off']):.3f}% of a step"
    event = f"An event takes {1e6 * cost:.1f} us, the {EVENTS} of a step together {share}."
    return "\n".join([*lines, "", f"{ends} {event} {rounds} rounds."])


def event_cost() -> float:
    """Seconds of processor time that an event takes, the engine's work for it included: of steps with and without.

    On the fake group, whose collectives take no time; the least of each kind of step.
    """
    fake_world(2)
    model = tiny_stack(64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(4, 16)
    least, count = {False: float("inf"), True: float("inf")}, 0
    for number in range(400):
        with record_events() if number % 2 else nullcontext([]) as events:
            start = time.process_time()
            model(x).sum().backward()
            spent = time.process_time() - start
            model.zero_grad()
        least[bool(number % 2)] = min(least[bool(number % 2)], spent)
        count = max(count, len(events))
    return (least[True] - least[False]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(options.rounds, folder), nprocs=2)
        text = table(torch.load(f"{folder}/seconds"), options.rounds)
    parameters = sum(p.numel() for p in transformer_stack(BLOCKS, WIDTH).parameters()) / 1e6
    print(f"{parameters:.1f}M parameters, {BLOCKS} blocks; {hardware()}\n\n{text}")
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
