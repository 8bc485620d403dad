"""Whether all ranks started from the same weights. Each rank has only its slice, so a difference would go unnoticed.

When a unit is built every rank still has whole values, and records a fingerprint of each; the first forward compares
these over the shard axis. Not compared are parameters whose slice has changed since on any rank (a loaded checkpoint),
and parameters that had no values then (meta). Over the replicate axis, where ranks have the same slices, the slices
themselves are compared.

Replicas that differ are an error: they would never be the same model. Over the shard axis it depends on the cause. A
program without a seed draws different random weights on every rank; the slices of random draws are a random draw
too, which trains as well: a warning. If one rank loaded weights and others did not, all but its slice of them is
lost: an error. The number of writes to the parameter before it was sharded, which torch counts, distinguishes the two.
If all ranks loaded different files, nothing distinguishes them, and there is only the warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from ..comm import Comm
from ..errors import DivergenceError
from ..forms import Member
from ..mesh import Axis, MeshAxes
from ..shard import Bucket, Unit
from ..watcher import users_level
from .aside import raise_on_all, rows_of_all
from .messages import drawn_apart, loaded_apart


def check_same_weights(units: Sequence[Unit], comm: Comm) -> None:
    """Raise, or warn on the first rank, if ranks started from different weights. Collective over the units' meshes.

    Raises:
        DivergenceError: replicas differ, or only some ranks loaded weights; names the first parameter, and two ranks.
    """
    by_axes: dict[MeshAxes, list[tuple[Bucket, Member]]] = {}
    for unit in units:
        for bucket in unit.buckets:
            if bucket.form.plain:
                by_axes.setdefault(bucket.axes, []).extend((bucket, member) for member in bucket.members)
    errors: list[DivergenceError | None] = []
    compared: dict[int, Axis] = {}
    with torch.no_grad():
        for axes, pairs in by_axes.items():
            compared |= {id(axis.group): axis for axis in axes.all}
            now = [bucket.fingerprint(member) for bucket, member in pairs]
            births = [member.birth for _, member in pairs]
            zero = torch.zeros((), dtype=torch.int64, device=axes.device)
            whole = torch.stack([zero if birth is None else birth[0].to(axes.device) for birth in births])
            part = torch.stack([value.to(axes.device) for value in now])
            before = torch.stack([zero if birth is None else birth[1].to(axes.device) for birth in births])
            has_birth = torch.tensor([birth is not None for birth in births], device=axes.device)
            as_made = (has_birth & (part == before)).to(torch.int64)
            writes = torch.tensor([0 if birth is None else birth[2] for birth in births], device=axes.device)
            members = [member for _, member in pairs]
            if axes.replicate is not None:
                errors.append(_compare(axes.replicate, part, torch.ones_like(part), None, members, comm))
            errors.append(_compare(axes.shard, whole, as_made, writes, members, comm))
        if by_axes:
            raise_on_all(next(filter(None, errors), None), compared.values(), comm, axes.device)
    for unit in units:
        for member in unit.members:
            member.birth = None  # compared once


def _compare(
    axis: Axis,
    values: torch.Tensor,
    counts: torch.Tensor,
    writes: torch.Tensor | None,
    members: Sequence[Member],
    comm: Comm,
) -> DivergenceError | None:
    """Return an error, or warn on the first rank, if the values of a parameter differ between ranks.

    Args:
        values: [members], this rank's fingerprints.
        counts: [members], nonzero where a fingerprint is valid; it must be on all ranks to be compared.
        writes: [members], how often each was written to; where these are equal, a difference is only a warning.
    """
    if axis.size == 1 or not comm.communicates or axis.backend == "fake":
        return None
    local = [values.tolist(), counts.tolist(), [0] * len(members) if writes is None else writes.tolist()]
    rows = rows_of_all(local, [axis], comm, values.device)
    by_member = [zip(*rows[kind::3], strict=True) for kind in range(3)]  # each rank's numbers
    reports = list(zip(*by_member, strict=True))
    wrong = [at for at, (sums, valid, _) in enumerate(reports) if len(set(sums)) > 1 and all(valid)]
    if not wrong:
        return None
    loaded = [at for at in wrong if len(set(reports[at][2])) > 1]
    first = (loaded or wrong)[0]
    sums = reports[first][0]
    other = next(rank for rank, value in enumerate(sums) if value != sums[0])
    name, ranks, more = members[first].name, (axis.ranks[0], axis.ranks[other]), len(wrong) - 1
    if writes is not None and not loaded:
        if axis.rank == 0:  # it is the same on all
            warnings.warn(drawn_apart(name, ranks, more, len(members)), stacklevel=users_level())
        return None
    return loaded_apart(name, ranks, more, len(members), writes is not None)
