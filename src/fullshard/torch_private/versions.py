"""Version counters of tensors whose memory comes and goes: while it is gone autograd must not use what it saved.

Private torch API: `torch._C._autograd._unsafe_set_version_counter`. The public `torch.autograd.graph.increment_version`
counts up, and nothing public counts back; without it a backward that reaches freed memory crashes the process in place
of raising. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

HAS_VERSIONS = hasattr(torch._C._autograd, "_unsafe_set_version_counter")


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Let a tensor count `number` changes, where torch can count back."""
    if HAS_VERSIONS:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


class Versions:
    """Tensors that autograd may use only between `restore` and `spoil`.

    Args:
        tensors: as they are now, usable.
    """

    __slots__ = ("_numbers", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors: Any = tuple(tensors)
        self.note()

    def note(self) -> None:
        """What they hold now is right."""
        self._numbers = tuple([tensor._version for tensor in self._tensors])

    def moved(self) -> list[int]:
        """Indices of tensors that were changed in place since they were right."""
        now = tuple([tensor._version for tensor in self._tensors])
        if now == self._numbers:
            return []
        return [i for i, (version, right) in enumerate(zip(now, self._numbers, strict=True)) if version != right]

    def spoil(self) -> None:
        """From now on autograd takes what it saved of these tensors for changed, and raises."""
        if HAS_VERSIONS and self._tensors:
            torch.autograd.graph.increment_version(self._tensors)

    def restore(self) -> None:
        """They hold again what they held."""
        if not HAS_VERSIONS:
            self.note()
        elif self._tensors:
            torch._C._autograd._unsafe_set_version_counter(self._tensors, self._numbers)
