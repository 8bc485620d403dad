"""What watching and comparing cost: time of a block's forward and backward, by `check=`.

On the fake group at world 64, as host_cost.py, where nothing is compared: "nothing" does not note what is issued
either. On two gloo ranks, where ranks do compare. One model takes all kinds of steps, in random order: two models of
the same kind lie elsewhere in memory and differ by more than what is measured. Each kind is there twice: what the two
differ by is what the figures are good for.

    python benchmarks/checks.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from host_cost import BLOCKS, WARM_UP, WIDTH, WORLD
from peers import fake_world
from torch import Tensor, nn

import fullshard
from fullshard.agreement import Position
from fullshard.runtime import runner_of
from models import tiny_stack

NOTHING = "nothing"
_NOTED = {name: getattr(Position, name) for name in ("begin", "issue", "end")}


def turn_to(kind: str, position: Position) -> None:
    """Let the steps to come be of this kind."""
    for name, method in _NOTED.items():
        setattr(Position, name, (lambda *args: None) if kind == NOTHING else method)
    if kind != NOTHING:
        position.check = kind  # type: ignore[assignment]


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = tiny_stack(BLOCKS, WIDTH)
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def step(model: nn.Module, x: Tensor, clock: Callable[[], float]) -> float:
    """Microseconds of `clock` per block, forward and backward."""
    start = clock()
    model(x).sum().backward()
    spent = clock() - start
    model.zero_grad(set_to_none=True)
    return spent / BLOCKS * 1e6


def rounds(kinds: tuple[str, ...], count: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Samples of each kind, and of each again; in the same order on all ranks."""
    model, x, samples = sharded(), torch.randn(4, WIDTH), defaultdict(list)
    for _ in range(WARM_UP):
        step(model, x, clock)
    position, order = runner_of(model).root.position, random.Random(0)
    gc.collect()
    gc.freeze()
    both = [(kind, suffix) for kind in kinds for suffix in ("", ", again")]
    for _ in range(count):
        for kind, suffix in order.sample(both, len(both)):
            turn_to(kind, position)
            step(model, x, clock)  # the interpreter gets used to it
            samples[kind + suffix].append(step(model, x, clock))
    turn_to("first", position)
    return {name: samples[name] for name in (kind + suffix for kind, suffix in both)}


def share_of_comparing(kind: str, count: int) -> float:
    """Of the time of steps of this kind, the part that is spent in comparisons, waits for the other rank included.

    Steadier than what whole steps differ by, and no less: the rank that comes first waits here, or at what comes next.
    """
    model, x, compare, inside = sharded(), torch.randn(4, WIDTH), Position._compare, [0.0]
    for _ in range(WARM_UP):
        step(model, x, time.perf_counter)
    turn_to(kind, runner_of(model).root.position)

    def timed(*args: object) -> None:
        start = time.perf_counter()
        compare(*args)  # type: ignore[arg-type]
        inside[0] += time.perf_counter() - start

    Position._compare = timed  # type: ignore[method-assign]
    whole = sum(step(model, x, time.perf_counter) for _ in range(count)) * BLOCKS / 1e6
    Position._compare = compare  # type: ignore[method-assign]
    turn_to("first", runner_of(model).root.position)
    return inside[0] / whole


def rank_main(rank: int, folder: str, count: int, results: object) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    samples = rounds(("first", "step", "every"), count, time.perf_counter)
    shares = {kind: share_of_comparing(kind, 2 * count) for kind in ("step", "every")}
    dist.barrier()
    if rank == 0:
        results.put((dict(samples), shares))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def show(title: str, samples: dict[str, list[float]], against: str) -> None:
    """Of each kind the median, and the median of its ratios to both samples of `against` in the same round.

    Rounds are short, so that whatever else slows the machine slows all of a round. The error is the standard one of a
    median of as many ratios, 1.25 times that of their mean.
    """
    base = [(a + b) / 2 for a, b in zip(samples[against], samples[f"{against}, again"], strict=True)]
    print(f"\n{title}\n\n| | median, us | over {against} |\n|---|---|---|")
    for name, found in samples.items():
        ratios = [one / by for one, by in zip(found, base, strict=True)]
        error = 1.25 * statistics.stdev(sorted(ratios)[len(ratios) // 20 : -len(ratios) // 20]) / len(ratios) ** 0.5
        over = (statistics.median(ratios) - 1) * 100
        print(f"| {name} | {statistics.median(found):.1f} | {over:+.1f}% +- {100 * error:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steps of each kind")
    count = parser.parse_args().rounds
    context = get_context("spawn")
    results = context.Queue()
    folder = mkdtemp(prefix=Path(__file__).stem)
    ranks = [context.Process(target=rank_main, args=(rank, folder, max(count // 10, 5), results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    compared, shares = results.get(timeout=600)
    for rank in ranks:
        rank.join()
    torch.set_num_threads(1)
    fake_world(WORLD)
    noted = rounds((NOTHING, "first"), count, time.process_time)
    show(f"{BLOCKS} blocks, world {WORLD} (fake group): processor time per block and step", noted, NOTHING)
    show(f"{BLOCKS} blocks, 2 gloo ranks: time per block and step", compared, "first")
    print("\nOf a step, in comparisons: " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))


if __name__ == "__main__":
    main()
