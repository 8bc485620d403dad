"""Where a bucket's shard and reduced gradients live when that is not where it computes.

A bucket knows two devices then: home, where `shard`, the sharded parameters and their gradients are; and the device it
gathers, computes and reduces on. What crosses between them crosses here, and every crossing is a blocking copy: whoever
reads `.grad`, or writes a shard, never meets a copy in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..offload import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True)
class Home:
    """Memory for shards and gradients apart from the compute device.

    Attributes:
        device: where it is.
        pinned: whether it is page-locked; needs an accelerator.
    """

    device: torch.device
    pinned: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], not initialised."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def to_device(self, shard: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `shard` [shard_numel] on `device` in `dtype`, cast there: a cast here would hold up the host."""
        return shard.to(device, copy=True).to(dtype)

    def to_home(self, reduced: torch.Tensor) -> torch.Tensor:
        """A copy of `reduced` [shard_numel] at home, of the same dtype."""
        return self.empty(reduced.numel(), reduced.dtype).copy_(reduced)


def home_of(policy: OffloadPolicy, device: torch.device) -> Home | None:
    """The home that `policy` asks for where units compute on `device`; None if the two are one place."""
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        return Home(torch.device("cpu"), policy.pin_memory)
    return None
