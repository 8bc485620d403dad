"""What ranks do once, when a model is new: start watchers, open connections, compare models and their weights.

**The same model**, before the first gather could hang. Every rank describes its parameters in lines: name, shape,
dtypes, unit, layout. Ranks compare 32-byte digests over every axis; only if these differ is a rank's text sent and
compared line by line. Names may differ where ranks ignore different modules: ignored experts shift the numbers of the
layers after them. For siblings of a module that some rank ignores, the component of the name at that module's position
is not compared; everything else about a parameter is. A name that a rank shards and another rank ignores, with the same
shape, still counts as a difference: either rank could be mistaken.

**The same weights.** Each rank has only its slice, so a difference would go unnoticed. When a unit is built every rank
still has whole values, and records a fingerprint of each; the first forward compares these over the shard axis. Not
compared are parameters whose slice has changed since on any rank (a loaded checkpoint), and parameters that had no
values then (meta). Over the replicate axis, where ranks have the same slices, the slices themselves are compared.

Replicas that differ are an error: they would never be the same model. Over the shard axis it depends on the cause. A
program without a seed draws different random weights on every rank; the slices of random draws are a random draw
too, which trains as well: a warning. If one rank loaded weights and others did not, all but its slice of them is
lost: an error. The number of writes to the parameter before it was sharded, which torch counts, distinguishes the two.
If all ranks loaded different files, nothing distinguishes them, and there is only the warning.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import Comm, can_open, new_name, own_lines
from ..errors import DivergenceError
from ..forms import Member, owner_of, successor_of
from ..mesh import Axis, MeshAxes, device_type_of
from ..shard import Bucket, Unit
from ..torch_private.gloo_threads import rest_at_exit
from ..torch_private.group_timeout import timeout_of
from ..torch_private.local_tensor import local_part
from ..torch_private.store import StoreLine
from ..watcher import RANK, start, users_level
from .exchange import raise_on_all, ranks_of, rows_of_all, texts_of_all, value_from
from .messages import different_models, drawn_apart, loaded_apart, meta_in_place_of_values, split_over_these_ranks

_WATCHED = ("gloo", "nccl", "xccl", "hccl")
"""Backends whose ranks are processes, which can be watched."""

_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups for which `meet` has run."""
_published: list[weakref.ref[dist.ProcessGroup]] = []
"""The default group under which this rank is watched; empty before the first unit."""


def arrive(axes: MeshAxes) -> None:
    """Start the watcher for a unit on this mesh, and make the process wait for gloo's threads when it exits."""
    rest_at_exit()  # for a single rank too: the program may have its own collectives
    if axes.world == 1 or axes.shard.backend not in _WATCHED or not dist.is_initialized():
        return
    default, group = dist.group.WORLD, axes.shard.group
    assert default is not None
    if not _published or _published[0]() is not default:
        _published[:] = [weakref.ref(default)]
        timeout = timeout_of(group, device_type_of(group)).total_seconds()
        start(RANK, dist.get_rank(), dist.get_world_size(), timeout, lambda: StoreLine("fullshard/watcher/"))
    RANK.peers.update(ranks_of(axes))


def meet(axis: Axis, comm: Comm, device: torch.device) -> None:
    """Open lines for an axis. Collective over it, once."""
    if axis.size == 1 or not comm.communicates or axis.backend not in _WATCHED or axis.group in _met:
        return
    _met.add(axis.group)
    if can_open(axis.group, axis.size, axis.backend):
        own_lines(axis.group, axis.backend)
        return
    opened = axis.open_lines(texts_of_all(new_name(), axis, comm, device)[0])
    if axis.backend != "gloo":
        RANK.idle = True  # the device waits for collectives; the host does not see it
        if "False" in texts_of_all(str(opened), axis, comm, device):
            axis.close_lines()


_MOST_JOINT = 128
"""Ranks of a hybrid mesh that all connect to each other, at most: by two sockets each, of the usual limit of 1,024."""


def meet_jointly(axes: MeshAxes, comm: Comm) -> None:
    """Open `MeshAxes.joint`, for ranks on the host that have met over both axes. Collective over the mesh, once.

    If it fails on any rank, or they are many, comparisons go over one axis after the other on all of them.
    """
    if (
        not axes.lacks_joint
        or len(axes.ranks) > _MOST_JOINT
        or not all([can_open(axis.group, axis.size, axis.backend) for axis in axes.all])
    ):
        return
    RANK.talks("texts")
    ranks = hashlib.sha256(repr(sorted(axes.ranks)).encode()).digest()
    row = [*struct.unpack("4q", ranks), secrets.randbits(62)]
    rows = rows_of_all([row], axes.all, comm, axes.device)
    same = all([other[:-1] == row[:-1] for other in rows])  # not if the user's own groups cross in another way
    opened = same and axes.open_joint(f"{min(other[-1] for other in rows):x}")
    if [0] in rows_of_all([[opened]], axes.all, comm, axes.device):
        axes.close_joint()


# The same model.


@dataclass(frozen=True)
class Line:
    """The description of a parameter.

    Attributes:
        name: from the root.
        shape: as text.
        facts: dtypes, whether it trains, layout; None for an ignored parameter.
        unit: the name of its unit.
    """

    name: str
    shape: str
    facts: str | None = None
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name}: shape {self.shape}, {self.facts}, unit {self.unit or '(root)'!r}"


