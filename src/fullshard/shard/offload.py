"""Where a bucket's shard and reduced gradients live when that is not where it computes.

A bucket knows two devices then: home, where `shard`, the sharded parameters and their gradients are; and the device it
gathers, computes and reduces on. What crosses between them crosses here, on the compute stream: a shard before its
gather, a reduced slice after its reduction. With page-locked memory the host does not wait for either; it waits once,
at the end of backward (`settle`), before anybody reads a gradient, and by then every earlier copy of a shard is done.
"""

from __future__ import annotations

import torch

from ..policies import CPUOffloadPolicy, OffloadPolicy


class Home:
    """Memory for shards and gradients apart from the compute device.

    Args:
        device: where it is.
        compute: the compute device.
        pinned: whether it is page-locked; needs an accelerator.
    """

    def __init__(self, device: torch.device, compute: torch.device, pinned: bool = False) -> None:
        self.device, self.compute, self.pinned = device, compute, pinned
        self._in_flight = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], not initialised."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of this kind."""
        return tensor.device == self.device and (not self.pinned or tensor.is_pinned())

    def to_device(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `shard` [shard_numel] on the compute device in `dtype`; cast there, which holds up no host."""
        return shard.to(self.compute, non_blocking=self.pinned, copy=True).to(dtype)

    def bring(self, target: torch.Tensor, reduced: torch.Tensor) -> None:
        """Copy `reduced` [shard_numel] into `target`, memory of this kind; complete after `settle`."""
        if target.dtype != reduced.dtype:
            reduced = reduced.to(target.dtype)
        target.copy_(reduced, non_blocking=self.pinned)
        self._in_flight = self.pinned

    def settle(self) -> None:
        """Wait until everything that was brought is there."""
        if self._in_flight:
            torch.accelerator.current_stream(self.compute).synchronize()
            self._in_flight = False


def home_of(policy: OffloadPolicy, device: torch.device) -> Home | None:
    """The home that `policy` asks for where units compute on `device`; None if the two are one place."""
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        return Home(torch.device("cpu"), device, policy.pin_memory)
    return None
