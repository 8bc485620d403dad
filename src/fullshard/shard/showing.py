"""Which parameters modules show: a unit's sharded ones, or the unsharded ones while it is gathered.

A parameter that users assign while unsharded ones are shown stays assigned: it is in its place whenever sharded
parameters are shown, so the next forward takes it over or refuses it, as if it had been assigned between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call, is_
from typing import Any

from torch import nn

from ..comm import ONE_STREAM
from ..containers import drain
from ..forms import Member, Place
from .bucket import Bucket

_HOOK_KEY = "fullshard"
"""Key of our hook among a module's forward pre-hooks; adding and removing it each pass costs one dict entry."""


class ShowPlan:
    """The calls that show a unit's parameters, and the comparisons before them. Holds no memory of its own.

    Args:
        members: members of all buckets.

    Attributes:
        places: every place where a parameter is registered, with its member.
        read: by place, returns the object registered there.
        sharded, unsharded: by place, the expected object while the unit is sharded, and while it is gathered.
        show, hide: calls that register the unsharded parameters, and the sharded ones; one per module.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.places: list[tuple[Place, Member]] = [(place, member) for member in members for place in member.places]
        self.read: list[Callable[[], Any]] = [place.reader for place, _ in self.places]
        self.sharded: list[Any] = [member.shown for _, member in self.places]
        self.unsharded: list[Any] = [m.unsharded for _, m in self.places]
        self.show: list[Callable[[], object]] = self._writes(self.unsharded)
        self.hide: list[Callable[[], object]] = self._writes(self.sharded)

    def _writes(self, shown: Sequence[Any]) -> list[Callable[[], object]]:
        of_modules: dict[int, tuple[Any, dict[str, Any]]] = {}
        for (place, _), tensor in zip(self.places, shown, strict=True):
            of_modules.setdefault(id(place.target), (place.target, {}))[1][place.name] = tensor
        return [partial(target.update, tensors) for target, tensors in of_modules.values()]


class Showing:
    """See the module's docstring. Owns no tensors.

    Args:
        buckets: the unit's own list of them.

    Attributes:
        takes: take the turns of the buckets' memory, where there are streams.
        unsharded: whether modules show the unsharded parameters.
        summoned: whether modules show whole parameters at the user's request: the unit then takes nothing over.
        whole_here: whether they do so on this rank.
        generation: how often parameters, or their places, have changed.
        plan: the plan that shows parameters; None: not created yet.
        is_planned: whether the plan is valid for the next time.
        covered: places to which users had assigned before unsharded parameters were shown: index, and the assigned
            object.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.takes: list[Callable[[], object]] = []
        self.unsharded = self.summoned = self.whole_here = False
        self.generation = 0
        self.plan: ShowPlan | None = None
        self.is_planned = False
        self.covered: list[tuple[int, Any]] = []
        self._guard: tuple[dict[Any, Any], Any] | None = None  # a module's forward pre-hooks, and ours

    def forget(self) -> None:
        """Drop the plan: parameters, or their places, have changed."""
        self.is_planned = False
        self.takes = [bucket.turns.take for bucket in self._buckets if bucket.turns is not ONE_STREAM]
        self.generation += 1

    def _new_plan(self) -> ShowPlan:
        plan, self.is_planned = ShowPlan([member for bucket in self._buckets for member in bucket.members]), True
        if self._guard is not None:
            hooks, hook = self._guard
            plan.show.append(partial(hooks.pop, _HOOK_KEY, None))
            plan.hide.append(partial(hooks.update, {_HOOK_KEY: hook}))
        self.plan = plan
        return plan

    def summon(self, summoned: bool, here: bool = False) -> None:
        """Note that whole parameters are shown at the user's request, on this rank if `here`; or no longer."""
        self.summoned, self.whole_here = summoned, here
        self._hook(not here and not self.unsharded)

    def guard(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook` before each forward of `module` that begins while it shows sharded parameters."""
        self._guard, self.is_planned = (module._forward_pre_hooks, hook), False
        self._hook(not self.unsharded)

    def _hook(self, there: bool) -> None:
        if self._guard is not None:
            hooks, hook = self._guard
            if there:
                hooks[_HOOK_KEY] = hook
            else:
                hooks.pop(_HOOK_KEY, None)

    def show_unsharded(self) -> Member | None:
        """Register the unsharded parameters on the modules, if they are not shown; the unit must be gathered.

        Returns:
            The first parameter whose place users had assigned to since sharded ones were shown; `show_sharded` restores
            the assigned object.
        """
        if self.takes:
            drain(map(call, self.takes))
        if self.unsharded:
            return None
        plan = self.plan
        if plan is None or not self.is_planned:
            plan = self._new_plan()
        first = None
        if not all(map(is_, map(call, plan.read), plan.sharded)):
            first = self._cover(plan)
        drain(map(call, plan.show))
        self.unsharded = True
        return first

    def _cover(self, plan: ShowPlan) -> Member:
        """Record the objects that users assigned to places of sharded parameters; return the first such parameter."""
        for index, (place, _) in enumerate(plan.places):
            if plan.read[index]() is not plan.sharded[index]:
                self.covered.append((index, place.registered()))
        return plan.places[self.covered[0][0]][1]

    def show_sharded(self) -> Member | None:
        """Register the sharded parameters, or the objects that users assigned, if unsharded ones are shown.

        Returns:
            The first parameter whose place users had assigned to since unsharded ones were shown; that object stays.
        """
        plan = self.plan
        if not self.unsharded or plan is None:
            return None
        self.unsharded = False
        if self.covered or not all(map(is_, map(call, plan.read), plan.unsharded)):
            return self._uncover(plan)
        drain(map(call, plan.hide))
        return None

    def _uncover(self, plan: ShowPlan) -> Member | None:
        """Like `show_sharded`, when users have assigned to a place."""
        first = None
        for index, (place, member) in enumerate(plan.places):
            if plan.read[index]() is plan.unsharded[index]:
                place.show(plan.sharded[index])
            else:
                first = first or member
        covered, self.covered = self.covered, []
        for index, assigned in covered:
            if plan.read[index]() is plan.sharded[index]:  # users have not assigned to it since
                plan.places[index][0].register(assigned)
        self._hook(True)
        return first

    def disturbed(self) -> bool:
        """Whether unsharded parameters are shown, and users have assigned to the place of one."""
        if not self.unsharded or self.plan is None or not self.is_planned:
            return False
        return bool(self.covered) or not all(map(is_, map(call, self.plan.read), self.plan.unsharded))
