"""The home of a bucket's shard and reduced gradients when they do not live on the compute device.

Such a bucket has two devices: home, with `shard`, the sharded parameters and their gradients; and the device on which
it gathers, computes and reduces. All copies between them are made here: of a shard before its gather, and of a reduced
slice after its reduction. Page-locked memory is copied on separate streams (`comm/lanes.py`), in parallel with compute.
The host waits at the end of a pass or backward (`settle`), before anyone reads a gradient or writes a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from ..comm import Gathers, Lanes, OneStream, Turns, lanes_of
from ..policies import CPUOffloadPolicy, OffloadPolicy
from ..torch_private.local_tensor import plain_tensors

T = TypeVar("T")


class Home:
    """Memory for shards and gradients that is not on the compute device.

    Args:
        device: the device of the memory.
        compute: the compute device.
        pinned: whether the memory is page-locked; needs an accelerator.
    """

    def __init__(self, device: torch.device, compute: torch.device, pinned: bool = False) -> None:
        self.device, self.compute, self.pinned = device, compute, pinned

    @property
    def _lanes(self) -> Lanes | None:
        """The copy streams; looked up at each use, so that a home can be copied and pickled."""
        return lanes_of(self.compute) if self.pinned else None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate [numel], not initialised."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of this kind."""
        return tensor.device == self.device and (not self.pinned or tensor.is_pinned())

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory of this kind of a tensor of any class, as its own `to` makes it."""
        kept = tensor.to(self.device, copy=True)
        for plain in plain_tensors(kept) if self.pinned else ():
            stride = torch.empty_like(plain, device="meta").stride()  # same order, without gaps
            plain.data = self.empty(plain.numel(), plain.dtype).as_strided(plain.shape, stride).copy_(plain)
        return kept

    def begin(self, unit: str) -> None:
        """Called before a gather of this unit; may refuse it."""

    def to_device(self, tensors: Iterable[torch.Tensor], prepare: Callable[..., T]) -> T:
        """Return what `prepare` makes of copies of a shard's tensors, of any class, on the compute device.

        The result is only for `gathering`; the host may write to the tensors after `settle`.
        """
        if (lanes := self._lanes) is not None:
            return lanes.copy_in(tensors, prepare)
        return prepare(*[tensor.to(self.compute, copy=True) for tensor in tensors])

    def gathering(self, comm: Gathers) -> Gathers:
        """Return collectives that gather the copies made by `to_device`."""
        return comm if (lanes := self._lanes) is None else lanes.gathering(comm)

    def fetch(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a copy of `shard` on the compute device, made on the compute stream; the host waits for it."""
        return shard.to(self.compute, copy=True)

    def bring(
        self,
        target: torch.Tensor,
        reduced: torch.Tensor,
        turns: Turns | OneStream,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy `reduced` [shard_numel] into `target`, memory of this kind; complete after `settle`.

        Args:
            target: destination; the caller keeps it alive.
            reduced: source; kept alive until the copy is done.
            turns: the bucket's turns.
            then: called on the host when the copy is complete.
        """
        if (lanes := self._lanes) is not None:
            lanes.copy_out(target, reduced, turns, then)
            return
        target.copy_(reduced.to(target.dtype))
        if then is not None:
            then()

    def settle(self) -> None:
        """Wait until all copies are complete and no shard is being read."""
        if (lanes := self._lanes) is not None:
            lanes.settle()


def settle(homes: Iterable[Home | None]) -> None:
    """Run `Home.settle` on each home."""
    for home in homes:
        if home is not None:
            home.settle()


def home_of(policy: OffloadPolicy, device: torch.device) -> Home | None:
    """Return the home that `policy` requests for units on `device`; None if shards stay on the compute device."""
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        return Home(torch.device("cpu"), device, policy.pin_memory)
    return None
