"""Measures how fast this rank computes and sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...torch_private.collectives import all_gather
from .schedule import Rates


def measure_rates(
    work: Callable[[], object], flops: int, *, device: str = "cpu", nbytes: int = 2**24, rounds: int = 5
) -> Rates:
    """Measure the rates of this rank: of computation by running `work`, of communication on the default process group.

    Collective over the default group, if there is one of more than one rank; without it bandwidth is that of a copy.
    Latency is the time of a gather of a few bytes; bandwidth comes from a gather of `nbytes`, less latency.

    Args:
        work: a forward and backward of the kind that will be run (one block of the model), on `device`.
        flops: floating-point operations of `work`; `plan(...).best.flops` says how many.
        device: on which `work` runs.
        nbytes: of the larger gather, all ranks' slices together.
        rounds: medians are of so many runs, after one that does not count.

    Returns:
        The same on all ranks: the slowest rank's.
    """
    place = torch.device(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    group: Any = dist.group.WORLD

    def gather(size: int) -> Callable[[], object]:
        shard = torch.zeros(max(size // world, 1), dtype=torch.uint8, device=place)
        out = torch.zeros(shard.numel() * world, dtype=torch.uint8, device=place)
        if world == 1:
            return lambda: out.copy_(shard)
        start = all_gather(out, shard, group)
        return lambda: start().wait()

    times = [_seconds(call, place, rounds) for call in (work, gather(world), gather(nbytes))]
    if world > 1:
        slowest = torch.tensor(times, dtype=torch.float64, device=place)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times = slowest.tolist()
    compute, latency, transfer = times
    sent = nbytes * (world - 1) // world if world > 1 else nbytes
    bandwidth = sent / max(transfer - latency, 1e-9)
    return Rates(flops=flops / compute, bandwidth=bandwidth, between=bandwidth, latency=latency)


def _seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return max(median(times[1:]), 1e-9)
