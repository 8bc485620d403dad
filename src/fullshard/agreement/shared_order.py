"""An order of units that all ranks share, for passes in which ranks run different units (`unused="zeros"`).

A rank may skip units: it still gathers and frees them in step with the others, and takes part in their reductions with
zeros. In the first pass of a kind ranks announce each unit before they begin or end it; one of the announced units is
chosen, and the ranks that want a different one pass over it (`Merging`). The result is a list of tokens of which every
rank's own list is a subsequence, completed by the units that no rank ran. Later passes follow it with a cursor, without
communication: a rank that reaches a token first passes over those before it.

Backwards follow the shared order in reverse (`runtime/trace.py`). That does not work for units that a backward runs
forward again (activation checkpointing around several of them): a rank gathers all of these before it reduces the
first, which ranks that skipped some of them cannot foresee. So with `check="every"` nothing is foreseen, in backwards
either: before every gather and reduction ranks announce what they want next, and all do the same
(`chosen_in_backward`). Ranks that wanted something else take part: in a gather without using it, in a reduction with
the gradients they have, or zeros. Units are reduced once the backward is over on all ranks, as ranks may reach them in
different orders; until then whole gradients stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..comm import Comm
from ..forms import Member
from ..mesh import MeshAxes
from ..watcher import END, GATHER, RANK, REDUCE, REGATHER, VERB_BITS, word
from .exchange import rows_of_all
from .log import ENTER, LEAVE, VERB
from .messages import out_of_shared_order


class SharedOrder:
    """See the module's docstring. One per root, instead of `FirstPass`, which is for ranks that run the same units.

    Args:
        axes: the mesh whose ranks share the order.
        names: of all units under the root.
        comm: collectives.
        always: whether ranks announce what they run in every pass, and in backwards: with `check="every"`.
        pass_over: begins or ends a unit that this rank does not run: takes `ENTER` or `LEAVE`, and its index.
        take_part: does in a backward what other ranks want next: takes `GATHER`, to run its forward again, `REGATHER`
            or `REDUCE`, and a unit's index.

    Attributes:
        active: whether units must report where they begin and end.
    """

    def __init__(
        self,
        axes: MeshAxes,
        names: Sequence[str],
        comm: Comm,
        always: bool,
        pass_over: Callable[[int, int], None],
        take_part: Callable[[int, int], None],
    ) -> None:
        self._axes, self._names, self._comm, self._always = axes, names, comm, always
        self._pass_over, self._take_part = pass_over, take_part
        self.active = False
        self._kind = -1
        self._orders: dict[int, list[int]] = {}  # tokens, by kind of pass
        self._merging: Merging | None = None  # builds the order of the current pass
        self._at = 0  # the cursor in the order of this kind of pass
        self._begun: dict[int, int] = {}  # by unit, its rank in the order of forwards since the last backward

    @property
    def in_step(self) -> SharedOrder | None:
        """This object if backwards announce every action; None if they follow the forward's order."""
        return self if self._always else None

    def begin(self, kind: int, first: bool) -> None:
        """Begin a pass; see `FirstPass`."""
        self._kind, self._at = kind, 0
        self._merging = None if kind in self._orders else Merging(self._axes.world)
        self.active = True

    def enter(self, index: int) -> bool:
        """Catch up with the shared order before a unit is gathered for its forward.

        Returns:
            False: weights are not compared.

        Raises:
            DivergenceError: the shared order is known, and the unit does not begin here.
        """
        self._come_to(word(ENTER, index))
        return False

    def written(self, index: int, leads_back: bool) -> list[Member]:
        """Catch up with the shared order after a unit's forward; returns []: ranks do not compare values.

        Raises:
            DivergenceError: the shared order is known, and the unit does not end here.
        """
        self._come_to(word(LEAVE, index))
        return []

    def goes_back(self, index: int) -> bool:
        """Whether backwards visit a unit on every rank: always."""
        return True

    def end(self) -> None:
        """End the pass."""
        if self._merging is not None:
            tokens = self._merging.tokens
            if not self._always:  # otherwise no pass follows this order
                self._orders[self._kind] = completed(tokens, parents_of(self._names))
            elif torch.is_grad_enabled():
                for token in tokens:
                    if token & VERB == ENTER:
                        self._begun.setdefault(token >> VERB_BITS, len(self._begun))
        self.stop()

    def stop(self) -> None:
        """Stop: the pass is over, or an exception ended it."""
        self._merging, self.active = None, False

    def forget(self) -> None:
        """Discard everything that ranks learned together."""
        self._orders.clear()
        self._begun.clear()

    def come_to(self, verb: int, index: int) -> None:
        """Take part in other ranks' actions in a backward until all ranks agree on this action. Collective.

        Args:
            verb: `GATHER` (to run a unit's forward again), `REGATHER`, `REDUCE`, or `END`: nothing is left.

        Raises:
            DivergenceError: other ranks are gone.
        """
        self._agree_on(word(verb, index), partial(chosen_in_backward, begun=self._begun), self._take_part)

    def _come_to(self, token: int) -> None:
        """Pass over the units that other ranks run before this token."""
        self.active = False  # units that are passed over report nothing
        if self._merging is not None:
            self._agree_on(token, self._merging.chosen, self._pass_over)
        else:
            order, start = self._orders[self._kind], self._at
            try:
                at = order.index(token, start)
            except ValueError:
                raise out_of_shared_order(self._names[token >> VERB_BITS]) from None
            self._at = at + 1
            for passed in order[start:at]:
                self._pass_over(passed & VERB, passed >> VERB_BITS)
        self.active = True

    def _agree_on(self, token: int, choose: Callable[[Sequence[int]], int], act: Callable[[int, int], None]) -> None:
        """Do what ranks choose, until they choose this token. One collective per choice."""
        while (chosen := choose(self._wanted(token))) != token:
            act(chosen & VERB, chosen >> VERB_BITS)

    def _wanted(self, token: int) -> list[int]:
        """The token that each rank wants next. Collective."""
        RANK.talks("shared order")
        rows = rows_of_all([(token,)], self._axes.spanning, self._comm, self._axes.device)
        return [wanted for (wanted,) in rows]


