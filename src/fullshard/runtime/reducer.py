"""Reductions of the units under one root: in an order that all ranks share, a bounded number at once.

Ranks need not use the same units: a batch of one task gives one head a gradient, a batch of another task another. So
that their reductions meet, every unit whose forward ran with gradients takes part in the next backward with gradient
sync, with zeros if it got none; and reductions are issued in one order, whatever order gradients come in: the reverse
of the order in which the units first ran, which the ranks have compared. A unit that is ready before its turn waits.

At the end of a backward the ranks say which parameters had gradients (`agreement.UseAgreement`): a parameter that some
rank used has a `.grad` on all, one that none used has none, and its optimizer state is the same everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from ..comm import Comm
from ..shard import Reduction, Unit, collect, has_gradients
from ..torch_private.local_tensor import plain_access
from .agreement import UseAgreement
from .settings import UnitSettings


class Reducible(Protocol):
    """What a reducer knows of a unit: its `Runner`."""

    unit: Unit
    settings: UnitSettings
    index: int
    open_calls: int


InFlight = deque[tuple["Reducer", Reducible, Reduction]]
"""Reductions over the shard axis, oldest first; each holds one buffer. Roots may share it (`share_comm_ctx`)."""

_no_grad = torch.no_grad
_NOTHING = nullcontext()


class Reducer:
    """See the module's docstring. Owns no tensors.

    Args:
        units: all units under the root.
        comm: collectives by which ranks agree.
        in_flight: shared with other roots, if it is.
    """

    def __init__(self, units: Sequence[Reducible], comm: Comm, in_flight: InFlight | None = None) -> None:
        self.units = units
        self.in_flight: InFlight = deque() if in_flight is None else in_flight
        self._replicating: deque[tuple[Reducible, Reduction]] = deque()  # over the replicate axis; slices only
        self._ran: dict[int, Reducible] = {}  # by index: ran forward with gradients since they were last reduced
        self._expected: deque[Reducible] = deque()  # in the backward that runs now, in the order of reduction
        self._ready: dict[int, Reducible] = {}  # by index: their gradients are complete
        self._use = UseAgreement(comm)
        self._active = False  # whether a backward has begun

    def note_gather(self, index: int) -> None:
        """A unit's gather was issued in backward."""
        self._use.note_gather(index)

    def changed(self, one: Reducible) -> None:
        """A unit's weights changed between a forward and its backward, which runs now."""
        self._use.note_changed(one.index)

    def ran(self, one: Reducible) -> None:
        """A unit runs its forward with gradients."""
        if one.index not in self._ran:
            self._ran[one.index] = one

    def begin(self) -> None:
        """A backward begins: settle who takes part, and in which order."""
        self._active = True
        self._ready.clear()
        order = [one for one in reversed(self._ran.values()) if one.settings.reduce.sync]
        seen = {one.index for one in order}
        order += [
            u for u in self.units if u.settings.reduce.fill_unused and u.settings.reduce.sync and u.index not in seen
        ]
        self._expected = deque(one for one in order if any([g.trains() for g in one.unit.gradients]))

    def submit(self, one: Reducible) -> None:
        """A unit's gradients are complete, as far as this backward goes."""
        if not has_gradients(one.unit):
            return
        with plain_access(), _no_grad() if torch.is_grad_enabled() else _NOTHING:  # on only with create_graph
            if not one.settings.reduce.sync:
                self._finish_own(one)
                collect(one.unit, everything=False)
                return
            if one.index in self._ready:  # more gradients after it was reduced
                return
            self._ready[one.index] = one
            expected = self._expected
            if expected and expected[0] is one:
                while expected and expected[0].index in self._ready:
                    self._issue(expected.popleft())
            elif one not in expected:
                self._finish_own(one)
            else:  # its turn has not come: its gradients go where they will be reduced from
                collect(one.unit, everything=True)

    def _issue(self, one: Reducible) -> None:
        """Reduce a unit, with zeros where it has no gradients."""
        settings = one.settings.reduce
        self._ran.pop(one.index, None)
        if one.open_calls > 0:
            self._ran[one.index] = one
        while self.in_flight and (
            len(self.in_flight) >= settings.max_in_flight or any([entry[1] is one for entry in self.in_flight])
        ):
            self._advance()
        collect(one.unit, everything=True)
        reduction = Reduction(one.unit, one.settings.comm, settings.divide_factor, settings.force_sum)
        self.in_flight.append((self, one, reduction))
        self._use.note(one.index)

    def _advance(self) -> None:
        """Finish the oldest reduction over the shard axis; one over the replicate axis goes on beside what follows."""
        owner, one, reduction = self.in_flight.popleft()
        reduction.replicate(one.settings.reduce.all_reduce)
        if any([bucket.axes.replicate is not None for bucket in one.unit.buckets]):
            owner._replicating.append((one, reduction))
            while len(owner._replicating) > 1:
                owner._deliver(*owner._replicating.popleft())
        else:
            owner._deliver(one, reduction)

    def _finish_own(self, one: Reducible) -> None:
        """Deliver what is in flight of a unit, so that its buffer is free."""
        while any([entry[1] is one for entry in self.in_flight]):
            self._advance()

    def _deliver(self, one: Reducible, reduction: Reduction) -> None:
        settings = one.settings.reduce
        with plain_access(), _no_grad() if torch.is_grad_enabled() else _NOTHING:
            given = reduction.finish(settings.all_reduce, settings.hook, settings.fill_unused)
        self._run_hooks(given)

    def _run_hooks(self, given: Iterable[torch.Tensor]) -> None:
        """Post-accumulate hooks that users put on sharded parameters and views."""
        for parameter in given:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._settle()
                with torch._C._EnableTorchFunction():
                    for hook in list(hooks.values()):
                        hook(parameter)

    def deliver_completed(self) -> None:
        """Deliver reductions that are done, so that their buffers are not held while more is gathered.

        Not where users' hooks run: hooks that communicate must run at the same moments on all ranks.
        """
        while self.in_flight and self.in_flight[0][2].is_completed():
            one = self.in_flight[0][1]
            if one.settings.reduce.hook is not None or _has_hooks(one.unit):
                return
            self._advance()

    def end(self) -> None:
        """The backward is over: reduce what is left in order, wait for everything, agree on what was used."""
        with plain_access(), torch.no_grad():
            while self._expected:
                self._issue(self._expected.popleft())
            for one in sorted(self._ready.values(), key=lambda one: one.index):
                if has_gradients(one.unit):
                    self._issue(one)
            while self.in_flight:
                self._advance()
            while self._replicating:
                self._deliver(*self._replicating.popleft())
            self._settle()
            given = self._use.agree([one.unit for one in self.units])
        self._run_hooks(given)
        self._active = False

    def _settle(self) -> None:
        for one in self.units:
            for bucket in one.unit.buckets:
                if bucket.home is not None:
                    bucket.home.settle()

    def share(self, in_flight: InFlight) -> None:
        """Use `in_flight` from now on, together with other roots."""
        if in_flight is not self.in_flight:
            while self.in_flight:
                self._advance()
            self.in_flight = in_flight

    def reset(self) -> None:
        """After an exception: nothing is in flight, and nobody is expected."""
        for entry in [entry for entry in self.in_flight if entry[0] is self]:  # not those of roots that share it
            self.in_flight.remove(entry)
            entry[2].drop()
        for _, reduction in self._replicating:
            reduction.drop()
        self._replicating.clear()
        self._expected.clear()
        self._ready.clear()
        self._ran.clear()
        self._use.reset()
        self._active = False


def _has_hooks(unit: Unit) -> bool:
    return any(
        [
            getattr(m.sharded, "_post_accumulate_grad_hooks", None) or m.sharded._backward_hooks
            for bucket in unit.buckets
            for m in bucket.members
        ]
    )
