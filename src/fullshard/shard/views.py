"""Creates optimizer views: plain tensors over runs of a shard, with the gradients of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..forms import NAME_KEY, PART_KEY, mark_view, owner_of
from .bucket import Bucket, none_replaced
from .delivery import Delivery, follow
from .messages import view_on_meta, viewed_twice
from .optimizer_view import OptimizerView
from .unit import Unit


def add_views(delivery: Delivery, runs: Sequence[tuple[int, int, list[int]]]) -> list[nn.Parameter]:
    """Create optimizer views of runs (offset, length, member indices) of the shard.

    Raises:
        ConfigError: a parameter already has a view whose optimizer is alive, or has no values yet.
    """
    if delivery.bucket.shard.is_meta:
        raise view_on_meta(member.name for member in delivery.bucket.members)
    views = [view for view in delivery.views if view.tensor is not None]
    taken = {i for view in views for i in view.members}
    for _, _, indices in runs:
        for i in taken.intersection(indices):
            raise viewed_twice(delivery.bucket.members[i].name)
    tensors = []
    for offset, length, indices in runs:
        tensor = nn.Parameter(delivery.bucket.shard.narrow(0, offset, length))
        mark_view(tensor, delivery.bucket.members[indices[0]].sharded)
        tensor.__dict__[PART_KEY] = "an optimizer_view"
        tensor.__dict__[NAME_KEY] = ", ".join(delivery.bucket.members[i].name for i in indices)
        _describe_to_dcp(tensor, delivery.bucket, indices)
        views.append(OptimizerView(tensor, offset, length, indices))
        tensors.append(tensor)
    delivery.views = views
    delivery.drop_set()  # it has the old views; gradients it delivered live on
    follow([delivery])
    return tensors


def _describe_to_dcp(tensor: nn.Parameter, bucket: Bucket, indices: Sequence[int]) -> None:
    """Describe the tensor's part of all ranks' runs, as documented for `CheckpointableTensor` in DCP of torch 2.15."""
    axis, described = bucket.axes.shard, tensor.__dict__
    lengths = [run_of(bucket, indices, rank)[1] for rank in range(axis.size)]
    length = lengths[axis.rank]
    described["global_shape"] = (sum(lengths),)
    described["global_offsets"] = ((sum(lengths[: axis.rank]),),) if length else ()
    described["local_offsets"] = ((0,),) if length else ()
    described["local_sizes"] = ((length,),) if length else ()


def run_of(bucket: Bucket, indices: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the run (offset, length) of a rank's shard that contains these members, which must be neighbours."""
    if len(indices) == len(bucket.members):
        return 0, bucket.layout.shard_numel
    parts = [bucket.layout.part(bucket.members[i].slot, rank) for i in indices]
    nonempty = [part for part in parts if part.numel]
    start = min((part.offset for part in nonempty), default=0)
    return start, max((part.offset + part.numel for part in nonempty), default=0) - start


def follow_views(parameters: Iterable[torch.Tensor]) -> None:
    """Take over gradients that users assigned to parameters under optimizer views; `parameters` may include others."""
    for unit in {owner_of(parameter) for parameter in parameters if PART_KEY in parameter.__dict__} - {None}:
        follow([gradients.delivery for gradients in unit.gradients if gradients.delivery.views])


def before_step(units: Sequence[Unit]) -> None:
    """Take over storage and gradients that users assigned to parameters under optimizer views, which show the old ones.

    Raises:
        ConfigError: see `Unit.refresh` and `follow`.
    """
    viewed = [unit for unit in units if any([gradients.delivery.views for gradients in unit.gradients])]
    unchanged = none_replaced([bucket for unit in viewed for bucket in unit.buckets])
    for unit in units:
        if unit.touched.assigned or (not unchanged and unit in viewed and unit.replaced()):
            unit.refresh()
    follow([gradients.delivery for unit in viewed for gradients in unit.gradients if gradients.delivery.views])
