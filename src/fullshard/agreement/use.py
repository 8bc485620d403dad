"""Whether all ranks gathered and reduced the same units, and which parameters had gradients on any rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, repeat
from operator import attrgetter
from zlib import crc32

import torch
import torch.distributed as dist

from ..comm import Comm, captures, has_streams
from ..containers import drain
from ..errors import DivergenceError
from ..mesh import MeshAxes
from ..shard import Delivery, Unit
from ..torch_private.local_tensor import read_requires_grad
from .exchange import LateSums, first_different, raise_on_all, ranks_of, rows_of_all, sum_over, texts_of_all
from .messages import (
    changed_before_backward,
    different_parameters_train,
    different_steps,
    different_units_reduced,
    steps_counted,
    undecided_in_graph,
)
from .position import Position

_USED, _UNDECIDED, _ASIDE = attrgetter("used"), attrgetter("undecided"), attrgetter("aside")
_DELIVERY, _GRADIENTS = attrgetter("delivery"), attrgetter("gradients")
_NOBODY, _VIEWS = attrgetter("nobody"), attrgetter("views")
_AXES, _STEPS = attrgetter("bucket.axes"), attrgetter("touched.steps")
_MEMBERS, _SHARDED = attrgetter("bucket.members"), attrgetter("sharded")


class UseAgreement:
    """Which parameters had a gradient on any rank, and whether all ranks gathered and reduced in the same order.

    A small all-reduce per backward, over all ranks of the mesh: a number for every parameter, a number for
    every unit (whether its weights were changed between its forward and this backward), and a fingerprint of
    `requires_grad` and of the order of gathers and reductions since the last backward, because gathers of equal sizes
    would silently swap two units. Only a rank that lacks gradients for some parameters has to read the result at once.
    All else is compared at once on a CPU, where that costs nothing, and a few backwards later on an accelerator
    (`LateSums`): in the same backward on all ranks, without a host waiting.

    Units on meshes of other ranks (experts) take one more for each set of ranks. So do hybrid meshes on accelerators,
    for each of their two axes: a communicator of all ranks would cost memory, and the default group, on which the
    program's other threads may communicate, was not passed to the engine.

    Args:
        comm: collectives.
        position: provides the fingerprint.

    Attributes:
        reduced: indices of the units whose reductions were issued since the ranks last agreed.
    """

    def __init__(self, comm: Comm, position: Position) -> None:
        self.comm, self.position = comm, position
        self.reduced: set[int] = set()
        self._changed: set[int] = set()  # indices of units, since the ranks last agreed
        self._steps = 0  # optimizer steps before the current backward
        self._late: dict[tuple[dist.ProcessGroup, ...], LateSums] = {}  # by the mesh's groups

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin a backward: count optimizer steps now, as ranks take those within it at different moments.

        Args:
            units: all units under the root.
        """
        self._steps = sum(map(_STEPS, units))

    def note_changed(self, index: int) -> None:
        """Note, in a backward, that a unit's weights have changed since its forward."""
        self._changed.add(index)

    def reset(self) -> None:
        """Discard the state of the current step, after an exception."""
        self.reduced.clear()
        self._changed.clear()
        self._late.clear()  # the allocator keeps memory until copies from it are over

    def agree(self, units: Sequence[Unit]) -> list[torch.Tensor]:
        """Decide which undecided parameters have gradients. Collective over every mesh, if anything was reduced.

        Args:
            units: all units under the root.

        Returns:
            The sharded parameters that received a gradient, and views over them.

        Raises:
            DivergenceError: ranks differ in `requires_grad`; or they gathered or reduced different units, or in
                different orders: gradients are wrong, or outputs of forwards without a backward were.
            UsageError: weights were changed between a forward and its backward, on any rank: gradients are wrong.
        """
        changed, self._changed = [*map(self._changed.__contains__, range(len(units)))], set()
        if not self.reduced:
            refuse_changed(units, changed)
            return []
        self.position.reduced = True
        deliveries = [*map(_DELIVERY, chain.from_iterable(map(_GRADIENTS, units)))]
        fingerprint = self.position.log.fingerprint()
        self.reduced.clear()
        received: list[torch.Tensor] = []
        for group in _by_ranks(deliveries):
            used = [*chain.from_iterable(map(_USED, group))]
            asks = any(map(_UNDECIDED, group)) or any(map(_ASIDE, group))
            present = self._union(group, used, changed, fingerprint, asks, units)
            if not asks and not any(map(_VIEWS, group)):  # the usual case: `delivery.used = delivery.nobody`
                drain(map(setattr, group, repeat("used"), map(_NOBODY, group)))
                continue
            at = 0
            for delivery in group:
                count = len(delivery.used)
                if asks or (delivery.views and delivery.may_show_zeros()):
                    received += delivery.decide(present[at : at + count])
                else:
                    delivery.used = delivery.nobody
                at += count
        return received

    def _union(
        self,
        group: Sequence[Delivery],
        used: list[bool],
        changed: list[bool],
        fingerprint: int,
        asks: bool,
        units: Sequence[Unit],
    ) -> list[bool]:
        """Per parameter, whether any rank of the mesh used it; without `asks`, whether this rank did."""
        axes = group[0].bucket.axes
        if axes.world == 1 or not self.comm.communicates or axes.shard.backend == "fake":
            refuse_changed(units, changed)
            return used
        on_device = has_streams(axes.device)
        if on_device and captures(axes.device):  # a graph does not contain the host; ranks compared the steps before it
            refuse_undecided(group)
            refuse_changed(units, changed)
            return used
        steps, fingerprint = self._steps, crc32(_requires_grad(group), fingerprint)
        vector = torch.tensor([*used, *changed, fingerprint, steps], dtype=torch.int64, device="cpu")
        if not on_device:
            sum_over(vector, axes, self.comm)
            self._compare(vector[len(used) :], fingerprint, steps, axes, group, units)
            return [bool(count) for count in vector[: len(used)].tolist()] if asks else used
        late = self._late.get(axes.groups)
        if late is None:
            late = self._late[axes.groups] = LateSums(axes, self.comm)
        if (arrived := late.due()) is not None:
            result, (sent_fingerprint, sent_steps) = arrived
            self._compare(result[-(len(units) + 2) :], sent_fingerprint, sent_steps, axes, group, units)
        sums = late.send(vector, (fingerprint, steps))
        return [bool(count) for count in sums[: len(used)].tolist()] if asks else used

    def _compare(
        self,
        tail: torch.Tensor,
        fingerprint: int,
        steps: int,
        axes: MeshAxes,
        group: Sequence[Delivery],
        units: Sequence[Unit],
    ) -> None:
        *changed, total, stepped = tail.tolist()
        if total != fingerprint * axes.world:
            self._refuse_flags(group, axes)
            raise different_units_reduced(axes.global_rank)
        if stepped != steps * axes.world:
            self._refuse_steps(axes, units)
        refuse_changed(units, changed)

    def _refuse_flags(self, group: Sequence[Delivery], axes: MeshAxes) -> None:
        """Raise if ranks differ in `requires_grad`. Collective."""
        rows = rows_of_all([[*_requires_grad(group)]], axes.spanning, self.comm, axes.device)
        other = first_different(rows)
        if other is not None:
            names = [member.name for delivery in group for member in delivery.bucket.members]
            first, second = rows[0], rows[other]
            at = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
            ranks = ranks_of(axes)
            raise different_parameters_train(names[at], (ranks[0], ranks[other]), (bool(first[at]), bool(second[at])))

    def _refuse_steps(self, axes: MeshAxes, units: Sequence[Unit]) -> None:
        """Raise, with details: optimizer steps have differed between ranks since the model was built. Collective."""
        steps = dict.fromkeys(steps_counted(unit.touched.count, unit.touched.by) for unit in units if unit.buckets)
        local = f"{self._steps} {'; '.join(steps)}"  # the last steps' settings may be the same on all ranks
        error: DivergenceError | None = None
        for axis in axes.all:
            texts = texts_of_all(local, axis, self.comm, axes.device) if axis.size > 1 else [local]
            other = first_different(texts)
            if other is not None and error is None:
                first, second = (texts[i].partition(" ")[2] for i in (0, other))
                error = different_steps((axis.ranks[0], axis.ranks[other]), (first, second))
        raise_on_all(error, axes.all, self.comm, axes.device)
        raise different_steps((axes.global_rank, None), ("; ".join(steps), ""))


