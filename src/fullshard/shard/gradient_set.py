"""The slices of reduced gradients that are kept from step to step, and the tensors that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, call
from typing import Any

import torch

from ..containers import drain
from ..torch_private.holders import holders, holders_of_many
from ..torch_private.local_tensor import inside, plain_access
from .reduce_buffer import PlannedReduction


def _address(part: Any) -> int:
    return inside(part).data_ptr()


@dataclass(eq=False)
class GradientSet:
    """One reduced slice and the tensors that show it, kept from step to step.

    Ownership: made by `Delivery`, handed to users as `.grad`. It is written again only when every `.grad` was set to
    None and nobody else holds one of the tensors or their memory; else a new set is made and this one left to them.

    Attributes:
        flat: [shard_numel], dtype of `.grad`.
        parts: per member, its gradient as users see it.
        views: per optimizer view of the bucket, the plain 1-D tensor over `flat`.
        receivers, received: the sharded parameters that get a `.grad`, and the part that each gets.
        reduction: into `flat`, as it ran last.
        shown: per member, whether its part was given out since the whole was last written.
        held: what `holders` said when nobody else held them.
        watched: what users may hold: the tensors, those inside them, and their memory.
        take, free: get the memory back, and give it back.
    """

    flat: torch.Tensor
    parts: list[torch.Tensor]
    views: list[torch.Tensor]
    shown: list[bool] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)
    received: list[torch.Tensor] = field(default_factory=list)
    reduction: PlannedReduction | None = None
    held: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.storage = self.flat.untyped_storage()
        self.take = partial(self.storage.resize_, self.storage.nbytes())
        self.free = partial(self.storage.resize_, 0)
        self.shown = [False] * len(self.parts)
        # Those that have elements here, and where each lies: bytes from the first one of `flat`.
        self._held = [part for part in self.parts if inside(part).numel()]
        self._offsets = [at - self.flat.data_ptr() for at in map(_address, self._held)]
        # Users may hold the tensors that they see, or those inside them.
        self.watched: list[Any] = [*self.parts, *self.views]
        self.watched += [plain for part in self.parts if (plain := inside(part)) is not part]
        self.watched += [self.flat, self.storage]

    def settle(self) -> None:
        """Nobody but the engine holds it now, nor does a frame of the engine's."""
        self.held = holders(self.storage._cdata, self.watched)

    def astray(self) -> bool:
        """Whether somebody assigned another tensor to the `.data` of a part."""
        base = self.flat.data_ptr()
        return [at - base for at in map(_address, self._held)] != self._offsets

    def version(self) -> int:
        """Rises with every write to the slice; a DTensor or FlatShard and what is inside of it count apart."""
        with plain_access():
            return sum([tensor._version for tensor in self.watched if tensor is not self.storage])

    def reusable(self) -> bool:
        """Whether only the engine holds it (all `.grad` must be None for this to be true)."""
        return self.held[0] > 0 and holders(self.storage._cdata, self.watched) == self.held

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add to each member's part, where there is something."""
        for part, grad in zip(self.parts, grads, strict=True):
            if grad is not None:
                part.add_(grad)


_HELD, _WATCHED, _CDATA, _FREE = (attrgetter(name) for name in ("held", "watched", "storage._cdata", "free"))


def free_all(sets: Sequence[GradientSet]) -> bool:
    """Give back the memory of these if nobody but the engine holds any of it, which is asked at once, in C.

    Returns:
        Whether it was given back.
    """
    uses, references = zip(*map(_HELD, sets), strict=True)
    now = holders_of_many(map(_CDATA, sets), chain.from_iterable(map(_WATCHED, sets)))
    if min(uses) <= 0 or now != (sum(uses), sum(references)):
        return False
    drain(map(call, map(_FREE, sets)))
    return True
