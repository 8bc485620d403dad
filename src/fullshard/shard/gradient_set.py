"""The slice of reduced gradients that is kept from step to step, and the tensors that show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, methodcaller
from typing import Any

import torch

from ..containers import drain
from ..forms import split_alike
from ..torch_private.holders import holders, holders_of_many
from ..torch_private.local_tensor import inside, plain_access
from .reduce_buffer import PlannedReduction

_ADDRESS = methodcaller("data_ptr")


def _addresses(parts: Iterable[Any]) -> list[int]:
    """The address of each of these, or of the local tensor inside it; read in C."""
    parts = [*parts]
    return [*map(_ADDRESS, map(getattr, parts, repeat("_local_tensor"), parts))]


@dataclass(eq=False)
class GradientSet:
    """A reduced slice and the tensors that show it, kept from step to step.

    Ownership: created by `Delivery`, shown to users as `.grad`. It is written again only when every `.grad` was set to
    None and nobody else holds one of the tensors or their memory; otherwise users keep it, and a new set is created.

    Attributes:
        flat: [shard_numel], dtype of `.grad`.
        parts: by member, its gradient as users see it.
        views: by optimizer view of the bucket, the plain 1-D tensor over `flat`.
        receivers, received: the sharded parameters that get a `.grad`, and the part that each gets.
        reduction: the last reduction into `flat`.
        shown: by member, whether its part was delivered since the slice was last written.
        unheld: result of `holders` when only the engine held them.
        watched: everything that users may hold: the tensors, those inside them, and their memory.
        take, free: allocate the memory again, and release it.
    """

    flat: torch.Tensor
    parts: list[torch.Tensor]
    views: list[torch.Tensor]
    shown: list[bool] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)
    received: list[torch.Tensor] = field(default_factory=list)
    reduction: PlannedReduction | None = None
    unheld: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.storage = self.flat.untyped_storage()
        self.take = partial(self.storage.resize_, self.storage.nbytes())
        self.free = partial(self.storage.resize_, 0)
        self.shown = [False] * len(self.parts)
        # Parts with elements on this rank, and the offset of each from `flat`, in bytes.
        self._nonempty = [part for part in self.parts if inside(part).numel()]
        self._offsets = [at - self.flat.data_ptr() for at in _addresses(self._nonempty)]
        self._places: list[int] = []
        self._base = -1  # the slice's address when it was last looked up; `_places` follow from it
        # Users may hold the tensors they see, or those inside them.
        self.watched: list[Any] = [*self.parts, *self.views]
        self.watched += [plain for part in self.parts if (plain := inside(part)) is not part]
        self.watched += [self.flat, self.storage]

    def settle(self) -> None:
        """Record the reference counts, while only the engine holds the set, and no stack frame does."""
        self.unheld = holders(self.storage._cdata, self.watched)

    def reassigned(self) -> bool:
        """Whether a new tensor was assigned to the `.data` of a part."""
        return any_reassigned([self])

    def locate(self) -> None:
        """Look up the address of the slice, from which those of the parts follow."""
        self._base = self.flat.data_ptr()
        self._places = [self._base + offset for offset in self._offsets]

    def version(self) -> int:
        """Return a number that rises with every write to the slice, including writes inside DTensors and FlatShards."""
        with plain_access():
            return sum([tensor._version for tensor in self.watched if tensor is not self.storage])

    def reusable(self) -> bool:
        """Whether only the engine holds the set (which requires that all `.grad` are None)."""
        return self.unheld[0] > 0 and holders(self.storage._cdata, self.watched) == self.unheld

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients to the members' parts; None: nothing to add."""
        for part, grad in zip(self.parts, grads, strict=True):
            if grad is not None:
                part.add_(split_alike(grad, part))


_FLAT, _BASE, _NONEMPTY, _PLACES = (attrgetter(name) for name in ("flat", "_base", "_nonempty", "_places"))


def any_reassigned(sets: Sequence[GradientSet]) -> bool:
    """Whether a new tensor was assigned to the `.data` of a part of any of these; compared together, in C."""
    if _addresses(map(_FLAT, sets)) != [*map(_BASE, sets)]:  # their memory was allocated anew
        for each in sets:
            each.locate()
    return _addresses(chain.from_iterable(map(_NONEMPTY, sets))) != [*chain.from_iterable(map(_PLACES, sets))]


_UNHELD, _WATCHED, _CDATA, _FREE = (attrgetter(name) for name in ("unheld", "watched", "storage._cdata", "free"))


def free_all(sets: Sequence[GradientSet]) -> bool:
    """Release the memory of these sets if only the engine holds it; all are checked at once, in C.

    Returns:
        Whether it was released.
    """
    uses, references = zip(*map(_UNHELD, sets), strict=True)
    now = holders_of_many(map(_CDATA, sets), chain.from_iterable(map(_WATCHED, sets)))
    if min(uses) <= 0 or now != (sum(uses), sum(references)):
        return False
    drain(map(call, map(_FREE, sets)))
    return True
