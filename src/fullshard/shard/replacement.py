"""Parameters that a user put in the place of sharded ones: what may be taken over, and what must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from .flat_shard import FlatShard
from .member import Member

if TYPE_CHECKING:
    from .bucket import Bucket


def check_meta(bucket: Bucket, values: Sequence[torch.Tensor]) -> None:
    """Refuse members of which some are on meta and others are not.

    Raises:
        ConfigError: names those on meta.
    """
    meta = [m.name for m, value in zip(bucket.members, values, strict=True) if value.is_meta]
    if meta and len(meta) < len(values):
        raise ConfigError(
            "Some parameters of a unit are on the meta device and others are not.",
            parameter=", ".join(meta),
            remedy="materialise the whole unit: model.to_empty(device=...), then initialise every module",
        )


def check_replacement(bucket: Bucket, member: Member, found: Any) -> None:
    """Refuse what a user registered in a sharded parameter's place, unless it is its shard.

    Raises:
        ConfigError: other shape, mesh, placement or kind.
    """
    expected: Any = member.sharded
    kind = FlatShard if bucket.layout.kind == "flat" else DTensor
    if isinstance(found, kind) and found.shape == expected.shape:
        if isinstance(found, FlatShard):
            same = found._run.same_as(expected._run)
        else:
            same = found.device_mesh == expected.device_mesh and found.placements == expected.placements
        if same:
            return
    raise ConfigError(
        "A sharded parameter was replaced by something that is not its shard.",
        parameter=member.name,
        rank=bucket.axes.global_rank,
        expected=f"{type(expected).__name__} of shape {tuple(expected.shape)}",
        got=f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}",
        remedy="change values in place (copy_, load_state_dict without assign=True), "
        "or assign a tensor with the same placements",
    )
