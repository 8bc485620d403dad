"""Names of mesh dims that say that a 2-D mesh would be read in another way than it was meant.

Dims are read by place: the first is replicas, the last is what elements are split over. A name that says otherwise, in
so many words, is taken at its word; all other names ("dp", "a", "nodes", "tp", none at all) say nothing.

    words of a name, between underscores and the like, digits at their end left out:
    fsdp, shard, shards, sharded, sharding     split over
    cp, context                                split over, if the first dim is, too
    replicate, replicated, replica, replicas,
    replication, ddp                           replicas
    of more than one of these                  says nothing
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
    """ "shard", "context" or "replicate" if the name of a dim clearly says so, else None.

    A name of a shard and a context dim flattened into one says "shard".

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
    """Refuse a 2-D mesh whose dim names say that its dims are not (replicate, shard). Other meshes pass.

    Raises:
        ConfigError: both names say that the dim is split over, or the second one says that it is replicas.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or not mesh.mesh_dim_names:
        return
    first, second = mesh.mesh_dim_names
    said = meaning(first), meaning(second)
    got = f"dims ({first!r}, {second!r}) of sizes {tuple(mesh.shape)}"
    if said[0] == "shard" and said[1] in ("shard", "context"):
        raise two_shard_dims(first, second, got)
    if said[1] == "replicate":
        raise replicas_second(second, got)
