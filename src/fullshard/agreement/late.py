"""Sums over ranks that the host of an accelerator reads some rounds later, when they have long arrived.

The host waits for no device, and all ranks read a sum in the same round, whatever it says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import Comm, begin_copy_to_host, host_buffer
from ..mesh import MeshAxes

_LATE = 2
"""Rounds after which sums are read."""


@dataclass
class _Round:
    """Owns three buffers [n] int64: this rank's numbers and the sums, both page-locked, and the sums on the device."""

    own: torch.Tensor
    sums: torch.Tensor
    result: torch.Tensor  # `sums`, once `arrived`
    arrived: torch.Event | None = None
    facts: Any = None


class LateSums:
    """See the module's docstring. One for a mesh and a question; `due`, then `send`, in every round.

    Ownership: the buffers of `_LATE` rounds, used again and again.

    Args:
        axes: over whose ranks is summed.
        comm: collectives.
    """

    def __init__(self, axes: MeshAxes, comm: Comm) -> None:
        self.axes, self.comm = axes, comm
        self._sent: deque[_Round] = deque()  # oldest first
        self._read: _Round | None = None  # whose buffers the next round may have

    def due(self) -> tuple[torch.Tensor, Any] | None:
        """The sums of the oldest round, on the host, and what was sent beside them; None while too few were sent."""
        if len(self._sent) < _LATE:
            return None
        oldest = self._read = self._sent.popleft()
        assert oldest.arrived is not None
        oldest.arrived.synchronize()
        return oldest.result, oldest.facts

    def send(self, values: torch.Tensor, facts: Any) -> torch.Tensor:
        """Sum this round's numbers. Collective over the mesh.

        Args:
            values: [n], of the host or the device.
            facts: what `due` gives back with the sums.

        Returns:
            [n] int64, the sums, on the device.
        """
        this, self._read = self._read, None
        if this is None or this.own.numel() != values.numel():
            numel = values.numel()
            sums = torch.empty(numel, dtype=torch.int64, device=self.axes.device)
            this = _Round(host_buffer(numel), sums, host_buffer(numel))
        if values.device.type == "cpu":
            this.own.copy_(values)
            values = this.own
        this.sums.copy_(values, non_blocking=True)
        sum_over(this.sums, self.axes, self.comm)
        this.arrived, this.facts = begin_copy_to_host(this.sums, this.result), facts
        self._sent.append(this)
        return this.sums


def sum_over(vector: torch.Tensor, axes: MeshAxes, comm: Comm) -> None:
    """Sum `vector` in place over all ranks of a mesh. Collective over it."""
    for axis in axes.all:
        if axis.size > 1:
            comm.all_reduce(axis, vector, False).wait()
