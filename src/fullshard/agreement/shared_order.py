"""The order of a pass in which ranks run different units: one that all of them go through. Pure.

A step is a unit's beginning or end. In the first pass of a kind ranks say before every step which one is next for them;
one is chosen, and the ranks that want another one go through it in passing (`chosen`). The outcome is one order that
every rank's own is a part of, completed by the units that no rank ran. Later passes follow it without a word: a rank
that comes to a step goes through those before it first (`Shared.until`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Step = tuple[int, bool]
"""A unit's index in module order, and whether it is its end."""


class Merging:
    """Makes the order, step by step, on every rank alike.

    >>> merging = Merging(1)
    >>> merging.chosen([(0, False)])
    (0, False)
    >>> merging = Merging(2)
    >>> _ = merging.chosen([(0, False), (0, False)])
    >>> merging.chosen([(1, False), (2, False)]), merging.chosen([(1, True), (2, False)])
    ((1, False), (1, True))
    >>> merging.chosen([(0, True), (2, False)])
    (2, False)
    """

    def __init__(self, world: int) -> None:
        self.steps: list[Step] = []
        self._open: list[tuple[int, frozenset[int]]] = []  # units, and the ranks that really run them; innermost last
        self._everyone = frozenset(range(world))

    def chosen(self, wanted: Sequence[Step]) -> Step:
        """The next step, given what each rank wants: of the ranks inside the innermost unit, the first unit to begin.

        Only when all of these want to end that unit it is ended.
        """
        inside = self._open[-1][1] if self._open else self._everyone
        begins = [step for rank, step in enumerate(wanted) if rank in inside and not step[1]]
        step = min(begins) if begins else wanted[min(inside)]
        self.steps.append(step)
        if step[1]:
            self._open.pop()
        else:
            self._open.append((step[0], frozenset(rank for rank, one in enumerate(wanted) if one == step)))
        return step


def completed(steps: Sequence[Step], parents: Sequence[int]) -> list[Step]:
    """The order with the units that nobody ran, each inside its parent and before the next unit in module order.

    Args:
        parents: by index of a unit, the unit around it; -1 of the root. Units come after their parents.

    >>> completed([(0, False), (2, False), (2, True), (0, True)], [-1, 0, 0, 0])
    [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True), (0, True)]
    """
    order = list(steps)
    top = order[0][0]
    under = {top}
    for unit in range(top + 1, len(parents)):
        if parents[unit] not in under:
            continue
        under.add(unit)
        if (unit, False) in order:
            continue
        begin = order.index((parents[unit], False))
        end = order.index((parents[unit], True), begin)
        later = [at for at in range(begin + 1, end) if not order[at][1] and order[at][0] > unit
                 and parents[order[at][0]] == parents[unit]]  # fmt: skip
        at = later[0] if later else end
        order[at:at] = [(unit, False), (unit, True)]
    return order


def parents_of(names: Sequence[str]) -> list[int]:
    """By index, the unit around each, by names from the root; "" is the root's.

    >>> parents_of(["", "a", "a.b", "ab"])
    [-1, 0, 1, 0]
    """
    found = []
    for index, name in enumerate(names):
        above = [i for i in range(index) if not names[i] or name.startswith(f"{names[i]}.")]
        found.append(max(above, key=lambda i: len(names[i])) if above else -1)
    return found


class Shared:
    """One pass along a known order.

    >>> along = Shared([(0, False), (1, False), (1, True), (2, False), (2, True), (0, True)])
    >>> list(along.until((0, False))), list(along.until((2, False))), list(along.until((2, True)))
    ([], [(1, False), (1, True)], [])
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self._at = steps, 0

    def holds(self, step: Step) -> bool:
        """Whether this step is still ahead."""
        try:
            self.steps.index(step, self._at)
        except ValueError:
            return False
        return True

    def until(self, step: Step) -> Iterator[Step]:
        """The steps before this one, which then is done with too."""
        while (next_ := self.steps[self._at]) != step:
            self._at += 1
            yield next_
        self._at += 1
