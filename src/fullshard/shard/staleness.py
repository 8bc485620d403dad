"""Whether a gathered bucket still shows what its shard holds.

A unit may stay gathered across steps (`unshard()`, no reshard after backward). It must then be gathered anew once the
shard has changed. In-place operations raise the shard's version counter; fused optimizers do not (torch 2.13), so any
optimizer's step counts as a change as well.
"""

from __future__ import annotations

import torch


class Clock:
    """Counts the steps of all optimizers in this process."""

    steps = 0

    @classmethod
    def tick(cls) -> None:
        """An optimizer steps."""
        cls.steps += 1


def stamp(shard: torch.Tensor) -> tuple[int, int]:
    """Differs between two times if `shard` may have changed in between."""
    return shard._version, Clock.steps
