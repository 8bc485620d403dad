"""Optimizer views: plain tensors over runs of a shard that optimizers update in place of sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from ..forms import NAME_KEY, PART_KEY, FlatParameterForm, mark_view
from .bucket import Bucket


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


def new_tensor(bucket: Bucket, offset: int, length: int, indices: Sequence[int]) -> nn.Parameter:
    """Create the tensor of an optimizer view over these elements of the shard.

    It describes its part of all ranks' runs, as documented for `CheckpointableTensor` in DCP of torch 2.15.

    Args:
        bucket: the bucket.
        offset, length: this rank's run.
        indices: of the members that lie in it.
    """
    tensor = nn.Parameter(bucket.shard.narrow(0, offset, length))
    mark_view(tensor, bucket.members[indices[0]].sharded)
    axis, attributes = bucket.axes.shard, tensor.__dict__
    lengths = [run_of(bucket, indices, rank)[1] for rank in range(axis.size)]
    attributes[PART_KEY] = "an optimizer_view"
    attributes[NAME_KEY] = ", ".join(bucket.members[i].name for i in indices)
    attributes["global_shape"] = (sum(lengths),)
    attributes["global_offsets"] = ((sum(lengths[: axis.rank]),),) if lengths[axis.rank] else ()
    attributes["local_offsets"] = ((0,),) if lengths[axis.rank] else ()
    attributes["local_sizes"] = ((lengths[axis.rank],),) if lengths[axis.rank] else ()
    return tensor


def run_of(bucket: Bucket, indices: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the run (offset, length) of a rank's shard that contains these members, which must be neighbours."""
    if len(indices) == len(bucket.members):
        return 0, bucket.layout.shard_numel
    parts = [bucket.layout.part(bucket.members[i].slot, rank) for i in indices]
    nonempty = [part for part in parts if part.numel]
    start = min((part.offset for part in nonempty), default=0)
    return start, max((part.offset + part.numel for part in nonempty), default=0) - start
