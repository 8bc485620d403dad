"""Sums over ranks that the host of an accelerator reads a few rounds later, when they have long arrived.

So the host never waits for the device, and all ranks read a sum in the same round, whatever its value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import Comm, begin_copy_to_host, host_buffer
from ..mesh import MeshAxes

_LATE = 2
"""Rounds between sending a sum and reading it."""


@dataclass
class _Round:
    """Owns three buffers [n] int64: this rank's numbers and the sums, both page-locked, and the sums on the device."""

    numbers: torch.Tensor
    sums: torch.Tensor
    result: torch.Tensor  # `sums`, once `arrived`
    arrived: torch.Event | None = None
    facts: Any = None


class LateSums:
    """See the module's docstring. One per mesh and purpose; every round calls `due`, then `send`.

    Ownership: the buffers of `_LATE` rounds, which are reused.

    Args:
        axes: the mesh whose ranks are summed over.
        comm: collectives.
    """

    def __init__(self, axes: MeshAxes, comm: Comm) -> None:
        self.axes, self.comm = axes, comm
        self._sent: deque[_Round] = deque()  # oldest first
        self._read: _Round | None = None  # its buffers are free for the next round

    def due(self) -> tuple[torch.Tensor, Any] | None:
        """The oldest round's sums, on the host, and the facts sent along; None until `_LATE` rounds are under way."""
        if len(self._sent) < _LATE:
            return None
        oldest = self._read = self._sent.popleft()
        assert oldest.arrived is not None
        oldest.arrived.synchronize()
        return oldest.result, oldest.facts

    def send(self, values: torch.Tensor, facts: Any) -> torch.Tensor:
        """Start summing this round's numbers. Collective over the mesh.

        Args:
            values: [n] int64, on the host or the device.
            facts: returned by `due` with the sums.

        Returns:
            [n] int64, the sums, on the device.
        """
        current, self._read = self._read, None
        if current is None or current.numbers.numel() != values.numel():
            numel = values.numel()
            sums = torch.empty(numel, dtype=torch.int64, device=self.axes.device)
            current = _Round(host_buffer(numel), sums, host_buffer(numel))
        if values.device.type == "cpu":
            current.numbers.copy_(values)
            values = current.numbers
        current.sums.copy_(values, non_blocking=True)
        sum_over(current.sums, self.axes, self.comm)
        current.arrived, current.facts = begin_copy_to_host(current.sums, current.result), facts
        self._sent.append(current)
        return current.sums


def sum_over(vector: torch.Tensor, axes: MeshAxes, comm: Comm) -> None:
    """Sum `vector` in place over all ranks of a mesh. Collective over it."""
    for axis in axes.all:
        if axis.size > 1:
            comm.all_reduce(axis, vector, False).wait()
