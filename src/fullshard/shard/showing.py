"""Which parameters modules show: a unit's sharded ones, or the unsharded ones while it is gathered.

What users assign to a module meanwhile is theirs. It stands where they put it whenever sharded parameters are shown, so
that the next forward looks at it, and takes it over or refuses it, as what was assigned between steps.
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
"""Of our hook among a module's forward pre-hooks: it comes and goes with every pass, at the price of an entry."""


class ShowPlan:
    """What shows the parameters of a unit's members, by place, and what is compared before. Holds no memory of its own.

    Args:
        members: of all buckets.

    Attributes:
        places: where a parameter is registered, and whose that is.
        read: what is there now.
        sharded, unsharded: what is to be there while the unit is sharded, and while it is gathered.
        show, hide: what puts the unsharded parameters there, and the sharded ones; a call for each module.
    """

    __slots__ = ("hide", "places", "read", "sharded", "show", "unsharded")

    def __init__(self, members: Sequence[Member]) -> None:
        self.places: list[tuple[Place, Member]] = [(place, member) for member in members for place in member.places]
        self.read: list[Callable[[], Any]] = [place.reader for place, _ in self.places]
        self.sharded: list[Any] = [m.sharded if m.stand_in is None else m.stand_in for _, m in self.places]
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
        takes: the turns of its buckets' memory, where there are streams.
        unsharded: whether modules show the unsharded parameters.
        summoned: whether they show whole parameters that the user asked for: the unit takes nothing of it over.
        whole_here: whether it does so on this rank.
        generation: how often parameters, or where they are registered, have become others.
        plan: what shows parameters; None: to be made.
        is_planned: whether the plan serves the next time they are shown.
        covered: of places where users had put something before unsharded ones were shown: number, and what it was.
    """

    __slots__ = (
        *("_buckets", "_guard", "covered", "generation", "is_planned", "plan", "summoned", "takes", "unsharded"),
        "whole_here",
    )

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
        """Parameters, or where they are registered, are others now."""
        self.is_planned = False
        self.takes = [bucket.turns.take for bucket in self._buckets if bucket.turns is not ONE_STREAM]
        self.generation += 1

    def _made_plan(self) -> ShowPlan:
        plan, self.is_planned = ShowPlan([member for bucket in self._buckets for member in bucket.members]), True
        if self._guard is not None:
            hooks, hook = self._guard
            plan.show.append(partial(hooks.pop, _HOOK_KEY, None))
            plan.hide.append(partial(hooks.update, {_HOOK_KEY: hook}))
        self.plan = plan
        return plan

    def summon(self, summoned: bool, here: bool = False) -> None:
        """Whole parameters that the user asked for are shown, on this rank if `here`; or no more."""
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
        """Register the unsharded parameters on the modules, if that is not so yet; the unit must be gathered.

        Returns:
            The first parameter in whose place users had put something since sharded ones were shown; that is put back
            by `show_sharded`.
        """
        if self.takes:
            drain(map(call, self.takes))
        if self.unsharded:
            return None
        plan = self.plan
        if plan is None or not self.is_planned:
            plan = self._made_plan()
        first = None
        if not all(map(is_, map(call, plan.read), plan.sharded)):
            first = self._cover(plan)
        drain(map(call, plan.show))
        self.unsharded = True
        return first

    def _cover(self, plan: ShowPlan) -> Member:
        """Note what users had put in the places of sharded parameters; returns the first such parameter."""
        for index, (place, _) in enumerate(plan.places):
            if plan.read[index]() is not plan.sharded[index]:
                self.covered.append((index, place.registered()))
        return plan.places[self.covered[0][0]][1]

    def show_sharded(self) -> Member | None:
        """Register the sharded parameters on the modules, and what users put in their places, if that is not so yet.

        Returns:
            The first parameter in whose place users had put something since unsharded ones were shown; it stays there.
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
        """As `show_sharded`, where users have put something."""
        first = None
        for index, (place, member) in enumerate(plan.places):
            if plan.read[index]() is plan.unsharded[index]:
                place.show(plan.sharded[index])
            else:
                first = first or member
        covered, self.covered = self.covered, []
        for index, found in covered:
            if plan.read[index]() is plan.sharded[index]:  # users have put nothing there since
                plan.places[index][0].register(found)
        self._hook(True)
        return first

    def disturbed(self) -> bool:
        """Whether unsharded parameters are shown, and users have put something else in the place of one."""
        if not self.unsharded or self.plan is None or not self.is_planned:
            return False
        return bool(self.covered) or not all(map(is_, map(call, self.plan.read), self.plan.unsharded))
