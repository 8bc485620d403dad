"""Measures how fast this rank computes and sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from ...comm import Pending, TorchComm
from ...mesh import axes_of_groups
from .schedule import LARGE, Rates


def measure_rates(work: Callable[[], object], flops: int, *, device: str = "cpu", rounds: int = 5) -> Rates:
    """Measure the rates of this rank: of computation by running `work`, of communication on the default process group.

    Collective over the default group, if there is one of more than one rank; without it communication is a copy.
    Latency is the time of a gather of a few bytes; bandwidths are those of a gather and a reduction of 16 MiB, less
    latency; `large` compares these with 64 MiB in memory that is allocated for it, as units' buffers are; `overlap`
    compares gathers beside `work` with both apart.

    Args:
        work: a forward and backward of the kind that will be run (one block of the model), on `device`.
        flops: floating-point operations of `work`; `plan(...).best.flops` says how many.
        device: on which `work` runs.
        rounds: the median of this many runs counts, after one that does not; collectives run five times as often.

    Returns:
        The same on all ranks: the slowest rank's.
    """
    place = torch.device(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    slice_of_each = LARGE // 2 // (4 * world)  # float32 numbers
    whole, copy = (torch.zeros(slice_of_each * world, device=place) for _ in range(2))
    if world == 1:
        compute, copying = _seconds((work, lambda: whole.copy_(copy)), place, rounds)
        bandwidth = whole.nbytes / copying
        return Rates(flops=flops / compute, bandwidth=bandwidth, between=bandwidth, latency=1e-9, copy=2 * bandwidth)

    comm, axis = TorchComm(), axes_of_groups(dist.group.WORLD, False, place).shard
    large, shard = (torch.zeros(4 * slice_of_each * n, device=place) for n in (world, 1))

    def gather(out: torch.Tensor) -> Pending:
        return comm.gather(axis, out, shard[: out.numel() // world])

    def reduce(buffer: torch.Tensor) -> None:
        comm.reduce(axis, shard[: buffer.numel() // world], buffer, True).wait()

    def reduce_large() -> None:
        reduce(torch.empty_like(large).copy_(large))

    def beside() -> None:
        gathers = [gather(whole) for _ in range(count)]
        work()
        for pending in gathers:
            pending.wait()

    (compute,) = _seconds((work,), place, rounds)
    copying, latency, gathering, reducing, gathering_large, reducing_large = _seconds(
        (
            lambda: whole.copy_(copy),
            lambda: gather(whole[:world]).wait(),
            lambda: gather(whole).wait(),
            lambda: reduce(whole),
            lambda: gather(torch.empty_like(large)).wait(),
            reduce_large,
        ),
        place,
        5 * rounds,  # they take milliseconds, and vary
    )
    count = max(1, round(compute / 2 / gathering))  # they end before `work` does, if they run beside it
    (beside_work,) = _seconds((beside,), place, rounds)
    sent = 4 * slice_of_each * (world - 1)
    bandwidth = sent / max(gathering - latency, 1e-9)
    return Rates(
        flops=flops / compute,
        bandwidth=bandwidth,
        between=bandwidth,
        latency=latency,
        copy=2 * whole.nbytes / copying,
        reduce=sent / max(reducing - latency, 1e-9),
        overlap=min(1.0, max(0.0, (compute + count * gathering - beside_work) / (count * gathering))),
        large=min(1.0, 4 * (gathering + reducing) / max(gathering_large + reducing_large - 4 * copying, 1e-9)),
    )


def _seconds(calls: tuple[Callable[[], object], ...], device: torch.device, rounds: int) -> list[float]:
    """The median time of each call, on the slowest rank; all ranks begin together."""
    medians = []
    for call in calls:
        times = []
        for _ in range(rounds + 1):
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begin)
        medians.append(max(median(times[1:]), 1e-9))
    if dist.is_initialized():
        slowest = torch.tensor(medians, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians = slowest.tolist()
    return medians
