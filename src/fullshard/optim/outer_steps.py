"""Which calls of an optimizer's `step` are the program's own, seen from hooks before and after every step."""

from __future__ import annotations

import sys
import traceback


class OuterSteps:
    """Steps in progress, by their depth on the stack.

    An optimizer may step another, and torch runs hooks again in `super().step`. No hook runs after a step that raised
    an error: such a step has ended if the next one is no deeper on the stack.
    """

    def __init__(self) -> None:
        self._depths: list[int] = []

    def begin(self) -> bool:
        """Called by a hook before a step; returns whether no other step is around it."""
        depth = self._leave()
        self._depths.append(depth)
        return len(self._depths) == 1

    def end(self) -> bool:
        """Called by a hook after a step; returns whether no other step was around it."""
        self._leave()
        return not self._depths

    def _leave(self) -> int:
        depth = sum(1 for _ in traceback.walk_stack(sys._getframe(2)))
        self._depths = [other for other in self._depths if other < depth]
        return depth