def chosen_in_backward(wanted: Sequence[int], begun: dict[int, int]) -> int:
    """Choose the next token in a backward.

    Gathers come first: ranks that want to reduce are done with their own backward. Of units whose forward runs again,
    the first to begin in the forward comes first; of others, the last, since ranks that run them will want them in
    this order. Reductions follow by index, the order in which every rank requests them.

    Args:
        wanted: each rank's token.
        begun: by unit, its rank in the order of forwards.

    >>> begun = {0: 0, 1: 1, 2: 2}
    >>> chosen_in_backward([word(REDUCE, 2), word(GATHER, 2), word(GATHER, 1)], begun) == word(GATHER, 1)
    True
    >>> chosen_in_backward([word(REDUCE, 2), word(REDUCE, 1), word(END, 0)], begun) == word(REDUCE, 1)
    True
    """
    for verb, sign in ((GATHER, -1), (REGATHER, 1)):
        units = [token >> VERB_BITS for token in wanted if token & VERB == verb]
        if units:
            return word(verb, max(units, key=lambda index: (sign * begun.get(index, -1), index)))
    return min([token for token in wanted if token & VERB == REDUCE], default=word(END, 0))


class Merging:
    """Builds the shared order token by token, the same on every rank.

    >>> def chosen(*wanted):
    ...     token = merging.chosen([word(verb, unit) for verb, unit in wanted])
    ...     return "leave" if token & VERB == LEAVE else "enter", token >> VERB_BITS
    >>> merging = Merging(2)
    >>> chosen((ENTER, 0), (ENTER, 0))
    ('enter', 0)
    >>> chosen((ENTER, 1), (ENTER, 2)), chosen((LEAVE, 1), (ENTER, 2))
    (('enter', 1), ('leave', 1))
    >>> chosen((LEAVE, 0), (ENTER, 2))
    ('enter', 2)
    """

    def __init__(self, world: int) -> None:
        self.tokens: list[int] = []
        self._open: list[frozenset[int]] = []  # per open unit, the ranks that really run it; innermost last
        self._everyone = frozenset(range(world))

    def chosen(self, wanted: Sequence[int]) -> int:
        """Choose the next token: the lowest unit that any rank inside the innermost open unit wants to begin.

        The innermost unit ends only when all ranks inside it want to end it.
        """
        inside = self._open[-1] if self._open else self._everyone
        begins = [token for rank, token in enumerate(wanted) if rank in inside and token & VERB == ENTER]
        token = min(begins) if begins else wanted[min(inside)]
        self.tokens.append(token)
        if begins:
            self._open.append(frozenset(rank for rank, want in enumerate(wanted) if want == token))
        else:
            self._open.pop()
        return token


def completed(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Insert the units that no rank ran, each inside its parent and before the next unit in module order.

    Args:
        parents: by index of a unit, the unit around it; -1 for the root. Units come after their parents.

    >>> order = completed([word(ENTER, 0), word(ENTER, 2), word(LEAVE, 2), word(LEAVE, 0)], [-1, 0, 0, 0])
    >>> [token >> VERB_BITS for token in order]
    [0, 1, 1, 2, 2, 3, 3, 0]
    """
    order = list(tokens)
    under = {order[0] >> VERB_BITS}
    for unit in range(min(under) + 1, len(parents)):
        if parents[unit] not in under:
            continue
        under.add(unit)
        if word(ENTER, unit) in order:
            continue
        begin = order.index(word(ENTER, parents[unit]))
        end = order.index(word(LEAVE, parents[unit]), begin)
        later = [at for at in range(begin + 1, end) if order[at] & VERB == ENTER and order[at] > word(ENTER, unit)
                 and parents[order[at] >> VERB_BITS] == parents[unit]]  # fmt: skip
        at = later[0] if later else end
        order[at:at] = [word(ENTER, unit), word(LEAVE, unit)]
    return order


def parents_of(names: Sequence[str]) -> list[int]:
    """By index, the unit around each unit, derived from names relative to the root; "" is the root.

    >>> parents_of(["", "a", "a.b", "ab"])
    [-1, 0, 1, 0]
    """
    parents = []
    for index, name in enumerate(names):
        above = [i for i in range(index) if not names[i] or name.startswith(f"{names[i]}.")]
        parents.append(max(above, key=lambda i: len(names[i])) if above else -1)
    return parents
