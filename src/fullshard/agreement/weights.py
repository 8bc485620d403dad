"""Whether all ranks started from the same weights: each rank keeps a slice of its own, so otherwise nobody would see.

When a unit is made every rank still has whole values, and notes a fingerprint of each; at the first forward these are
compared over the shard axis. A parameter whose slice was changed in between on any rank (a loaded checkpoint) is left
out, as are those that had no values then (meta) and units whose shards lie on the host (offloading). Over the replicate
axis, where ranks hold the same slices, the slices themselves are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm import Comm
from ..dtypes import fingerprint
from ..errors import DivergenceError
from ..forms import Member
from ..mesh import Axis, MeshAxes
from ..shard import Bucket, Unit


def check_same_weights(units: Sequence[Unit], comm: Comm) -> None:
    """Raise on every rank if the ranks' models started from different weights. Collective over the units' meshes.

    Raises:
        DivergenceError: names the first parameter, and two ranks.
    """
    by_axes: dict[tuple[int, ...], tuple[MeshAxes, list[tuple[Bucket, Member]]]] = {}
    for unit in units:
        for bucket in unit.buckets:
            at_home = bucket.home is not None and bucket.home.for_good  # is read there, in its own time
            if bucket.form.plain and not at_home:
                _, found = by_axes.setdefault(tuple([id(axis.group) for axis in bucket.axes.all]), (bucket.axes, []))
                found += [(bucket, member) for member in bucket.members]
    with torch.no_grad():
        for axes, held in by_axes.values():
            now = [fingerprint(bucket.part(bucket.shard, member)) for bucket, member in held]
            births = [member.birth for _, member in held]
            zero = torch.zeros((), dtype=torch.int64, device=axes.device)
            whole = torch.stack([zero if birth is None else birth[0].to(axes.device) for birth in births])
            part = torch.stack([each.to(axes.device) for each in now])
            before = torch.stack([zero if birth is None else birth[1].to(axes.device) for birth in births])
            known = torch.tensor([birth is not None for birth in births], device=axes.device)
            as_made = (known & (part == before)).to(torch.int64)
            members = [member for _, member in held]
            _compare(axes.shard, whole, as_made, members, comm)
            if axes.replicate is not None:
                _compare(axes.replicate, part, torch.ones_like(part), members, comm)
    for unit in units:
        for member in unit.members:
            member.birth = None  # asked once


def _compare(axis: Axis, values: torch.Tensor, counts: torch.Tensor, members: Sequence[Member], comm: Comm) -> None:
    """Raise if values differ between ranks, of those that count on all of them."""
    if axis.size == 1 or not comm.communicates or axis.backend == "fake":
        return
    mine = torch.cat([values, counts])
    found = mine.new_empty(axis.size * mine.numel())
    comm.gather(axis, found, mine).wait()
    rows = found.view(axis.size, 2, -1).cpu()
    differs = (rows[:, 0] != rows[0, 0]) & (rows[:, 1].sum(0) == axis.size)
    if not bool(differs.any()):
        return
    wrong = [index for index in range(len(members)) if bool(differs[:, index].any())]
    other = int(differs[:, wrong[0]].nonzero()[0])
    first = members[wrong[0]]
    raise DivergenceError(
        "ranks start from different weights (compared at the first forward): each would train its own slice of another "
        "model.",
        parameter=first.name,
        expected="the same values on all ranks",
        got=f"different ones on ranks {axis.ranks[0]} and {axis.ranks[other]}, here and in {len(wrong) - 1} more of "
        f"{len(members)} parameters",
        remedy="build the model from one seed on all ranks (torch.manual_seed), load the same checkpoint on all, or "
        "give sync_module_states=True, which makes them rank 0's",
        code="D007",
    )
