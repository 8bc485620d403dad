"""The comparisons between ranks during the first pass of each kind, which later passes do not repeat.

- Which unit each rank is about to run. Otherwise gathers of equal sizes would silently swap two units' parameters, and
  gathers of different sizes would hang.
- Whether the model's own code changed a unit's weights since the pass began (a momentum encoder): such a unit is never
  prefetched in forward.
- Whether a forward wrote to its unit's full buffers. The first pass compares values exactly; later passes rely on
  version counters, which miss writes through `.data`.
- Whether a backward may reach a unit on any rank. Backwards visit trainable units in any case, but a frozen unit that
  no rank reaches need not be gathered again.
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
from .exchange import agree_on, sum_over
from .log import ENTER, LEAVE
from .messages import different_orders

_CHANGED, _LEADS_BACK = 1, 2  # flags: the unit's weights were changed; its outputs need a gradient


class FirstPass:
    """See the module's docstring. One per root.

    Args:
        units: all units under the root.
        comm: collectives.

    Attributes:
        active: whether a first pass of its kind is running, so that units must report where they begin and end.
        in_step: see `SharedOrder`.
    """

    in_step = None

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.units, self.comm = units, comm
        self.active = False
        self._marks: list[tuple[int, int]] = []  # per unit, the state of its weights when the pass began
        self._led_back: set[int] = set()  # frozen units whose outputs needed a gradient in a first pass, on any rank

    def begin(self, kind: int, first: bool) -> None:
        """Begin a pass.

        Args:
            kind: passes of the same kind run units in the same order.
            first: whether no pass of this kind has completed yet.
        """
        self.active = first
        if first:
            self._marks = [(unit.version(), unit.checksum()) for unit in self.units]

    def enter(self, index: int) -> bool:
        """Compare, before a unit is gathered for its forward. Collective over its mesh.

        Returns:
            Whether the model's own code changed the unit's weights since the pass began, on any rank.

        Raises:
            DivergenceError: a rank is about to run a different unit.
        """
        unit = self.units[index]
        if not unit.buckets:
            return False
        changed = unit.replaced() or self._marks[index] != (unit.version(), unit.checksum())
        return bool(self._compare(word(ENTER, index), changed, [unit]) & _CHANGED)

    def written(self, index: int, leads_back: bool) -> list[Member]:
        """The parameters that a unit's forward, now over, wrote to on any rank, so that they differ from their shards.

        Args:
            leads_back: whether the unit's outputs need a gradient on this rank.

        Raises:
            DivergenceError: a rank is about to run a unit, or to leave a different one.
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
        (changed,) = differing([unit], self.comm)
        comparable = [id(member) for bucket in unit.buckets if bucket.form.plain for member in bucket.members]
        return [member for member in changed if id(member) in comparable]  # an extension's gathered values are not

    def goes_back(self, index: int) -> bool:
        """Whether backwards visit a unit, the same on every rank, even if no gradient reaches it on this rank.

        Whether outputs need gradients may differ between ranks, so this rank's own outputs do not decide. A trainable
        unit has to be reduced, with zeros if necessary. Gathering a frozen unit would be wasted where no rank needs
        it (a frozen backbone).
        """
        return index in self._led_back or not is_frozen(self.units[index])

    def end(self) -> None:
        """End the pass.

        Raises:
            DivergenceError: another rank is about to run a unit.
        """
        if self.active and any([unit.buckets for unit in self.units]):
            self._compare(word(END, 0), 0, self.units)
        self.stop()

    def stop(self) -> None:
        """Stop comparing: the pass is over, or an exception ended it."""
        self.active = False

    def forget(self) -> None:
        """Discard everything that ranks learned together."""
        self._led_back.clear()

    def _compare(self, token: int, flags: int, units: Sequence[Unit]) -> int:
        """Return the flags set on any rank."""
        self.active = False  # stays so if this raises: it raises on all ranks, so nothing is left to compare
        RANK.talks("the first pass")
        flags = agree_on(token, flags, largest_mesh(units), self.comm, self._differ)
        self.active = True
        return flags

    def _differ(self, ranks: Sequence[int], tokens: Sequence[int]) -> DivergenceError:
        return different_orders(ranks, tokens, [unit.name for unit in self.units])


def is_frozen(unit: Unit) -> bool:
    """Whether the unit has parameters, all of them frozen."""
    return bool(unit.buckets) and not any([bucket.trains for bucket in unit.buckets])


def largest_mesh(units: Sequence[Unit]) -> MeshAxes:
    """The largest mesh over which these units are sharded; at least one of them has parameters."""
    return max([bucket.axes for unit in units for bucket in unit.buckets], key=lambda axes: axes.world)


def differing(units: Sequence[Unit], comm: Comm) -> list[list[Member]]:
    """For each gathered unit, the parameters whose values differ from their shards on any rank. Collective.

    Compares the values themselves: nothing else detects every change (a collective that wrote to an alias of a shard, a
    fused optimizer).
    """
    with torch.no_grad():
        flags = torch.cat([unit.differs() for unit in units]).to(torch.int32)
        if comm.communicates:
            sum_over(flags, largest_mesh(units), comm)
    counts = iter(flags.tolist())
    return [[member for member in unit.members if next(counts)] for unit in units]
