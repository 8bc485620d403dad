"""Throughput: a full training step of 12 transformer blocks of width 512, fp32, on two gloo ranks.

Every peer lives in the same two processes and trains its own copy from the same start; single steps are
interleaved, so that whatever else the machine does falls on all alike. Losses must agree with DDP's to five
decimals.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import TORCH_PEERS, VIEW, WRAPPERS, adamw, choose, interleaved, quiet, wrap
from report import FSDP1, Quantity, Series, Target, hand_back, parse_arguments
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from models import TransformerBlock, transformer_stack

BLOCKS, WIDTH, WORLD, BATCH, TIME = 12, 512, 2, 4, 64
PEERS = ("ddp", *TORCH_PEERS, "rows", "rows" + VIEW, "flat" + VIEW, "blocks" + VIEW, *WRAPPERS)
WARM_UP = 2  # steps
BUDGET = 135.0  # seconds, warm-up included: a busy machine gives fewer rounds, never fewer than LEAST
LEAST, MOST = 3, 12  # rounds
METHOD = (
    f"{BLOCKS} blocks of width {WIDTH} ({BLOCKS * 12 * WIDTH**2 / 1e6:.0f}M parameters), fp32, "
    f"{BATCH}x{TIME} tokens per rank, {WORLD} gloo ranks of one thread: forward + backward + fused AdamW + "
    "zero_grad; wall time of the slower rank, single steps shuffled among peers in the same processes"
)


def trainer(peer: str, rank: int, blocks: int) -> Callable[[], float]:
    """A function that trains `peer` for one step and returns its loss on this rank's fixed batch."""
    torch.manual_seed(0)
    model = wrap(peer, transformer_stack(blocks, WIDTH), TransformerBlock, init_device_mesh("cpu", (WORLD,)))
    optimizer = adamw(peer, model)
    random = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(BATCH, TIME, WIDTH, generator=random)
    goal = torch.randn(BATCH, TIME, WIDTH, generator=random)

    def step() -> float:
        loss = torch.nn.functional.mse_loss(model(x), goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def rounds(names: list[str], most: int, start: float) -> Iterator[str]:
    """Shuffled rounds of `names`, until rank 0 has used up the budget since `start`; the same on all ranks."""
    going = torch.ones(1)
    order = interleaved(names, most)
    for count in range(most):
        if count >= LEAST:
            going.fill_(time.perf_counter() - start < BUDGET)
            dist.broadcast(going, 0)
        if not going.item():
            return
        yield from itertools.islice(order, len(names))


def rank_main(rank: int, folder: str, names: list[str], most: int, blocks: int) -> None:
    """One rank: build every peer, warm up, interleave; rank 0 writes wall and CPU seconds and losses to `folder`."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    with quiet():
        steps = {name: trainer(name, rank, blocks) for name in names}
        losses = {name: [step() for _ in range(WARM_UP)] for name, step in steps.items()}
        gc.collect()
        gc.freeze()
        spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name in rounds(names, most, begun):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            losses[name].append(steps[name]())
            spent[name].append((time.perf_counter() - wall, time.process_time() - processor))
    everyone: list[dict[str, list[tuple[float, float]]]] = [{} for _ in range(WORLD)]
    dist.all_gather_object(everyone, dict(spent))
    if rank == 0:
        result: dict[str, Any] = {
            "wall": combine(everyone, names, 0, max),
            "processor": combine(everyone, names, 1, sum),
        }
        result["losses"] = losses
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def combine(
    everyone: list[dict[str, list[tuple[float, float]]]],
    names: list[str],
    column: int,
    over_ranks: Callable[[list[float]], float],
) -> dict[str, list[float]]:
    """Peer -> one figure per step: `over_ranks` of that step's `column` (0 wall, 1 CPU) on every rank."""
    return {
        name: [
            over_ranks([of_rank[column] for of_rank in step]) for step in zip(*(r[name] for r in everyone), strict=True)
        ]
        for name in names
    }


def measure(quick: bool) -> list[Quantity]:
    """Three quantities: seconds per step, processor seconds per step, and how far the losses are from DDP's."""
    names, _ = choose(PEERS)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (folder, names, *((2, 2) if quick else (MOST, BLOCKS))), nprocs=WORLD)
        result = json.loads(Path(folder, "result.json").read_text())

    def series(key: str) -> tuple[Series, ...]:
        return tuple(Series(name, tuple(result[key][name])) for name in names)

    targets = (
        Target("flat" + VIEW, "fsdp2", 1.35),
        Target("flat" + VIEW, FSDP1, 1.15),
        Target("rows", "fsdp2", 1.25),
        Target("rows" + VIEW, "fsdp2", 1.25),
        *(Target(name, "flat" + VIEW, 0.95) for name in WRAPPERS),
        *(Target(name, "ddp", 0.89) for name in ("flat" + VIEW, "rows", "rows" + VIEW)),  # at most 1.12 of its time
    )
    also = "the same steps; CPU time, kernel's included, of both ranks together: steadier on a busy machine"
    return [
        Quantity("throughput", "training step", "s", METHOD, series("wall"), targets=targets, speed=True),
        Quantity("throughput", "training step, CPU", "CPU s", also, series("processor"), speed=True),
        loss_deviation(result["losses"]),
    ]


def loss_deviation(losses: dict[str, list[float]]) -> Quantity:
    """Largest distance of each peer's losses from DDP's: a fast step with other losses is no result."""
    away = {
        name: [abs(mine - ddp) for mine, ddp in zip(series, losses["ddp"], strict=True)]
        for name, series in losses.items()
    }
    series = tuple(  # NaN is below nothing, and above nothing either: asked of every step, not of the largest
        Series(name, (max(steps),), differs=not all(distance < 1e-5 for distance in steps))
        for name, steps in away.items()
    )
    first, last = losses["ddp"][0], losses["ddp"][-1]
    steps = len(losses["ddp"])
    method = f"largest distance from DDP's loss, rank 0, over all {steps} steps ({first:.3f} to {last:.3f})"
    return Quantity("throughput", "loss, distance from DDP's", "absolute", method, series, against=())


def main() -> None:
    arguments = parse_arguments(__doc__)
    hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
