"""Which parameters modules show: a unit's sharded ones, or the unsharded ones while it is gathered.

What users assign to a module meanwhile is theirs. It stands where they put it whenever sharded parameters are shown, so
that the next forward looks at it, and takes it over or refuses it, as what was assigned between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..forms import Member, Place

_HOOK_KEY = "fullshard"
"""Of our hook among a module's forward pre-hooks: it comes and goes with every pass, at the price of an entry."""


class Showing:
    """See the module's docstring. Owns no tensors.

    Attributes:
        unsharded: whether modules show the unsharded parameters.
        summoned: whether they show whole parameters that the user asked for: the unit takes nothing of it over.
        whole_here: whether it does so on this rank.
        generation: how often parameters, or where they are registered, have become others.
    """

    __slots__ = ("_covered", "_guard", "_places", "_switches", "generation", "summoned", "unsharded", "whole_here")

    def __init__(self) -> None:
        self.unsharded = self.summoned = self.whole_here = False
        self.generation = 0
        self._switches: list[tuple[Any, str, Any, Any]] | None = None  # targets and names, what either form shows there
        self._places: list[tuple[Place, Member]] = []  # of the switches
        self._covered: list[
            tuple[int, Any]
        ] = []  # by switch: what users had put there before unsharded ones were shown
        self._guard: tuple[dict[Any, Any], Any] | None = None  # a module's forward pre-hooks, and ours

    def forget(self) -> None:
        """Parameters, or where they are registered, are others now."""
        self._switches = None
        self.generation += 1

    def summon(self, summoned: bool, here: bool = False) -> None:
        """Whole parameters that the user asked for are shown, on this rank if `here`; or no more."""
        self.summoned, self.whole_here = summoned, here
        self._hook(not here and not self.unsharded)

    def guard(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook` before each forward of `module` that begins while it shows sharded parameters."""
        self._guard = module._forward_pre_hooks, hook
        self._hook(not self.unsharded)

    def _hook(self, there: bool) -> None:
        if self._guard is not None:
            hooks, hook = self._guard
            if there:
                hooks[_HOOK_KEY] = hook
            else:
                hooks.pop(_HOOK_KEY, None)

    def show_unsharded(self, members: Callable[[], Sequence[Member]]) -> Member | None:
        """Register the unsharded parameters on the modules.

        Args:
            members: the unit's; asked for once, and again after `forget`.

        Returns:
            The first parameter in whose place users had put something since sharded ones were shown.
        """
        if self.unsharded:
            return None
        if self._switches is None:
            self._places = [(place, member) for member in members() for place in member.places]
            self._switches = [
                (p.target, p.name, m.unsharded, m.sharded if m.stand_in is None else m.stand_in)
                for p, m in self._places
            ]
        first = None
        for index, (target, name, unsharded, sharded) in enumerate(self._switches):
            if target.get(name) is not sharded:
                place, member = self._places[index]
                self._covered.append((index, place.registered()))
                first = first or member
            target[name] = unsharded
        self.unsharded = True
        if self._guard is not None:
            self._hook(False)
        return first

    def show_sharded(self) -> Member | None:
        """Register the sharded parameters on the modules, and what users put in their places.

        Returns:
            The first parameter in whose place users had put something since unsharded ones were shown.
        """
        if not self.unsharded:
            return None
        assert self._switches is not None
        first = None
        for index, (target, name, unsharded, sharded) in enumerate(self._switches):
            if target.get(name) is unsharded:
                target[name] = sharded
            else:
                first = first or self._places[index][1]
        if self._covered:
            covered, self._covered = self._covered, []
            for index, found in covered:
                target, name, _, sharded = self._switches[index]
                if target.get(name) is sharded:  # users have put nothing there since
                    self._places[index][0].register(found)
        self.unsharded = False
        if self._guard is not None:
            self._hook(True)
        return first

    def disturbed(self) -> bool:
        """Whether unsharded parameters are shown, and users have put something else in the place of one."""
        if not self.unsharded or self._switches is None:
            return False
        return bool(self._covered) or any([target.get(name) is not mine for target, name, mine, _ in self._switches])
