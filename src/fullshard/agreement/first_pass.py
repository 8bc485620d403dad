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

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..forms import Member
from ..mesh import MeshAxes
from ..shard import Unit
from ..watcher import END, RANK, word
from .aside import agree_on
from .log import ENTER, LEAVE
from .messages import different_orders

_CHANGED, _LEADS_BACK = 1, 2  # flags: the unit's weights were changed; its outputs need a gradient


class FirstPass:
    """See the module's docstring. One per root.

    Args:
        units: all under the root.
        comm: collectives.

    Attributes:
        active: whether there is anything to do at a unit's beginning and end: the first pass of a kind runs.
        in_step: see `SharedOrder`.
    """

    in_step = None

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.units, self.comm = units, comm
        self.active = False
        self._marks: list[tuple[int, int]] = []  # of each unit, what its weights were as the pass began
        self._led_back: set[int] = set()  # frozen ones whose outputs needed a gradient in a first pass, on any rank

    def begin(self, kind: int, first: bool) -> None:
        """A pass begins.

        Args:
            kind: passes of one kind run units in one order.
            first: whether none of the kind was complete so far.
        """
        self.active = first
        if first:
            self._marks = [(unit.version(), unit.checksum()) for unit in self.units]

    def enter(self, index: int) -> bool:
        """A unit is about to be gathered for its forward. Collective over its mesh.

        Returns:
            Whether the model's own code changed its weights since the pass began, on any rank.

        Raises:
            DivergenceError: another rank is about to run another one.
        """
        unit = self.units[index]
        if not unit.buckets:
            return False
        changed = unit.replaced() or self._marks[index] != (unit.version(), unit.checksum())
        return bool(self._compare(word(ENTER, index), changed, [unit]) & _CHANGED)

    def written(self, index: int, leads_back: bool) -> list[Member]:
        """Parameters of a gathered unit, whose forward is over, that are not what their shards hold, on any rank.

        Args:
            leads_back: whether its outputs need a gradient on this rank.

        Raises:
            DivergenceError: another rank is about to run a unit, or to leave another one.
        """
        unit = self.units[index]
        if not unit.buckets:
            return []
        flags = self._compare(
            word(LEAVE, index), _CHANGED * unit.changed_since_gather() + _LEADS_BACK * leads_back, [unit]
        )
        if flags & _LEADS_BACK and is_frozen(unit):
            self._led_back.add(index)
        if flags & _CHANGED:
            return []
        (found,) = differing([unit], self.comm)
        told = [id(member) for bucket in unit.buckets if bucket.form.plain for member in bucket.members]
        return [member for member in found if id(member) in told]  # what a subclass gathers cannot be compared

    def goes_back(self, index: int) -> bool:
        """Whether backwards go through a unit, on every rank alike, even if nothing led back to it on this one.

        What a rank's outputs need differs between ranks, so it is not asked. A unit that trains has to be reduced, if
        need be with zeros. One that is frozen is gathered for nothing where no rank needs it: a frozen backbone.
        """
        return index in self._led_back or not is_frozen(self.units[index])

    def end(self) -> None:
        """The pass is over.

        Raises:
            DivergenceError: another rank is about to run a unit.
        """
        if self.active and any([unit.buckets for unit in self.units]):
            self._compare(word(END, 0), 0, self.units)
        self.stop()

    def stop(self) -> None:
        """The pass is over, or was broken off."""
        self.active = False

    def forget(self) -> None:
        """Nothing that ranks learned together counts any more."""
        self._led_back.clear()

    def _compare(self, token: int, flags: int, units: Sequence[Unit]) -> int:
        """Returns the flags that any rank gave."""
        self.active = False  # where this raises: all ranks do, and there is nothing left to compare
        RANK.talks("the first pass")
        flags = agree_on(token, flags, largest(units), self.comm, self._differ)
        self.active = True
        return flags

    def _differ(self, ranks: Sequence[int], tokens: Sequence[int]) -> DivergenceError:
        return different_orders(ranks, tokens, [unit.name for unit in self.units])


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
