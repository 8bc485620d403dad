"""Whether all ranks started from the same weights: each rank keeps a slice of its own, so otherwise nobody would see.

When a unit is made every rank still has whole values, and notes a fingerprint of each; at the first forward these are
compared over the shard axis. A parameter whose slice was changed in between on any rank (a loaded checkpoint) is left
out, as are those that had no values then (meta) and units whose shards lie on the host (offloading). Over the replicate
axis, where ranks hold the same slices, the slices themselves are compared.

Replicas that differ are an error: they would never be one model. Over the shard axis it depends on what the ranks did.
A program that never seeds draws other random weights on every rank; each keeps its slice of a random draw, which is a
random draw, and trains as well: a warning. Where a rank loaded weights that others did not, they are lost but for its
slice: an error. What tells is how often each rank wrote to the parameter before it was sharded, which torch counts.
That all ranks loaded, but different files, nothing tells: there it is the warning, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from ..comm import Comm
from ..dtypes import fingerprint
from ..forms import Member
from ..mesh import Axis, MeshAxes
from ..shard import Bucket, Unit
from .aside import rows_of_all
from .messages import drawn_apart, loaded_apart


def check_same_weights(units: Sequence[Unit], comm: Comm) -> None:
    """Raise or warn on every rank if the ranks started from different weights. Collective over the units' meshes.

    Raises:
        DivergenceError: replicas differ, or some ranks loaded weights; names the first parameter, and two ranks.
    """
    by_axes: dict[MeshAxes, list[tuple[Bucket, Member]]] = {}
    for unit in units:
        for bucket in unit.buckets:
            at_home = bucket.home is not None and bucket.home.for_good  # is read there, in its own time
            if bucket.form.plain and not at_home:
                by_axes.setdefault(bucket.axes, []).extend((bucket, member) for member in bucket.members)
    with torch.no_grad():
        for axes, held in by_axes.items():
            now = [fingerprint(bucket.part(bucket.shard, member)) for bucket, member in held]
            births = [member.birth for _, member in held]
            zero = torch.zeros((), dtype=torch.int64, device=axes.device)
            whole = torch.stack([zero if birth is None else birth[0].to(axes.device) for birth in births])
            part = torch.stack([each.to(axes.device) for each in now])
            before = torch.stack([zero if birth is None else birth[1].to(axes.device) for birth in births])
            known = torch.tensor([birth is not None for birth in births], device=axes.device)
            as_made = (known & (part == before)).to(torch.int64)
            writes = torch.tensor([0 if birth is None else birth[2] for birth in births], device=axes.device)
            members = [member for _, member in held]
            if axes.replicate is not None:
                _compare(axes.replicate, part, torch.ones_like(part), None, members, comm)
            _compare(axes.shard, whole, as_made, writes, members, comm)
    for unit in units:
        for member in unit.members:
            member.birth = None  # asked once


def _compare(
    axis: Axis,
    values: torch.Tensor,
    counts: torch.Tensor,
    writes: torch.Tensor | None,
    members: Sequence[Member],
    comm: Comm,
) -> None:
    """Raise or warn if values differ between ranks, of those that count on all of them.

    Args:
        writes: how often each was written to; a difference in values is a warning where these are equal.
    """
    if axis.size == 1 or not comm.communicates or axis.backend == "fake":
        return
    mine = [values.tolist(), counts.tolist(), [0] * len(members) if writes is None else writes.tolist()]
    rows = rows_of_all(mine, [axis], comm, values.device)
    by_member = [zip(*rows[kind::3], strict=True) for kind in range(3)]  # what each rank says of it
    facts = list(zip(*by_member, strict=True))
    wrong = [at for at, (held, known, _) in enumerate(facts) if len(set(held)) > 1 and all(known)]
    if not wrong:
        return
    loaded = [at for at in wrong if len(set(facts[at][2])) > 1]
    first = (loaded or wrong)[0]
    held = facts[first][0]
    other = next(rank for rank, value in enumerate(held) if value != held[0])
    name, ranks, more = members[first].name, (axis.ranks[0], axis.ranks[other]), len(wrong) - 1
    if writes is not None and not loaded:
        warnings.warn(drawn_apart(name, ranks, more, len(members)), stacklevel=2)
        return
    raise loaded_apart(name, ranks, more, len(members), writes is not None)