def check_same_model(
    lines: Sequence[Line], ignored: Sequence[Line], axes: Collection[Axis], comm: Comm, device: torch.device
) -> None:
    """Raise on every rank if the ranks of any axis do not train the same model. Collective over each axis, in turn.

    Args:
        lines: this rank's sharded parameters, in order.
        ignored: this rank's ignored parameters.

    Raises:
        DivergenceError: names two ranks and the first line that differs.
    """
    if not comm.communicates:
        return
    own = [*lines, *ignored]
    digest = struct.unpack("4q", hashlib.sha256("\n".join(map(str, lines)).encode()).digest())
    error: DivergenceError | None = None
    for axis in axes:
        if axis.size == 1:
            continue
        RANK.talks("the same model")
        rows = rows_of_all([digest], [axis], comm, device)
        if rows.count(rows[0]) == axis.size:
            continue
        first = value_from(0, own, axis, comm, device)
        at = _difference(first, own)
        RANK.talks("the same model")
        differences = rows_of_all([[-1 if at is None else at]], [axis], comm, device)
        other = next((i for i, (at,) in enumerate(differences) if at >= 0), None)
        if other is not None:
            second = value_from(other, own, axis, comm, device)
            (at,), both = differences[other], (first, second)
            counts = [sum(line.facts is not None for line in model) for model in both]
            pairs = zip(both, counts, strict=True)
            texts = [str(model[at]) if at < count else "(nothing: no more parameters)" for model, count in pairs]
            error = error or different_models((axis.ranks[0], axis.ranks[other]), texts, at, max(counts))
    raise_on_all(error, axes, comm, device)


def _difference(first: Sequence[Line], second: Sequence[Line]) -> int | None:
    """The index of the first sharded parameter in which two ranks differ; None if they agree."""
    ignored = {(line.name, line.shape) for lines in (first, second) for line in lines if line.facts is None}
    loose_a, loose_b = _beside_ignored(first), _beside_ignored(second)
    sharded = [[line for line in lines if line.facts is not None] for lines in (first, second)]
    for at, (a, b) in enumerate(zip_longest(*sharded)):
        if a is None or b is None or (a.shape, a.facts) != (b.shape, b.facts):
            return at
        if not _alike(a.name, b.name, loose_a, loose_b) or not _alike(a.unit, b.unit, loose_a, loose_b):
            return at
        if (a.name, a.shape) in ignored or (b.name, b.shape) in ignored:
            return at
    return None


def _beside_ignored(lines: Sequence[Line]) -> set[str]:
    """The modules with a submodule or parameter, at any depth, that is ignored completely."""
    with_sharded = {prefix for line in lines if line.facts is not None for prefix in _prefixes(line.name)}
    parents = set()
    for line in lines:
        if line.facts is None:
            whole = next((prefix for prefix in _prefixes(line.name) if prefix not in with_sharded), line.name)
            parents.add(whole.rpartition(".")[0])
    return parents


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _alike(a: str, b: str, loose_a: set[str], loose_b: set[str]) -> bool:
    """Whether two names are equal, except in components that are siblings of something ignored."""
    if a == b:
        return True
    parts_a, parts_b = a.split("."), b.split(".")
    if len(parts_a) != len(parts_b):
        return False
    above_a = above_b = ""
    for x, y in zip(parts_a, parts_b, strict=True):
        if x != y and above_a not in loose_a and above_b not in loose_b:
            return False
        above_a, above_b = f"{above_a}.{x}".lstrip("."), f"{above_b}.{y}".lstrip(".")
    return True


# The same weights.


def broadcast_states(owners: Iterable[nn.Module], axes: MeshAxes, comm: Comm, ignored: set[int]) -> None:
    """Broadcast rank 0's parameters and buffers of these modules to all ranks, except those already in a unit.

    Of a DTensor (tensor parallelism) the local part is sent. Buffers of ignored modules are sent, too.

    Raises:
        ConfigError: the parts of a DTensor differ between the ranks that would receive them; or a tensor is on meta.
    """
    mesh_axes = axes.all
    for owner in owners:
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or id(tensor) in ignored or owner_of(successor_of(tensor)) is not None:
                continue  # a nested instance's were broadcast when it was wrapped
            if isinstance(tensor, DTensor):
                _check_repeated(name, tensor, mesh_axes)
            local = local_part(tensor.detach())
            if local.is_meta:
                raise meta_in_place_of_values(name, type(owner).__name__)
            if not local.numel():
                continue
            with torch.no_grad():
                sent = local.to(axes.device).contiguous()
                for axis in mesh_axes:
                    RANK.talks("starting states")
                    comm.broadcast(axis, sent, 0).wait()
                if sent.data_ptr() != local.data_ptr():
                    local.copy_(sent)


def _check_repeated(name: str, tensor: DTensor, axes: Sequence[Axis]) -> None:
    """Refuse to send parts of `tensor` to ranks that hold different parts of it."""
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        ranks = set(torch.distributed.get_process_group_ranks(mesh.get_group(dim)))
        if not placement.is_replicate() and any(len(ranks & set(axis.ranks)) > 1 for axis in axes):
            raise split_over_these_ranks(name, tensor.placements, mesh)


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
