"""Backwards in which ranks do different things: each says what comes next for it, and all of them do one of these.

With `unused="zeros"` ranks go back over the order of the forward, which they share (`runtime/trace.py`). That does not
serve units that a backward runs forward once more (activation checkpointing around several of them): a rank gathers
all of these before it reduces the first, of which ranks that left some out know nothing. So with `check="every"`
nothing is foreseen in backwards either: before every gather and reduction ranks say what they want next, in a small
collective, and go on with the same one. Who did not want it takes part in passing: in a gather for nothing, in a
reduction with the gradients it has, or zeros. Units are reduced once a backward is over on all ranks, as these may
come to them in different orders: until then whole gradients are held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..comm import Comm
from ..mesh import MeshAxes
from ..watcher import END, GATHER, RANK, REDUCE, REGATHER
from .aside import rows_of_all
from .shared_order import Step

Wish = tuple[int, int]
"""What a rank is about to do, and a unit's index: `GATHER` (to run its forward again), `REGATHER`, `REDUCE`, `END`."""


def chosen(wishes: Sequence[Wish], begun: dict[int, int]) -> Wish:
    """What is done next.

    Gathers first: ranks that want to reduce are done with their own backward. Of units that run again those that
    began first in the forward, of others those that began last, as ranks that run them will want them in this order.
    Reductions in the order in which every rank asks for them, by index.

    Args:
        wishes: one per rank.
        begun: by unit, when its forward began.

    >>> begun = {0: 0, 1: 1, 2: 2}
    >>> chosen([(REDUCE, 2), (GATHER, 2), (GATHER, 1)], begun) == (GATHER, 1)
    True
    >>> chosen([(REDUCE, 2), (REDUCE, 1), (END, 0)], begun) == (REDUCE, 1)
    True
    """
    for verb, sign in ((GATHER, -1), (REGATHER, 1)):
        units = [index for wanted, index in wishes if wanted == verb]
        if units:
            return verb, max(units, key=lambda index: (sign * begun.get(index, -1), index))
    reduced = [index for wanted, index in wishes if wanted == REDUCE]
    return (REDUCE, min(reduced)) if reduced else (END, 0)


class InStep:
    """See the module's docstring. One per root.

    Args:
        axes: over which ranks talk.
        comm: collectives.
        take_part: does what other ranks want, on this one.
    """

    def __init__(self, axes: MeshAxes, comm: Comm, take_part: Callable[[int, int], None]) -> None:
        self._axes, self._comm, self._take_part = axes, comm, take_part
        self._begun: dict[int, int] = {}

    def ran(self, steps: Sequence[Step]) -> None:
        """A pass went through these steps, on every rank."""
        for unit, ends in steps:
            if not ends:
                self._begun.setdefault(unit, len(self._begun))

    def come_to(self, verb: int, index: int) -> None:
        """Take part in what comes before this, until all that is left is to do it. Collective.

        Raises:
            DivergenceError: other ranks are gone.
        """
        mine = (verb, index)
        while (one := chosen(self._wishes(mine), self._begun)) != mine:
            self._take_part(*one)

    def forget(self) -> None:
        """The backward is over: the passes that it went back over are, too."""
        self._begun.clear()

    def _wishes(self, mine: Wish) -> list[Wish]:
        RANK.talks("shared order")
        rows = rows_of_all([mine], self._axes.all, self._comm, self._axes.device)
        return [(verb, index) for verb, index in rows]
