"""How much a rank's micro-batch counts in the mean over ranks, where some have run out of data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..torch_private.foreach import scale_all
from .unit import Unit


@dataclass
class Share:
    """This rank's, of the batch that runs now. `join` changes it from batch to batch.

    Attributes:
        active: whether the rank has data of its own; if not, its gradients are dropped.
        factor: by which its gradients are multiplied: ranks over ranks with data, for means; 1 for sums.
    """

    active: bool = True
    factor: float = 1.0

    def apply(self, unit: Unit) -> None:
        """To what autograd left on the unsharded parameters, before that is collected."""
        if self.active and self.factor == 1.0:
            return
        found: list[torch.Tensor] = []
        for member in unit.members:
            if member.unsharded is not None and member.unsharded.grad is not None:
                if self.active:
                    found.append(member.unsharded.grad)
                else:
                    member.unsharded.grad = None
        if found:
            scale_all(found, self.factor)
