"""The order in which units run, learned from one pass and used to prefetch in the next. Pure.

A pass is a forward or a backward. While one runs, `Order.visit` is told each unit as it comes and answers which units
come next, by the last complete pass of the same kind. An order that changes is followed: predictions stop for the
rest of that pass, and the new order is what the next one goes by. Nothing but speed depends on a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


class Order:
    """The units of one kind of pass, by index, in the order of their first gather; repeats are kept.

    >>> order = Order()
    >>> for unit in (0, 1, 2):
    ...     _ = order.visit(unit)
    >>> order.finish()
    >>> order.visit(0, depth=1), order.visit(1, depth=2)
    ((1,), (2,))
    """

    __slots__ = ("_at", "_follows", "_known", "_seen")

    def __init__(self, guess: Sequence[int] = ()) -> None:
        self._known: tuple[int, ...] = tuple(guess)
        self._seen: list[int] = []
        self._at = 0
        self._follows = bool(guess)

    @property
    def known(self) -> tuple[int, ...]:
        """The last complete pass, or the guess until there is one."""
        return self._known

    def suggest(self, guess: Sequence[int]) -> None:
        """Use `guess` until a pass is complete."""
        if not self._known and not self._seen:
            self._known, self._follows = tuple(guess), bool(guess)

    def visit(self, unit: int, depth: int = 1) -> tuple[int, ...]:
        """Note that `unit` is next, and name the up to `depth` units expected after it."""
        self._seen.append(unit)
        if not self._follows:
            return ()
        known, at = self._known, self._at
        if at >= len(known) or known[at] != unit:
            self._follows = False
            return ()
        self._at = at = at + 1
        return known[at : at + depth]

    def departure(self) -> tuple[int | None, int | None] | None:
        """Where the pass that ends now left the known order: the unit expected there and the one that came, if any."""
        if not self._known or (self._follows and self._at == len(self._known)):
            return None
        pairs = zip_longest(self._known, self._seen)
        return next(((known, seen) for known, seen in pairs if known != seen), None)

    def finish(self) -> None:
        """The pass is complete: what was seen is what the next pass will be expected to do."""
        if self._seen:
            if not (self._follows and self._at == len(self._known)):
                self._known = tuple(self._seen)
            self._seen.clear()
        self.restart()

    def lose(self) -> None:
        """The pass was broken off, maybe on this rank alone: an order that is new by then is what other ranks go by."""
        if self._known and not self._follows:
            self.finish()
        else:
            self.restart()

    def restart(self) -> None:
        """Forget a pass that was broken off."""
        self._seen.clear()
        self._at = 0
        self._follows = bool(self._known)


class Orders:
    """The orders of all kinds of passes under one root.

    A kind of forward is named by the unit that it begins at and whether it builds a graph.

    Attributes:
        forward: of the pass that runs now, or ran last.
        backward: of backwards.
        told: whether users were told that an order changed.
    """

    __slots__ = ("_forwards", "backward", "forward", "told")

    def __init__(self) -> None:
        self._forwards: dict[tuple[int, bool], Order] = {}
        self.forward, self.backward = Order(), Order()
        self.told = False

    def begin_forward(self, top: int, with_grad: bool) -> bool:
        """A pass begins; returns whether it is the first of its kind to be complete."""
        self.forward = self._forwards.setdefault((top, with_grad), Order())
        self.forward.restart()
        return not self.forward.known

    def end_forward(self, with_grad: bool) -> None:
        """The pass is complete; a backward will go the other way."""
        self.forward.finish()
        if with_grad:
            self.backward.suggest(self.forward.known[::-1])

    def forget(self) -> None:
        """Begin anew: the next pass of each kind is the first."""
        self._forwards.clear()
        self.forward, self.backward = Order(), Order()

    def restart(self) -> None:
        """Forget what was broken off."""
        for order in (*self._forwards.values(), self.backward):
            order.restart()
