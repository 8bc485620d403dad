"""Optimizer views: plain tensors over runs of a shard that optimizers update in place of sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from ..forms import FlatParameterForm


class OptimizerView:
    """A plain tensor over a run of the shard that an optimizer updates in place of sharded parameters.

    The optimizer owns the tensor; the view ends with it.

    Args:
        tensor: [length], a Parameter over `shard[offset : offset + length]`.
        offset, length: in elements of the shard.
        members: indices of the parameters that lie in the run.

    Attributes:
        adopted: the user-assigned `.grad` that it last shared with its parameters; kept alive so that its address is
            not reused.
        cleared: whether `zero_grad()` came last: gradients that parameters show since then were assigned.

    Class attributes:
        alone: whether users see only the view, so that its gradient is the one that counts.
    """

    alone = False

    def __init__(self, tensor: nn.Parameter, offset: int, length: int, members: Sequence[int]) -> None:
        self._tensor = weakref.ref(tensor)
        self.offset, self.length, self.members = offset, length, list(members)
        self.adopted: torch.Tensor | None = None
        self.cleared = False

    @property
    def tensor(self) -> nn.Parameter | None:
        return self._tensor()

    @property
    def has_gradient(self) -> bool:
        """Whether the tensor is alive and has a `.grad`."""
        tensor = self.tensor
        return tensor is not None and tensor.grad is not None


class FlatView(OptimizerView):
    """The `FlatParameter` of a bucket, whichever object it currently is: users may replace it.

    Args:
        form: the bucket's form.
        count: number of its parameters.
    """

    alone = True

    def __init__(self, form: FlatParameterForm, count: int) -> None:
        super().__init__(form.flat, 0, form.layout.shard_numel, range(count))
        self._form = form

    @property
    def tensor(self) -> nn.Parameter | None:
        return self._form.flat