def _requires_grad(deliveries: Sequence[Delivery]) -> bytes:
    """A byte for each parameter: whether it trains."""
    return bytes(map(read_requires_grad, map(_SHARDED, chain.from_iterable(map(_MEMBERS, deliveries)))))


def _by_ranks(deliveries: list[Delivery]) -> Collection[list[Delivery]]:
    """Sort deliveries by the ranks of their meshes, however these are arranged."""
    if len(set(map(_AXES, deliveries))) == 1:
        return (deliveries,)
    by_ranks: dict[frozenset[int], list[Delivery]] = {}
    for delivery in deliveries:
        by_ranks.setdefault(delivery.bucket.axes.ranks, []).append(delivery)
    return by_ranks.values()


def refuse_undecided(deliveries: Sequence[Delivery]) -> None:
    """Raise for parameters without a gradient on this rank, in a step that is captured as a graph.

    Raises:
        UsageError: names them.
    """
    for delivery in deliveries:
        if lacking := delivery.lacking():
            raise undecided_in_graph(lacking, delivery.bucket.axes.global_rank)


def refuse_changed(units: Sequence[Unit], changed: Sequence[int | bool]) -> None:
    """Raise if any unit's weights were changed between a forward and its backward.

    Plain PyTorch raises where a backward needs the old values. Here those are gone: the backward gathered new ones.

    Raises:
        UsageError: names the first such unit's parameters.
    """
    if not any(changed):
        return
    for unit, count in zip(units, changed, strict=True):
        if count:
            raise changed_before_backward(unit.name, [member.name for member in unit.members], unit.rank)
