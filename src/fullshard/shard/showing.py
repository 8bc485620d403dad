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
    """

    __slots__ = (
        *("_buckets", "_covered", "_guard", "_hide", "_places", "_read", "_sharded", "_show", "_unsharded"),
        *("generation", "summoned", "takes", "unsharded", "whole_here"),
    )

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.takes: list[Callable[[], object]] = []
        self.unsharded = self.summoned = self.whole_here = False
        self.generation = 0
        self._places: list[tuple[Place, Member]] | None = None  # what follows is by place; None: to be made
        self._read: list[Callable[[], Any]] = []  # what is there now
        self._sharded: list[Any] = []  # what sharded units show there
        self._unsharded: list[Any] = []
        self._show: list[Callable[[], object]] = []  # each puts the unsharded parameters of a module there
        self._hide: list[Callable[[], object]] = []
        # Of places where users had put something before unsharded ones were shown: their number, and what it was.
        self._covered: list[tuple[int, Any]] = []
        self._guard: tuple[dict[Any, Any], Any] | None = None  # a module's forward pre-hooks, and ours

    def forget(self) -> None:
        """Parameters, or where they are registered, are others now."""
        self._places = None
        self.takes = [bucket.turns.take for bucket in self._buckets if bucket.turns is not ONE_STREAM]
        self.generation += 1

    def _plan(self) -> None:
        members = [member for bucket in self._buckets for member in bucket.members]
        self._places = [(place, member) for member in members for place in member.places]
        self._read = [place.reader for place, _ in self._places]
        self._sharded = [m.sharded if m.stand_in is None else m.stand_in for _, m in self._places]
        self._unsharded = [m.unsharded for _, m in self._places]
        self._show, self._hide = [], []
        for writes, shown in ((self._show, self._unsharded), (self._hide, self._sharded)):
            of_modules: dict[int, tuple[Any, dict[str, Any]]] = {}
            for (place, _), tensor in zip(self._places, shown, strict=True):
                of_modules.setdefault(id(place.target), (place.target, {}))[1][place.name] = tensor
            writes += [partial(target.update, tensors) for target, tensors in of_modules.values()]

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
        if self._places is None:
            self._plan()
        first = None
        if not all(map(is_, map(call, self._read), self._sharded)):
            first = self._cover()
        drain(map(call, self._show))
        self.unsharded = True
        if self._guard is not None:
            self._hook(False)
        return first

    def _cover(self) -> Member:
        """Note what users had put in the places of sharded parameters; returns the first such parameter."""
        assert self._places is not None
        for index, (place, _) in enumerate(self._places):
            if self._read[index]() is not self._sharded[index]:
                self._covered.append((index, place.registered()))
        return self._places[self._covered[0][0]][1]

    def show_sharded(self) -> Member | None:
        """Register the sharded parameters on the modules, and what users put in their places, if that is not so yet.

        Returns:
            The first parameter in whose place users had put something since unsharded ones were shown; it stays there.
        """
        if not self.unsharded:
            return None
        first = None
        if self._covered or not all(map(is_, map(call, self._read), self._unsharded)):
            first = self._uncover()
        else:
            drain(map(call, self._hide))
        self.unsharded = False
        if self._guard is not None:
            self._hook(True)
        return first

    def _uncover(self) -> Member | None:
        """As `show_sharded`, where users have put something."""
        assert self._places is not None
        first = None
        for index, (place, member) in enumerate(self._places):
            if self._read[index]() is self._unsharded[index]:
                place.show(self._sharded[index])
            else:
                first = first or member
        covered, self._covered = self._covered, []
        for index, found in covered:
            if self._read[index]() is self._sharded[index]:  # users have put nothing there since
                self._places[index][0].register(found)
        return first

    def disturbed(self) -> bool:
        """Whether unsharded parameters are shown, and users have put something else in the place of one."""
        if not self.unsharded or self._places is None:
            return False
        return bool(self._covered) or not all(map(is_, map(call, self._read), self._unsharded))
