"""Version counters of tensors whose memory comes and goes: while it is gone autograd must not use what it saved.

Private torch API: `torch._C._autograd._unsafe_set_version_counter`, and `torch._C._increment_version`, which the public
`torch.autograd.graph.increment_version` calls. That counts up, and nothing public counts back; without it a backward
that reaches freed memory crashes the process in place of raising. `tests/test_private_api.py` says when they go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import ne

import torch

from .local_tensor import read_version

HAS_VERSIONS = hasattr(torch._C._autograd, "_unsafe_set_version_counter")
_increment: Callable[..., None] = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Let a tensor count `number` changes, where torch can count back."""
    if HAS_VERSIONS:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


class Versions:
    """Tensors that autograd may use only between `restore` and `spoil`.

    Args:
        tensors: as they are now, usable.

    Attributes:
        spoil: from now on autograd takes what it saved of these tensors for changed, and raises.
        restore: they hold again what they held.
        numbers: their versions while what they hold is right.
    """

    __slots__ = ("numbers", "restore", "spoil", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.note()
        self.spoil: Callable[[], object] = bool
        self.restore: Callable[[], object] = self.note
        if HAS_VERSIONS and self.tensors:
            self.spoil = partial(_increment, self.tensors)
            self.restore = partial(torch._C._autograd._unsafe_set_version_counter, self.tensors, self.numbers)

    def note(self) -> None:
        """What they hold now is right."""
        self.numbers = tuple(map(read_version, self.tensors))

    def are_right(self) -> bool:
        """Whether none of the tensors was changed in place since they were right."""
        return tuple(map(read_version, self.tensors)) == self.numbers

    def moved(self) -> list[int]:
        """Indices of tensors that were changed in place since they were right."""
        moved = map(ne, map(read_version, self.tensors), self.numbers)
        return [i for i, each in enumerate(moved) if each]
