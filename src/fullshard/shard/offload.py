"""Where a bucket's shard and reduced gradients live when that is not where it computes.

A bucket knows two devices then: home, where `shard`, the sharded parameters and their gradients are; and the device it
gathers, computes and reduces on. What crosses between them crosses here: a shard before its gather, a reduced slice
after its reduction. Page-locked memory crosses on streams of its own (`comm/lanes.py`), beside what is computed. The
host waits at the end of a pass or backward (`settle`), before anybody reads a gradient or writes a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..comm import Gathers, Lanes, OneStream, Turns, lanes_of
from ..policies import CPUOffloadPolicy, OffloadPolicy


class Home:
    """Memory for shards and gradients apart from the compute device.

    Args:
        device: where it is.
        compute: the compute device.
        pinned: whether it is page-locked; needs an accelerator.

    Attributes:
        for_good: whether shards are here while the model trains, or for a while.
    """

    for_good = True

    def __init__(self, device: torch.device, compute: torch.device, pinned: bool = False) -> None:
        self.device, self.compute, self.pinned = device, compute, pinned

    @property
    def _lanes(self) -> Lanes | None:
        """Asked for at use, so that a home can be copied and pickled."""
        return lanes_of(self.compute) if self.pinned else None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], not initialised."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of this kind."""
        return tensor.device == self.device and (not self.pinned or tensor.is_pinned())

    def begin(self, unit: str) -> None:
        """A gather of this unit is about to begin."""

    def to_device(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `shard` [shard_numel] on the compute device in `dtype`, cast there; for `gathering` alone."""
        if (lanes := self._lanes) is not None:
            return lanes.copy_in(shard, dtype)
        return shard.to(self.compute, copy=True).to(dtype)

    def gathering(self, comm: Gathers) -> Gathers:
        """Gathers what `to_device` copies."""
        return comm if (lanes := self._lanes) is None else lanes.gathering(comm)

    def fetch(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `to_device`, on the compute stream, for whoever is there to wait for: the host waits, too."""
        return shard.to(self.compute, copy=True).to(dtype)

    def bring(
        self,
        target: torch.Tensor,
        reduced: torch.Tensor,
        turns: Turns | OneStream,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy `reduced` [shard_numel] into `target`, memory of this kind; complete after `settle`.

        Args:
            target: what it is copied into; the caller keeps it.
            reduced: held until nobody needs it.
            turns: the bucket's.
            then: what the host does with it when it is there.
        """
        if (lanes := self._lanes) is not None:
            lanes.copy_out(target, reduced, turns, then)
            return
        target.copy_(reduced.to(target.dtype))
        if then is not None:
            then()

    def settle(self) -> None:
        """Wait until everything that was brought is there, and no shard is read any more."""
        if (lanes := self._lanes) is not None:
            lanes.settle()


def settle(homes: Iterable[Home | None]) -> None:
    """See `Home.settle`."""
    for home in homes:
        if home is not None:
            home.settle()


def home_of(policy: OffloadPolicy, device: torch.device) -> Home | None:
    """The home that `policy` asks for where units compute on `device`; None if the two are one place."""
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        return Home(torch.device("cpu"), device, policy.pin_memory)
    return None
