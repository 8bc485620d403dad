"""That users changed sharded parameters, so that a backward whose forward saw other values can be refused.

A shard's version counter does not move when an operation on it is dispatched by a tensor subclass, nor when a fused
optimizer steps (torch 2.13); it does when `to_local()`'s result is written to. What is noted here: optimizers' steps,
changes in place of sharded parameters and assignments to their `.data`. Values of units that stay gathered are compared
with their shards besides, exactly, at the beginning of every forward (`Root._drop_stale`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any

import torch

OWNER_KEY = "_fullshard_unit"
"""Where a parameter, sharded or unsharded, keeps a weak reference (`Owner`) to the unit that owns it."""


class Owner(weakref.ref):  # type: ignore[type-arg]
    """The reference. A pickled or copied parameter is no unit's: there it is empty, of a type that any loader takes."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, ()


@dataclass(slots=True)
class Touched:
    """What users' code is known to have done to a unit's shards.

    Attributes:
        changes: how often it has changed them.
        steps: a number that follows from the optimizer steps so far and the settings of each, not from their order:
            optimizers that are stepped in backward are stepped as gradients arrive.
        count: how many there were.
        seen: how many when the last pass began, or a user asked for a gather.
        by: in words, what the last one was.
        moves: how often it has put other storage in their place, perhaps of another dtype.
        assigned: whether the `.data` of a sharded parameter was assigned, and the unit has not taken it over yet.
    """

    changes: int = 0
    steps: int = 0
    count: int = 0
    seen: int = 0
    by: str = "no optimizer"
    moves: int = 0
    assigned: bool = False

    def move(self, changes: int) -> None:
        """Other storage takes the shards' place; it counts for so many changes."""
        self.changes += changes
        self.moves += 1

    def step(self, settings: int, by: str) -> None:
        """An optimizer steps.

        Args:
            settings: a number that stands for its settings.
            by: the optimizer and its settings, in words.
        """
        self.steps = (self.steps + settings * 1_000_003 + 1) % 2_147_483_647
        self.count += 1
        self.by = by


class Untouched:
    """That users have put nothing else in place of what the engine made: compared in C, once a pass.

    Args:
        objects: what reads an object, and the very one that is to be there.
        facts: what reads a value, and what it is to be equal to.

    Attributes:
        objects, originals, facts, values: these, apart.
    """

    __slots__ = ("facts", "objects", "originals", "values")

    def __init__(
        self,
        objects: Iterable[tuple[Callable[[], Any], Any]],
        facts: Iterable[tuple[Callable[[], Any], Any]] = (),
    ) -> None:
        self.objects, self.originals = _unzipped(objects)
        self.facts, self.values = _unzipped(facts)

    def holds(self) -> bool:
        """Whether everything is as it was made."""
        return all_hold([self])


_OBJECTS, _ORIGINALS = attrgetter("objects"), attrgetter("originals")
_FACTS, _VALUES = attrgetter("facts"), attrgetter("values")


def all_hold(every: Sequence[Untouched]) -> bool:
    """Whether each of these holds: asked of all at once, in C."""
    join = chain.from_iterable
    if not all(map(is_, map(call, join(map(_OBJECTS, every))), join(map(_ORIGINALS, every)))):
        return False
    return [*map(call, join(map(_FACTS, every)))] == [*join(map(_VALUES, every))]


def _unzipped(pairs: Iterable[tuple[Callable[[], Any], Any]]) -> tuple[list[Callable[[], Any]], list[Any]]:
    every = list(pairs)
    return [read for read, _ in every], [value for _, value in every]


def owner_of(parameter: torch.Tensor) -> Any:
    """The `Unit` that shards `parameter`, which may be its sharded or its unsharded form; None if none does."""
    reference = parameter.__dict__.get(OWNER_KEY)
    return reference() if reference else None


def mark_view(view: torch.Tensor, of: torch.Tensor) -> None:
    """`view` is of the memory of `of`: changes of it in place are changes of that one's unit."""
    reference = of.__dict__.get(OWNER_KEY)
    if reference is not None:
        view.__dict__[OWNER_KEY] = reference


def give_up_gradient(parameter: Any) -> None:
    """A user set the `.grad` of a sharded parameter to None: what waits for its next reduction goes as well."""
    unit = owner_of(parameter)
    if unit is not None:
        unit.give_up_gradients({id(parameter)})


def changes_in_place(name: str) -> bool:
    """Whether an operation of this name changes its first argument's values: `mul_`, `_foreach_add_`, `aten::copy_`."""
    return name[-1:] == "_" and name[-2:] != "__" and name not in ("requires_grad_", "aten::detach_", "detach_")


def note_change(tensors: Iterable[Any]) -> None:
    """Count a change for every unit that owns one of these (sharded parameters; lists are looked into)."""
    for tensor in tensors:
        if isinstance(tensor, (list, tuple)):
            note_change(tensor)
        elif isinstance(tensor, torch.Tensor) and (reference := tensor.__dict__.get(OWNER_KEY)):
            if (unit := reference()) is not None:
                unit.touched.changes += 1
