"""Collectives of one process that take their time: on one queue, by their bytes, for Fullshard and FSDP2 alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard.comm import Costs


class Link:
    """The queue of collectives: each takes its bytes over the bandwidth, beside what it computes.

    On a GPU it is a stream, which a kernel keeps busy for that time. On a CPU everything is done at once.

    Attributes:
        gigabytes: per second; infinite: no time beyond that of the copies.
        collectives, kernels: how many were begun, and kernels that they ran.
    """

    def __init__(self, device: torch.device, gigabytes: float) -> None:
        self.gigabytes, self.stream, self.cycles = gigabytes, None, 0.0
        self.collectives = self.kernels = 0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for event in (start, stop):  # the first time warms up
                torch.cuda._sleep(10_000_000)
                event.record()
            torch.cuda.synchronize()
            self.cycles = 1e10 / start.elapsed_time(stop)  # a second

    def run(self, nbytes: int, act: Callable[[], object], kernels: int, *buffers: Tensor) -> Sent:
        """Begin a collective, of which `act` runs as many kernels; what waits for it."""
        cycles = int(self.cycles * nbytes / 1e9 / self.gigabytes)
        self.collectives, self.kernels = self.collectives + 1, self.kernels + kernels + bool(cycles)
        if self.stream is None:
            act()
            return Sent(None, ())
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            act()
            if cycles:
                torch.cuda._sleep(cycles)
            return Sent(self.stream.record_event(), buffers)

    def gather(self, out: Tensor, shard: Tensor) -> Sent:
        # FSDP2's shard lies in `out`.
        return self.run(out.nbytes, lambda: out.view(-1, shard.numel()).copy_(shard.clone()), 2, out, shard)

    def reduce(self, out: Tensor, buffer: Tensor, mean: bool) -> Sent:
        world = buffer.numel() // out.numel()

        def act() -> None:
            torch.mul(buffer.view(world, -1)[0], 1 if mean else world, out=out)

        return self.run(buffer.nbytes, act, 1, out, buffer)

    def all_reduce(self, tensor: Tensor, factor: int) -> Sent:
        return self.run(2 * tensor.nbytes, lambda: tensor.mul_(factor), 1, tensor)


@dataclass
class Sent:
    """A collective in flight; holds its buffers until the wait."""

    event: torch.cuda.Event | None  # None: it is over
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.buffers = ()


class Alike(fullshard.TorchComm):
    """Fullshard's collectives by a link, as if all ranks held what this one does.

    Args:
        apart: whether each parameter gets a collective of its own.
        at_once: whether all-reduces are waited for where they are issued.
    """

    def __init__(self, link: Link, apart: bool, at_once: bool) -> None:
        super().__init__()
        self.link, self.apart, self.at_once = link, apart, at_once

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Sent:
        return self.link.gather(out, shard)

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Sent:
        return self.link.reduce(out, buffer, mean)

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Sent:
        sent = self.link.all_reduce(tensor, 1 if mean else axis.size)
        if self.at_once:
            sent.wait()
        return sent

    def costs(self, axis: Any) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1.0) if self.apart else super().costs(axis)


class TorchGather:
    """FSDP2's, by a link."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def begin(self, sent: Any, async_op: bool) -> Any:
        if async_op:
            return sent
        sent.wait()
        return None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self.begin(self.link.gather(output_tensor, input_tensor), async_op)


class TorchReduce(TorchGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self.begin(self.link.reduce(output_tensor, input_tensor, op != dist.ReduceOp.SUM), async_op)
