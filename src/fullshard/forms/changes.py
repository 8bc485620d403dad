"""Detects users' changes to sharded parameters, so that a backward whose forward used other values can be refused.

A shard's version counter does not move when a tensor subclass dispatches an operation on it, nor when a fused optimizer
steps (torch 2.13); it does move for writes to the result of `to_local()`. So this module records optimizer steps,
in-place changes of sharded parameters, and assignments to their `.data`. In addition, every forward begins by comparing
the values of units that stayed gathered with their shards, exactly (`Root._drop_stale`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch

from ..containers import NONES

OWNER_KEY = "_fullshard_unit"
"""Attribute of a sharded or unsharded parameter: a weak reference (`Owner`) to the unit that owns it."""


class Owner(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a unit. A pickled or copied parameter has no unit: there it becomes an empty, safe type."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, ()


@dataclass(slots=True)
class Touched:
    """The recorded actions of users' code on a unit's shards.

    Attributes:
        changes: number of changes of values.
        steps: a checksum of the optimizer steps so far and their settings, independent of order, since optimizers that
            step in backward do so as gradients arrive.
        count: number of optimizer steps.
        seen: `count` when the last pass began, or when the user last requested a gather.
        by: description of the last step's optimizer.
        moves: number of times that storage was replaced, possibly with a different dtype.
        assigned: whether the `.data` of a sharded parameter was assigned and the unit has not adopted it yet.
    """

    changes: int = 0
    steps: int = 0
    count: int = 0
    seen: int = 0
    by: str = "no optimizer"
    moves: int = 0
    assigned: bool = False

    def move(self, changes: int) -> None:
        """Record that the shards' storage was replaced, as `changes` changes."""
        self.changes += changes
        self.moves += 1

    def step(self, settings: int, by: str) -> None:
        """Record an optimizer step.

        Args:
            settings: a hash of its settings.
            by: description of the optimizer and its settings.
        """
        self.steps = (self.steps + settings * 1_000_003 + 1) % 2_147_483_647
        self.count += 1
        self.by = by


class Untouched:
    """Checks that users have replaced none of the engine's objects: compared in C, once per pass.

    Args:
        objects: pairs of a function that reads an object, and the object that it must return.
        facts: pairs of a function that reads a value, and the value that it must equal.

    Attributes:
        objects, originals, facts, values: the halves of these pairs.
    """

    __slots__ = ("facts", "objects", "originals", "values")

    def __init__(
        self, objects: Iterable[tuple[Callable[[], Any], Any]], facts: Iterable[tuple[Callable[[], Any], Any]] = ()
    ) -> None:
        self.objects, self.originals = _unzipped(objects)
        self.facts, self.values = _unzipped(facts)

    def holds(self) -> bool:
        """Whether nothing was replaced."""
        return all_hold([self])


_OBJECTS, _ORIGINALS = attrgetter("objects"), attrgetter("originals")
_FACTS, _VALUES = attrgetter("facts"), attrgetter("values")


def all_hold(checks: Sequence[Untouched]) -> bool:
    """Whether all of these hold; checked together, in C."""
    join = chain.from_iterable
    if not all(map(is_, map(call, join(map(_OBJECTS, checks))), join(map(_ORIGINALS, checks)))):
        return False
    return [*map(call, join(map(_FACTS, checks)))] == [*join(map(_VALUES, checks))]


def _unzipped(pairs: Iterable[tuple[Callable[[], Any], Any]]) -> tuple[list[Callable[[], Any]], list[Any]]:
    checks = list(pairs)
    return [read for read, _ in checks], [value for _, value in checks]


def owner_of(parameter: torch.Tensor) -> Any:
    """The `Unit` that owns `parameter`, sharded or unsharded; None if no unit does."""
    reference = parameter.__dict__.get(OWNER_KEY)
    return reference() if reference else None


def mark_view(view: torch.Tensor, of: torch.Tensor) -> None:
    """Mark `view` as a view of `of`, so that in-place changes of it count as changes of the unit of `of`."""
    reference = of.__dict__.get(OWNER_KEY)
    if reference is not None:
        view.__dict__[OWNER_KEY] = reference


def give_up_gradient(parameter: Any) -> None:
    """Discard gradients accumulated for the next reduction: the user set a sharded parameter's `.grad` to None."""
    unit = owner_of(parameter)
    if unit is not None:
        unit.give_up_gradients({id(parameter)})


_KEEP_VALUES = {"requires_grad_", "detach_", "aten::detach_"}
_WRITE = {f"__{name}__" for name in ("setitem", "iand", "ior", "ixor", "ilshift", "irshift")}


def written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Sequence[Any]:
    """The tensors whose values an operation changes.

    Args:
        name: of the operation: `mul_`, `_foreach_add_`, `aten::copy_`, `mul_.Tensor`, `constant_` change their first
            argument, which may be a list. Any operation changes its `out`, and `relu` its input with `inplace`.
    """
    if kwargs and "out" in kwargs:
        target = kwargs["out"]
    elif name[-1:] == "_" and (name[-2:] != "__" or name in _WRITE) and name not in _KEEP_VALUES:
        target = args[0] if args else kwargs.get("tensor", ()) if kwargs else ()  # `torch.nn.init` calls it so
    elif "." in name:
        return written(name.partition(".")[0], args, kwargs)
    elif kwargs and kwargs.get("inplace") and args:
        target = args[0]
    else:
        return ()
    return target if isinstance(target, (list, tuple)) else (target,)


def note_change(tensors: Sequence[Any]) -> None:
    """Count a change for every unit that owns any of these sharded parameters."""
    references = filter(None, map(getattr, tensors, repeat(OWNER_KEY), NONES))  # copies have empty ones, see `Owner`
    for unit in {*map(call, references)} - {None}:
        unit.touched.changes += 1
