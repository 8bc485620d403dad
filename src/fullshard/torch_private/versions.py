"""Version counters of tensors whose memory comes and goes: while it is freed autograd must not use saved tensors.

Private torch API: `torch._C._autograd._unsafe_set_version_counter`, and `torch._C._increment_version`, which the public
`torch.autograd.graph.increment_version` calls. That counts up, and nothing public counts back; without it a backward
that reaches freed memory crashes the process instead of raising. `tests/test_private_api.py` fails when they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import ne

import torch

from .local_tensor import read_version


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Set a tensor's version counter to `number`."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


class Versions:
    """Tensors that autograd may use only between `restore` and `spoil`.

    Args:
        tensors: valid now.

    Attributes:
        spoil: makes autograd treat these tensors as changed since it saved them, and raise.
        restore: makes them valid again, with the same values as before.
        numbers: their versions while they are valid.
    """

    __slots__ = ("numbers", "restore", "spoil", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.note()
        self.spoil: Callable[[], object] = bool
        self.restore: Callable[[], object] = self.note
        if self.tensors:
            self.spoil = partial(torch._C._increment_version, self.tensors)
            self.restore = partial(torch._C._autograd._unsafe_set_version_counter, self.tensors, self.numbers)

    def note(self) -> None:
        """Record the current versions as valid."""
        self.numbers = tuple(map(read_version, self.tensors))

    def moved(self) -> list[int]:
        """Indices of tensors that were changed in place since the valid versions were recorded."""
        moved = map(ne, map(read_version, self.tensors), self.numbers)
        return [i for i, changed in enumerate(moved) if changed]
