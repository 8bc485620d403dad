"""The weight of a rank's micro-batch in the mean over ranks, when some have run out of data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..torch_private.foreach import scale_all
from .unit import Unit


@dataclass
class Share:
    """This rank's share in the current batch. `join` changes it from batch to batch.

    Attributes:
        active: whether the rank has data; if not, its gradients are dropped.
        factor: multiplies its gradients: the number of ranks over that of ranks with data, for means; 1 for sums.
    """

    active: bool = True
    factor: float = 1.0

    def apply(self, unit: Unit) -> None:
        """Scale or drop autograd's gradients on the unsharded parameters, before they are collected."""
        if self.active and self.factor == 1.0:
            return
        grads: list[torch.Tensor] = []
        for member in unit.members:
            if member.unsharded is not None and member.unsharded.grad is not None:
                if self.active:
                    grads.append(member.unsharded.grad)
                else:
                    member.unsharded.grad = None
        if grads:
            scale_all(grads, self.factor)
