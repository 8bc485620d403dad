"""What ranks compare along the first pass of each kind, and never again.

Which unit each is about to run: without that, gathers of equal sizes would swap two units' parameters and say nothing,
and others would hang. Whether the model's own code changed a unit's weights since the pass began (a momentum encoder):
such a unit is never gathered ahead in forward. Whether a forward wrote to what was gathered for it: values are
compared, exactly; later passes go by version counters, which miss writes through `.data`. And whether a backward may
lead to a unit on any rank: one that trains is gone through anyway, but a frozen one that no rank comes back to need not
be gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch

from ..comm import Comm
from ..forms import Member
from ..mesh import Axis, MeshAxes
from ..shard import Unit
from ..watcher import RANK
from .messages import different_orders

END = -1  # in place of a unit's index: the pass is over
LEFT = -2  # less a unit's index: its forward is over
_CHANGED, _LEADS_BACK = 1, 2  # flags: the unit's weights were changed; its outputs need a gradient


class FirstPass:
    """See the module's docstring.

    Args:
        units: all under the root, as they are when the pass begins.
        comm: collectives.
        led_back: takes the indices of frozen units whose outputs need a gradient on any rank.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, led_back: set[int]) -> None:
        self.units, self.comm, self.led_back = units, comm, led_back
        self._marks = [(unit.version(), unit.checksum()) for unit in units]

    def enter(self, index: int) -> bool:
        """A unit is about to be gathered for its forward. Collective over its mesh.

        Returns:
            Whether its weights were changed since the pass began, on any rank.

        Raises:
            DivergenceError: another rank is about to run another one.
        """
        unit = self.units[index]
        if not unit.buckets:
            return False
        changed = unit.replaced() or self._marks[index] != (unit.version(), unit.checksum())
        return bool(self._compare(index, changed, largest([unit])) & _CHANGED)

    def end(self) -> None:
        """The pass is over.

        Raises:
            DivergenceError: another rank is about to run a unit.
        """
        if any([unit.buckets for unit in self.units]):
            self._compare(END, 0, largest(self.units))

    def written(self, index: int, leads_back: bool) -> list[Member]:
        """Parameters of a gathered unit that are not what their shards hold, on any rank. Collective over its mesh.

        Args:
            leads_back: whether its outputs need a gradient on this rank.

        Raises:
            DivergenceError: another rank is about to run a unit, or to leave another one.
        """
        unit = self.units[index]
        if not unit.buckets:
            return []
        mine = _CHANGED * unit.changed_since_gather() + _LEADS_BACK * leads_back
        flags = self._compare(LEFT - index, mine, largest([unit]))
        if flags & _LEADS_BACK and is_frozen(unit):
            self.led_back.add(index)
        if flags & _CHANGED:
            return []
        (found,) = differing([unit], self.comm)
        told = [id(member) for bucket in unit.buckets if bucket.form.plain for member in bucket.members]
        return [member for member in found if id(member) in told]  # what a subclass gathers cannot be compared

    def _compare(self, index: int, flags: int, axes: MeshAxes) -> int:
        """Returns the flags that any rank gave."""
        for axis in axes.all:
            if axis.size > 1 and self.comm.communicates:
                flags = self._compare_over(axis, index, flags, axes.device)
        return flags

    def _compare_over(self, axis: Axis, index: int, flags: int, device: torch.device) -> int:
        mine = torch.tensor([index, flags], dtype=torch.int64, device=device)
        found = torch.empty(2 * axis.size, dtype=torch.int64, device=device)
        RANK.talks("the first pass")
        self.comm.gather(axis, found, mine).wait()
        indices, given = found.view(axis.size, 2).T.tolist()
        other = next((i for i, found in enumerate(indices) if found != indices[0]), None)
        if other is None:
            return reduce(or_, given)
        raise different_orders((axis.ranks[0], axis.ranks[other]), [self._place(indices[at]) for at in (0, other)])

    def _place(self, index: int) -> tuple[str | None, bool]:
        """The unit that a rank has come to, and whether to its end; None: to the end of the pass."""
        ends = index <= LEFT
        return (None if index == END else self.units[LEFT - index if ends else index].name), ends


def is_frozen(unit: Unit) -> bool:
    """Whether the unit holds parameters, and none of them trains."""
    return bool(unit.buckets) and not any([bucket.trains for bucket in unit.buckets])


def largest(units: Sequence[Unit]) -> MeshAxes:
    """Of the largest mesh that these units, some of which hold parameters, are sharded over."""
    return max([bucket.axes for unit in units for bucket in unit.buckets], key=lambda axes: axes.world)


def differing(units: Sequence[Unit], comm: Comm) -> list[list[Member]]:
    """For each gathered unit, the parameters whose values are not those of their shards, on any rank. Collective.

    The values themselves are compared: nothing else tells of every change (an alias of a shard that a collective wrote
    to, a fused optimizer).
    """
    with torch.no_grad():
        flags = torch.cat([unit.differs() for unit in units]).to(torch.int32)
        axes = largest(units)
        for axis in axes.all:
            if axis.size > 1 and comm.communicates:
                comm.all_reduce(axis, flags, False).wait()
    counts = iter(flags.tolist())
    return [[member for member in unit.members if next(counts)] for unit in units]
