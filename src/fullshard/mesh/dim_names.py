"""Detects from dim names that a 2-D mesh is not meant as (replicate, shard).

Dims are read by position: the first is for replicas, and elements are split over the last. Names that explicitly
contradict this are refused; all other names ("dp", "a", "nodes", "tp", none at all) carry no meaning.

    words in a name, separated by underscores and the like, without trailing digits:
    fsdp, shard, shards, sharded, sharding     split over
    cp, context                                split over, if the first dim is, too
    replicate, replicated, replica, replicas,
    replication, ddp                           replicas
    words of both kinds                        no meaning
"""

from __future__ import annotations

import re
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .messages import replicas_second, two_shard_dims

_SHARD = frozenset({"fsdp", "shard", "shards", "sharded", "sharding"})
_CONTEXT = frozenset({"cp", "context"})
_REPLICATE = frozenset({"ddp", "replica", "replicas", "replicate", "replicated", "replication"})


def meaning(name: str) -> str | None:
    """The meaning of a dim's name if it is clear: "shard", "context" or "replicate"; else None.

    The name of a dim that was flattened from a shard dim and a context dim means "shard".

    >>> meaning("dp_shard"), meaning("fsdp2"), meaning("dp_shard_cp"), meaning("replicate"), meaning("dp")
    ('shard', 'shard', 'shard', 'replicate', None)
    >>> meaning("replicate_shard") is None
    True
    """
    words = set(re.findall(r"[a-z]+", name.lower()))
    if words & _REPLICATE:
        return None if words & (_SHARD | _CONTEXT) else "replicate"
    if words & _SHARD:
        return "shard"
    return "context" if words & _CONTEXT else None


def refuse_misread(mesh: Any) -> None:
    """Refuse a 2-D mesh whose dim names contradict (replicate, shard). Other meshes pass.

    Raises:
        ConfigError: both names mean a dim to split over, or the second name means replicas.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or not mesh.mesh_dim_names:
        return
    first, second = mesh.mesh_dim_names
    meanings = meaning(first), meaning(second)
    got = f"dims ({first!r}, {second!r}) of sizes {tuple(mesh.shape)}"
    if meanings[0] == "shard" and meanings[1] in ("shard", "context"):
        raise two_shard_dims(first, second, got)
    if meanings[1] == "replicate":
        raise replicas_second(second, got)
