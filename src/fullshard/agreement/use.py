"""Whether all ranks gather and reduce the same, and which parameters any of them had gradients for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, repeat
from operator import attrgetter

import torch
import torch.distributed as dist

from ..comm import Comm, has_streams
from ..containers import drain
from ..mesh import MeshAxes
from ..shard import Delivery, Unit
from .aside import texts_of_all
from .late import LateSums, sum_over
from .messages import changed_before_backward, different_steps, different_units_reduced, steps_counted
from .position import Position

_USED, _UNDECIDED, _ASIDE = attrgetter("used"), attrgetter("undecided"), attrgetter("aside")
_DELIVERY, _GRADIENTS = attrgetter("delivery"), attrgetter("gradients")
_NOBODY, _VIEWS = attrgetter("nobody"), attrgetter("views")
_AXES, _STEPS = attrgetter("bucket.axes"), attrgetter("touched.steps")


class UseAgreement:
    """Which parameters any rank had a gradient for, and whether all ranks gathered and reduced the same in one order.

    One small all-reduce per backward and mesh, over all ranks of the mesh: a number for every parameter, one for every
    unit (whether its weights were changed between its forward and this backward), and a fingerprint of the order of
    gathers and reductions since the last one: gathers of equal sizes would swap two units and say nothing. Only
    a rank that lacks gradients for some parameters has to read the answer at once; the rest is compared at once where
    that costs nothing (on a CPU), else some backwards later (`late.py`): on all ranks in the same one, and no host
    waits.

    Args:
        comm: collectives.
        position: keeps the fingerprint.

    Attributes:
        reduced: indices of the units whose reductions were issued since the ranks last agreed.
    """

    def __init__(self, comm: Comm, position: Position) -> None:
        self.comm, self.position = comm, position
        self.reduced: set[int] = set()
        self._changed: set[int] = set()  # indices of units, since the ranks last agreed
        self._steps = 0  # of optimizers, before the backward that runs now
        self._late: dict[tuple[dist.ProcessGroup, ...], LateSums] = {}  # by the mesh's groups

    def begin(self, units: Sequence[Unit]) -> None:
        """A backward begins. Steps that optimizers take within it come at other moments on other ranks.

        Args:
            units: all under the root.
        """
        self._steps = sum(map(_STEPS, units))

    def note_changed(self, index: int) -> None:
        """A unit's weights are not those that its forward saw, in the backward that runs now."""
        self._changed.add(index)

    def reset(self) -> None:
        """After an exception."""
        self.reduced.clear()
        self._changed.clear()
        self._late.clear()  # the allocator waits for what is still being copied

    def agree(self, units: Sequence[Unit]) -> list[torch.Tensor]:
        """Settle which undecided parameters have gradients. Collective over every mesh, if anything was reduced.

        Args:
            units: all under the root.

        Returns:
            The sharded parameters that got one, and views over them.

        Raises:
            DivergenceError: ranks gathered or reduced other units, or in another order: gradients are wrong, or were
                what forwards without a backward gave.
            UsageError: weights were changed between a forward and its backward, on any rank: gradients are wrong.
        """
        changed, self._changed = [*map(self._changed.__contains__, range(len(units)))], set()
        if not self.reduced:
            refuse_changed(units, changed)
            return []
        deliveries = [*map(_DELIVERY, chain.from_iterable(map(_GRADIENTS, units)))]
        fingerprint = self.position.log.fingerprint()
        self.reduced.clear()
        given: list[torch.Tensor] = []
        for group in _by_groups(deliveries):
            used = [*chain.from_iterable(map(_USED, group))]
            asks = any(map(_UNDECIDED, group)) or any(map(_ASIDE, group))
            present = self._union(group[0].bucket.axes, used, changed, fingerprint, asks, units)
            if not asks and not any(map(_VIEWS, group)):  # as ever: `delivery.used = delivery.nobody`
                drain(map(setattr, group, repeat("used"), map(_NOBODY, group)))
                continue
            at = 0
            for delivery in group:
                count = len(delivery.used)
                if asks or (delivery.views and delivery.may_show_zeros()):
                    given += delivery.decide(present[at : at + count])
                else:
                    delivery.used = delivery.nobody
                at += count
        return given

    def _union(
        self,
        axes: MeshAxes,
        used: list[bool],
        changed: list[bool],
        fingerprint: int,
        asks: bool,
        units: Sequence[Unit],
    ) -> list[bool]:
        """Per parameter, whether any rank of the mesh used it; what this rank used where nobody asks."""
        if axes.world == 1 or not self.comm.communicates or axes.shard.backend == "fake":
            refuse_changed(units, changed)
            return used
        steps = self._steps
        vector = torch.tensor([*used, *changed, fingerprint, steps], dtype=torch.int64)
        if not has_streams(axes.device):
            sum_over(vector, axes, self.comm)
            self._compare(vector[len(used) :], fingerprint, steps, axes, units)
            return [bool(count) for count in vector[: len(used)].tolist()] if asks else used
        late = self._late.get(axes.groups)
        if late is None:
            late = self._late[axes.groups] = LateSums(axes, self.comm)
        if (old := late.due()) is not None:
            result, (old_fingerprint, old_steps) = old
            self._compare(result[-(len(units) + 2) :], old_fingerprint, old_steps, axes, units)
        sums = late.send(vector, (fingerprint, steps))
        return [bool(count) for count in sums[: len(used)].tolist()] if asks else used

    def _compare(self, tail: torch.Tensor, fingerprint: int, steps: int, axes: MeshAxes, units: Sequence[Unit]) -> None:
        *changed, total, stepped = tail.tolist()
        if total != fingerprint * axes.world:
            raise different_units_reduced(axes.global_rank)
        if stepped != steps * axes.world:
            self._refuse_steps(axes, units)
        refuse_changed(units, changed)

    def _refuse_steps(self, axes: MeshAxes, units: Sequence[Unit]) -> None:
        """Ranks' optimizers did not step alike since the model was made: say how. Collective over the mesh."""
        own = dict.fromkeys(steps_counted(unit.touched.count, unit.touched.by) for unit in units if unit.buckets)
        mine = "; ".join(own)
        for axis in axes.all:
            told = texts_of_all(mine, axis, self.comm, axes.device) if axis.size > 1 else [mine]
            other = next((i for i, text in enumerate(told) if text != told[0]), 0)
            if other or axis is axes.all[-1]:
                break
        raise different_steps((axis.ranks[0], axis.ranks[other]), (told[0], told[other]), other > 0)


def _by_groups(deliveries: list[Delivery]) -> Collection[list[Delivery]]:
    """These, by the groups of their meshes."""
    if len(set(map(_AXES, deliveries))) == 1:
        return (deliveries,)
    found: dict[tuple[dist.ProcessGroup, ...], list[Delivery]] = {}
    for delivery in deliveries:
        found.setdefault(delivery.bucket.axes.groups, []).append(delivery)
    return found.values()


def refuse_changed(units: Sequence[Unit], changed: Sequence[int | bool]) -> None:
    """Raise if any unit's weights were changed between a forward and its backward.

    Plain PyTorch raises where it needs the old values, which are gone: what was gathered for the backward is new.

    Raises:
        UsageError: names the first such unit's parameters.
    """
    if not any(changed):
        return
    for unit, count in zip(units, changed, strict=True):
        if count:
            raise changed_before_backward(unit.name, [member.name for member in unit.members], unit.rank)
