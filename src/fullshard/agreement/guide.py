"""What goes with a pass: comparisons along the first of its kind, or the order that ranks share though they run less.

With `unused="error"` ranks run the same units, and compare along the first pass of each kind; see `first_pass.py`. With
`unused="zeros"` a rank may leave units out: it gathers and frees them in step with the others all the same, and takes
part in their reductions with zeros; see `shared_order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..forms import Member
from ..mesh import MeshAxes
from ..policies import Unused
from ..shard import Unit
from ..watcher import RANK
from .aside import rows_of_all
from .first_pass import FirstPass, is_frozen, largest
from .in_step import InStep
from .messages import out_of_shared_order
from .shared_order import Merging, Shared, Step, completed, parents_of


class Guide:
    """See the module's docstring. One per root.

    Args:
        units: all under the root.
        names: theirs.
        comm: collectives.
        unused: what becomes of units that some ranks leave out.
        always: whether ranks say before every step, in every pass, what they run: with "zeros", and `check="every"`.
        pass_over: begins or ends a unit that this rank does not run.
        take_part: does in a backward what other ranks want; see `InStep`.

    Attributes:
        first: compares along the pass that runs now, if it is the first of its kind.
        active: whether there is anything to do at a unit's beginning and end.
        led_back: indices of units that were frozen in the first pass of a kind, and whose outputs needed a gradient
            then, on any rank.
        in_step: for backwards of ranks that say what they want next; None where they go by the forward's order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: Sequence[str],
        comm: Comm,
        unused: Unused,
        always: bool,
        pass_over: Callable[[int, bool], None],
        take_part: Callable[[int, int], None],
    ) -> None:
        self.units, self.comm, self.always = units, comm, always
        self.zeros = (
            unused == "zeros"
            and comm.communicates
            and any(
                [
                    bucket.axes.world > 1 and bucket.axes.shard.backend != "fake"
                    for unit in units
                    for bucket in unit.buckets
                ]
            )
        )
        self.first: FirstPass | None = None
        self.active = False
        self.led_back: set[int] = set()
        self._pass_over, self._names = pass_over, names
        self._orders: dict[Hashable, list[Step]] = {}
        self._kind: Hashable = None
        self._complete: set[Hashable] = set()
        self._along: Merging | Shared | None = None
        self.in_step = InStep(largest(units), comm, take_part) if self.zeros and always else None

    def is_first(self, kind: Hashable) -> bool:
        """Whether no pass of this kind was complete so far."""
        return kind not in self._complete

    def begin(self, kind: Hashable) -> None:
        """A pass begins.

        Args:
            kind: passes of one kind run units in one order.
        """
        compares = self.is_first(kind) and not self.zeros
        self.first = FirstPass(self.units, self.comm, self.led_back) if compares else None
        self._kind = kind
        if self.zeros:
            order = self._orders.get(kind)
            self._along = Merging(largest(self.units).world) if order is None else Shared(order)
        self.active = self.first is not None or self.zeros

    def enter(self, index: int) -> bool:
        """A unit is about to be gathered for its forward.

        Returns:
            Whether the model's own code is found to have changed its weights since the pass began.

        Raises:
            DivergenceError: another rank is about to run another one.
        """
        if self.zeros:
            self._come_to((index, False))
        return bool(self._while_first(lambda first: first.enter(index)))

    def written(self, index: int, leads_back: bool) -> list[Member]:
        """Parameters of a gathered unit, whose forward is over, that are not what their shards hold, on any rank.

        Args:
            leads_back: whether its outputs need a gradient on this rank.

        Raises:
            DivergenceError: another rank is about to run a unit, or to leave another one.
        """
        if self.zeros:
            self._come_to((index, True))
        return self._while_first(lambda first: first.written(index, leads_back)) or []

    def goes_back(self, index: int) -> bool:
        """Whether backwards go through a unit, on every rank alike, even if nothing led back to it on this one.

        What a rank's outputs need differs between ranks, so it is not asked. A unit that trains has to be reduced, if
        need be with zeros. One that is frozen is gathered for nothing where no rank needs it: a frozen backbone.
        """
        return self.zeros or index in self.led_back or not is_frozen(self.units[index])

    def end(self) -> None:
        """The pass is over.

        Raises:
            DivergenceError: another rank is about to run a unit.
        """
        if isinstance(self._along, Merging):
            if self.in_step is not None and torch.is_grad_enabled():
                self.in_step.ran(self._along.steps)
            if not self.always:  # else nothing follows it
                self._orders[self._kind] = completed(self._along.steps, parents_of(self._names))
        elif not self.zeros:
            self._while_first(FirstPass.end)
        self._complete.add(self._kind)
        self.stop()

    def stop(self) -> None:
        """The pass is over, or was broken off."""
        self.first = self._along = None
        self.active = False

    def forget(self) -> None:
        """What ranks learned together is no more known."""
        self._complete.clear()
        self._orders.clear()
        self.led_back.clear()
        if self.in_step is not None:
            self.in_step.forget()

    def _while_first(self, ask: Callable[[FirstPass], Any]) -> Any:
        if self.first is None:
            return None
        try:
            return ask(self.first)
        except DivergenceError:
            self.stop()  # all ranks raise: there is nothing left to compare
            raise

    def _come_to(self, step: Step) -> None:
        """Go through what other ranks run before this step."""
        along, self.active = self._along, False  # units that are passed over ask nothing
        if isinstance(along, Merging):
            while (chosen := along.chosen(wanted_by_all(step, largest(self.units), self.comm))) != step:
                self._pass_over(*chosen)
        elif along is not None:
            if not along.holds(step):
                raise out_of_shared_order(self._names[step[0]])
            for passed, ends in along.until(step):
                self._pass_over(passed, ends)
        self.active = True


def wanted_by_all(step: Step, axes: MeshAxes, comm: Comm) -> list[Step]:
    """What every rank of the mesh is about to run. Collective over it."""
    RANK.talks("shared order")
    return [(index, bool(ends)) for index, ends in rows_of_all([step], axes.all, comm, axes.device)]
