"""The elements of a parameter on the ranks of an axis, as runs in memory order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm import reduce_value
from ..layout import Layout, Part, Slot
from ..mesh import Axis, MeshAxes
from ..torch_private.local_tensor import local_part


@dataclass(frozen=True, eq=False)
class Run:
    """The elements of a parameter that each rank of an axis has.

    The parameter begins at `offset` of a gathered segment of which rank r has [r * S, (r + 1) * S).

    Attributes:
        name: of the parameter, for errors.
        shape, order: the parameter's shape, and its dims from outermost to innermost in memory.
        offset: the parameter's first element in the gathered segment.
        slice_numel: S.
        axis: the shard axis.
        replicas: the replicate axis, or None.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    slice_numel: int
    axis: Axis
    replicas: Axis | None = None

    @classmethod
    def of(cls, layout: Layout, slot: Slot, axes: MeshAxes) -> Run:
        """The run of a parameter of a flat layout."""
        slice_numel = layout.segments[slot.segment].slice_numel
        return cls(slot.name, slot.shape, slot.spec.order, slot.offset, slice_numel, axes.shard, axes.replicate)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def bounds(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the parameter, in memory order, on `rank`."""
        start = min(max(rank * self.slice_numel - self.offset, 0), self.numel)
        return start, max(start, min((rank + 1) * self.slice_numel - self.offset, self.numel))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's run of a whole tensor of the parameter's shape, as a 1-D tensor."""
        start, stop = self.bounds(self.axis.rank)
        return full.permute(self.order).reshape(-1)[start:stop]

    def reduce(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a value over the shard axis. Collective."""
        return reduce_value(value, op, self.axis.group) if self.axis.size > 1 else value

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


def take_run(slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
    """Copy the elements of `part`, of a flat layout, from a parameter's original into `local`."""
    memory = local_part(original).permute(slot.spec.order).reshape(-1)
    local.copy_(memory[part.start : part.start + part.numel])
