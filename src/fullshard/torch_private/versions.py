"""Version counters of tensors whose memory comes and goes: while it is gone autograd must not use what it saved of them.

Private torch API: `torch._C._autograd._unsafe_set_version_counter`. The public `torch.autograd.graph.increment_version`
counts up, and nothing public counts back; without it a backward that reaches freed memory crashes the process in place of
raising. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from typing import Any

import torch

HAS_VERSIONS = hasattr(torch._C._autograd, "_unsafe_set_version_counter")


class Versions:
    """Tensors that autograd may use only between `restore` and `spoil`.

    Args:
        tensors: as they are now, usable.
    """

    __slots__ = ("_numbers", "_tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors: Any = tuple(tensors) if HAS_VERSIONS else ()
        self._numbers = tuple([tensor._version for tensor in self._tensors])

    def spoil(self) -> None:
        """From now on autograd takes what it saved of these tensors for changed, and raises."""
        if self._tensors:
            torch.autograd.graph.increment_version(self._tensors)

    def restore(self) -> None:
        """They hold again what they held."""
        if self._tensors:
            torch._C._autograd._unsafe_set_version_counter(self._tensors, self._numbers)
