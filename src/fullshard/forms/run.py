"""The elements of a parameter that the ranks of an axis hold, as runs in memory order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layout import Slot
from ..mesh import Axis


@dataclass(frozen=True, eq=False)
class Run:
    """The elements of a parameter that the ranks of an axis hold.

    The parameter lies at `offset` of a gathered segment of which rank r holds [r * S, (r + 1) * S).

    Attributes:
        name: of the parameter, for errors.
        shape, order: the parameter's shape, and its dims from outermost to innermost in memory.
        offset: the parameter's first element in the gathered segment.
        slice_numel: S.
        axis: the shard axis.
        replicas: the replicate axis, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    slice_numel: int
    axis: Axis
    replicas: Axis | None = None

    @classmethod
    def of(cls, slot: Slot, slice_numel: int, axis: Axis, replicas: Axis | None = None) -> Run:
        return cls(slot.name, slot.shape, slot.spec.order, slot.offset, slice_numel, axis, replicas)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def bounds(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the parameter, in memory order, that `rank` holds."""
        start = min(max(rank * self.slice_numel - self.offset, 0), self.numel)
        return start, max(start, min((rank + 1) * self.slice_numel - self.offset, self.numel))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's run of a whole tensor of the parameter's shape, as a 1-D tensor."""
        start, stop = self.bounds(self.axis.rank)
        return full.permute(self.order).reshape(-1)[start:stop]

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        return self  # immutable: integers and process groups

    def same_as(self, other: Run) -> bool:
        return self is other or (
            self.shape == other.shape
            and self.order == other.order
            and self.offset == other.offset
            and self.slice_numel == other.slice_numel
            and self.axis.group is other.axis.group
        )
