"""Whole tensors for optimizers that need them: each is assembled on one rank, its owner, and scattered again.

One all-to-all brings all pieces to the owners and another brings the results back. A rank sends exactly its pieces,
without padding; the whole tensors that it owns have about as many elements as its shards.

Many tensors are exchanged in batches, so that only a few batches are whole at a time, and one computes while the next
one and the results of the last are under way:

    batch 0   pieces to owners | compute           | results back
    batch 1                    | pieces to owners  | compute           | results back
    batch 2                                        | pieces to owners  | compute           | results back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..comm import has_streams, objects_of_all, reduce_value
from ..errors import ConfigError, DivergenceError
from ..forms import NAME_KEY, FlatShard, owner_of
from ..forms.flat_shard import Run
from ..mesh import Axis, device_of
from ..torch_private.local_tensor import inside
from ..torch_private.mesh_without_group import AbsentGroup
from ..watcher import RANK
from .replicas import exchange


@dataclass(frozen=True)
class RowsCut:
    """A tensor that is split along one dim, as by `torch.chunk`: a `DTensor`."""

    group: dist.ProcessGroup
    shape: torch.Size
    dim: int
    world: int
    rank: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Start and length of a rank's piece along the dim."""
        size = self.shape[self.dim]
        chunk = -(-size // self.world)
        start = min(rank * chunk, size)
        return start, min(chunk, size - start)

    def numel(self, rank: int) -> int:
        """Number of elements in the piece of `rank` of the group."""
        return self.shape.numel() // max(self.shape[self.dim], 1) * self.bounds(rank)[1]

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialized whole tensor with the dtype and device of `like`."""
        return like.new_empty(self.shape)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor in a memory order that `part` can view: itself, or a copy."""
        return whole

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A view of the piece of `rank` in a whole tensor from `empty` or `laid_out`."""
        return whole.narrow(self.dim, *self.bounds(rank))


@dataclass(frozen=True)
class RunCut:
    """A tensor of which each rank holds a run of elements: a `FlatShard`."""

    run: Run

    @property
    def group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.run.axis.group
        return group

    @property
    def world(self) -> int:
        return self.run.axis.size

    @property
    def rank(self) -> int:
        return self.run.axis.rank

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.run.shape)

    def numel(self, rank: int) -> int:
        """See `RowsCut.numel`."""
        start, stop = self.run.bounds(rank)
        return stop - start

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """See `RowsCut.empty`."""
        order = self.run.order
        inverse = [order.index(dim) for dim in range(len(order))]
        return like.new_empty([self.run.shape[dim] for dim in order]).permute(inverse)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """See `RowsCut.laid_out`."""
        return whole if whole.permute(self.run.order).is_contiguous() else self.empty(whole).copy_(whole)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """See `RowsCut.part`; the view is 1-D."""
        start, stop = self.run.bounds(rank)
        return whole.permute(self.run.order).view(-1)[start:stop]


Cut = RowsCut | RunCut


class OtherCut:
    """A `DTensor` that is split over two mesh axes, or in a way that owners do not support."""


def cut_of(tensor: torch.Tensor) -> Cut | OtherCut | None:
    """How a tensor is sharded; None if this rank holds all of it."""
    if isinstance(tensor, FlatShard):
        return RunCut(tensor._run)
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    if not axes:
        return None
    axis, placement = axes[0], tensor.placements[axes[0]]
    if len(axes) > 1 or type(placement) is not Shard:
        return OtherCut()
    dim = placement.dim % tensor.dim()
    place = mesh.get_coordinate()
    assert place is not None  # a rank outside the mesh has no part
    return RowsCut(mesh.get_group(axis), tensor.shape, dim, mesh.size(axis), place[axis])


def piece_of(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole tensor, split like `parameter`, which is a `DTensor`."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return inside(distribute_tensor(whole.contiguous(), mesh, placements, src_data_rank=None))


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Refuse a gradient that is not split like its parameter, such as a whole one that the user assigned.

    Raises:
        ConfigError: names the parameter.
    """
    shape, expected = inside(gradient).shape, inside(parameter).shape
    if shape != expected:
        raise ConfigError(
            "The gradient of a sharded parameter is not split like the parameter.",
            parameter=name_of(parameter),
            expected=f"{type(parameter).__name__}, local shape {tuple(expected)}",
            got=f"{type(gradient).__name__}, local shape {tuple(shape)}",
            remedy="start from torch.zeros_like(parameter) and copy this rank's part into it",
        )


def refuse_duplicates(parameters: Sequence[torch.Tensor], optimizer: str) -> None:
    """Refuse a group that lists a parameter twice: a single exchange would step it twice.

    Raises:
        ConfigError: names the parameter.
    """
    counts = Counter(map(id, parameters))
    for parameter in parameters:
        if counts[id(parameter)] > 1:
            raise ConfigError(
                f"{optimizer}: a group lists a parameter twice.",
                parameter=name_of(parameter),
                expected="each parameter once",
                remedy="pass list(dict.fromkeys(parameters))",
            )


def places_of(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """By id, a sort key for each parameter or view of a unit: the same on all ranks, whatever the optimizer's order."""
    places: dict[int, tuple[int, int]] = {}
    for parameter in parameters:
        if id(parameter) not in places and (unit := owner_of(parameter)) is not None:
            places |= {id(member.sharded): (unit.number, index) for index, member in enumerate(unit.members)}
            for tensor, _, members in unit.optimizer_views():
                places[id(tensor)] = places[id(members[0].sharded)]
    return places


def bucket_of(parameter: torch.Tensor) -> Any:
    """The bucket of a parameter or view; None if it is in no unit."""
    if (unit := owner_of(parameter)) is None:
        return None
    buckets = {id(member.sharded): bucket for bucket in unit.buckets for member in bucket.members}
    buckets |= {id(view): buckets[id(members[0].sharded)] for view, _, members in unit.optimizer_views()}
    return buckets.get(id(parameter))


def axes_of(parameter: torch.Tensor) -> tuple[Axis, Axis | None] | None:
    """The shard axis of a parameter or view, and its replicate axis if that has several ranks; None if in no unit."""
    if isinstance(parameter, FlatShard):
        shard, replicate = parameter._run.axis, parameter._run.replicas
    elif (bucket := bucket_of(parameter)) is not None:
        shard, replicate = bucket.axes.shard, bucket.axes.replicate
    else:
        return None
    return shard, replicate if replicate is not None and replicate.size > 1 else None


def agree(
    token: int,
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    how: str,
    known: bool,
    groups: Sequence[dict[str, Any]],
) -> None:
    """Check that all ranks of a mesh are about to exchange the same parameters, by `token_of` these. Collective.

    Learning rates are compared too: a scheduler that follows each rank's own loss would step parts of a parameter by
    different rates.

    On CPUs that is one small all-reduce per axis and step. On accelerators, where the host would wait for the device,
    only parameters that are new to this rank are compared.

    Args:
        token: see `token_of`.
        known: whether the ranks of this mesh have compared this token before.
        groups: the parameters' groups.

    Raises:
        DivergenceError: see `check_alike`.
    """
    if isinstance(group, AbsentGroup) or (known and has_streams(device_of(group))):
        return
    rates = repr([float(rate) for group in groups if (rate := group.get("lr")) is not None])
    number = token ^ crc32(rates.encode())
    most = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
    for axis in (group, replicas):
        if axis is not None and dist.get_world_size(axis) > 1:
            reduce_value(most, dist.ReduceOp.MAX, axis, "optimizers' state")
    largest, negated = most.tolist()
    if largest != -negated:
        check_alike(parameters, group, replicas, f"{how}, learning rates {rates}")


def token_of(parameters: Iterable[torch.Tensor], how: str) -> int:
    """A number for the names and shapes of these parameters and how they are stepped: the same on ranks that agree."""
    return int.from_bytes(blake2b(repr(_named(parameters, how)).encode(), digest_size=7).digest())


def _named(parameters: Iterable[torch.Tensor], how: str) -> list[str]:
    return [f"{name_of(parameter)}, {tuple(parameter.shape)}{how}" for parameter in parameters]


def check_alike(
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    how: str = "",
) -> None:
    """Check that all ranks are about to exchange the same parameters. Collective.

    Args:
        group: of one axis.
        replicas: of the replicate axis, if its ranks must agree, too.
        how: what steps the parameters: compared, too.

    Raises:
        DivergenceError: they differ. Every rank of both axes names the first difference.
    """
    names = _named(parameters, how)
    rank = dist.get_rank() if dist.is_initialized() else 0  # a planned load has no ranks
    lines: list[tuple[int, list[str]]] = [(rank, names)]
    for axis in (replicas, group):
        if axis is not None:
            lines = [line for those in objects_of_all(lines, axis, "optimizers' state") for line in those]
    first_rank, first_names = lines[0]
    for rank, names in lines:
        if names != first_names:
            pairs = zip_longest(first_names, names, fillvalue="none")
            expected, got = next(pair for pair in pairs if pair[0] != pair[1])
            raise DivergenceError(
                "Ranks are about to step different parameters, in different ways, or have gradients for others.",
                parameter=expected.partition(",")[0] if expected != "none" else got.partition(",")[0],
                rank=rank,
                expected=f"{expected}, as on rank {first_rank}",
                got=got,
                remedy="build the optimizer from the same parameters on every rank; "
                "set .grad to None on all ranks or on none; let schedulers follow a loss that is averaged over ranks",
                topic="ranks-differ",
            )


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's name, qualified with the name of its unit if it has one."""
    unit, name = owner_of(parameter), parameter.__dict__.get(NAME_KEY, "?")
    is_relative = unit is not None and not name.startswith(unit.name)
    return f"{unit.name}.{name}" if is_relative else name


def least_loaded(costs: Sequence[int], world: int) -> list[int]:
    """Assign an owner to each cost: the largest first, each to the least loaded rank (Graham 1969)."""
    owners, loads = [0] * len(costs), [0] * world
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners


Owner = tuple[int, int]
"""The place of an owner on a mesh (replicate, shard): its replica, and its rank on the shard axis."""


BATCH = 2**24
"""Bytes of whole tensors that an owner has in a batch, if its tensors are smaller: below, exchanges take longer."""


def batches_of(nbytes: Sequence[int], owners: Sequence[Hashable]) -> list[int]:
    """The batch of each of some tensors: an owner's are spread evenly over batches, of `BATCH` bytes and a tensor.

    Args:
        nbytes: of each whole tensor, in the order of exchanges.
        owners: of each tensor. All ranks that share the tensors know all owners, and get the same batches.

    Returns:
        Numbers from 0, without gaps.
    """
    loads: Counter[Hashable] = Counter()
    for size, owner in zip(nbytes, owners, strict=True):
        loads[owner] += size
    count = max([1, *[-(-load // BATCH) for load in loads.values()]])
    before: Counter[Hashable] = Counter()
    batches = []
    for size, owner in zip(nbytes, owners, strict=True):
        batches.append(min(before[owner] * count // max(loads[owner], 1), count - 1))  # empty tensors may be the last
        before[owner] += size
    in_order = {batch: number for number, batch in enumerate(sorted(set(batches)))}
    return [in_order[batch] for batch in batches]


def elements_at_once() -> int:
    """The most elements of whole tensors of one shape in a single operation, small beside a batch.

    2^20 by default: larger matrices fill a processor by themselves.
    """
    return BATCH // 16


def fits_a_batch(nbytes: Iterable[int]) -> bool:
    """Whether whole tensors of these sizes are in one batch, whoever owns them."""
    return sum(nbytes) <= BATCH


Finish = Callable[[], None]
"""Ends an exchange that is under way, and frees its memory. Called once."""


def in_turns(
    batches: Sequence[Any],
    gather: Callable[[Any, bool], Finish],
    compute: Callable[[Any], object],
    scatter: Callable[[Any], Finish],
) -> None:
    """Gather, compute and scatter each batch, so that the exchanges of its neighbours are under way while one computes.

    A batch may have parts of several groups of ranks, with different numbers of batches: batch k has the k-th part of
    each group that has so many, without gaps. Ranks that share one group need not share the others: they have different
    batches, but never wait for each other in a circle. The k-th parts of all groups are gathered before those numbered
    k + 1, and these before the k-th are scattered, whatever k is the last; within a batch, groups are in the order of
    their first parameters in the model. So all exchanges of all ranks have one order, in which each begins its own.
    A rank that has not begun the first unfinished exchange waits for an earlier one, and these are finished.

    Args:
        gather: starts to assemble a batch; also gets whether another batch computes meanwhile.
        compute: changes an assembled batch.
        scatter: starts to return its results.
    """
    try:
        arrive, leave = gather(batches[0], False), None
        for batch, following in zip_longest(batches, batches[1:]):
            arrive()
            if following is not None:
                arrive = gather(following, True)
            compute(batch)
            if leave is not None:
                leave()
            leave = scatter(batch)
        if leave is not None:
            leave()
    except Exception as error:
        RANK.catches(error)  # other ranks wait for the rest
        raise


@dataclass(frozen=True)
class Ownership:
    """Which rank steps each of the parameters that the same ranks share.

    Attributes:
        parameters: in the order in which they are exchanged.
        ranks: [replicas][shards], the global ranks.
        owners: of each parameter; empty if elements are stepped where they are.
        balanced: what is balanced: "elements" or "multiplications".
        loads: [replicas][shards], the sums of owners. If elements are stepped where they are: those of this rank's
            shards, of which each replica steps some, so that all of a replica's entries are equal.
    """

    parameters: tuple[torch.Tensor, ...]
    ranks: tuple[tuple[int, ...], ...]
    owners: tuple[Owner, ...]
    balanced: str
    loads: tuple[tuple[int, ...], ...]

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        loads = [load for replica in self.loads for load in replica]
        return max(loads) * len(loads) / max(sum(loads), 1)


def ownership(
    parameters: Sequence[torch.Tensor], cut: Cut | None, replicas: Axis | None, costs: Sequence[int], balanced: str
) -> Ownership:
    """Whole parameters with owners that are balanced over the ranks of both axes.

    Args:
        cut: of any of the parameters; None: each rank of the shard axis has them whole.
        replicas: the replicate axis; None without one.
        costs: of each parameter, in what `balanced` names.
        balanced: see `Ownership`.
    """
    copies, shards = replicas.size if replicas else 1, cut.world if cut else 1
    loads = [[0] * shards for _ in range(copies)]
    owners = [(number % copies, number // copies) for number in least_loaded(costs, copies * shards)]
    for (replica, rank), cost in zip(owners, costs, strict=True):
        loads[replica][rank] += cost
    bucket = bucket_of(parameters[0])
    if bucket is not None and bucket.axes.mesh.size() == copies * shards:
        ranks = _ranks_of(bucket, copies)
    else:
        ranks = (tuple(dist.get_process_group_ranks(cut.group)) if cut else (dist.get_rank(),),)
    return Ownership(tuple(parameters), ranks, tuple(owners), balanced, tuple(map(tuple, loads)))


def ownership_of_elements(parameters: Sequence[torch.Tensor], bounds: Sequence[Sequence[int]]) -> Ownership:
    """An `Ownership` of elements that are stepped where they are.

    Args:
        bounds: of each parameter, see `element_bounds`.
    """
    loads = [sum(each[at + 1] - each[at] for each in bounds) for at in range(len(bounds[0]) - 1)]
    ranks = _ranks_of(bucket_of(parameters[0]), len(loads))
    by_rank = tuple((load,) * len(ranks[0]) for load in loads)
    return Ownership(tuple(parameters), ranks, (), "elements", by_rank)


def _ranks_of(bucket: Any, copies: int) -> tuple[tuple[int, ...], ...]:
    """The global ranks [copies][shards] of a bucket's mesh."""
    return tuple(map(tuple, bucket.axes.mesh.mesh.reshape(copies, -1).tolist()))


def keep(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    """Cache a plan of exchanges. There is one per set of parameters with gradients; past the limit, all are dropped.

    Where ranks compare what is new to them, `plans` is of one group, whose ranks then drop them in the same step.
    """
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan


MOST_PLANS = 64
"""A plan lists all parameters, and programs may freeze others in each step."""


class Owners:
    """The owners of tensors that one group of ranks shares, and the two exchanges.

    Args:
        cuts: how each tensor is sharded, in the same order on all ranks of the group.
        owners: the owner of each tensor, a rank of the group; see `least_loaded`.

    Attributes:
        mine: indices of the tensors that this rank owns.
    """

    def __init__(self, cuts: Sequence[Cut], owners: Sequence[int]) -> None:
        self.cuts, self.group = cuts, cuts[0].group
        self.world, self.rank = cuts[0].world, cuts[0].rank
        by_owner = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(self.world)]
        self.mine = by_owner[self.rank]
        self._order = [index for indices in by_owner for index in indices]
        # [world], elements: of this rank's pieces, by owner; and of the tensors that this rank owns, by rank
        self._piece_sizes = [sum(cuts[index].numel(self.rank) for index in indices) for indices in by_owner]
        self._owned_sizes = [sum(cuts[index].numel(rank) for index in self.mine) for rank in range(self.world)]

    def gather(self, pieces: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to send this rank's pieces to the owners, and to receive others'. Collective.

        Returns:
            A function that waits, and returns the whole tensors that this rank owns.
        """
        sent = torch.cat([pieces[index].reshape(-1) for index in self._order])
        arrive = self._exchange(sent, self._piece_sizes, self._owned_sizes)

        def finish() -> list[torch.Tensor]:
            received = arrive()
            wholes = [self.cuts[index].empty(received) for index in self.mine]
            self._copy_parts(wholes, received, lambda part, chunk: part.copy_(chunk.view_as(part)))
            return wholes

        return finish

    def scatter(
        self, wholes: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to return the owners' tensors, of this dtype and on this device. Collective.

        Returns:
            A function that waits, and returns this rank's pieces, 1-D.
        """
        sent = torch.empty(sum(self._owned_sizes), dtype=dtype, device=device)
        laid_out = [self.cuts[index].laid_out(whole) for index, whole in zip(self.mine, wholes, strict=True)]
        self._copy_parts(laid_out, sent, lambda part, chunk: chunk.view_as(part).copy_(part))
        del laid_out  # before this rank's pieces are allocated
        arrive = self._exchange(sent, self._owned_sizes, self._piece_sizes)

        def finish() -> list[torch.Tensor]:
            parts = arrive().split([self.cuts[index].numel(self.rank) for index in self._order])
            by_index = dict(zip(self._order, parts, strict=True))
            return [by_index[index] for index in range(len(self.cuts))]

        return finish

    def _copy_parts(self, wholes: Sequence[torch.Tensor], flat: torch.Tensor, copy: Callable[..., object]) -> None:
        """Call `copy(part, chunk)` with each part of the whole tensors and its chunk of `flat`, which is exchanged."""
        chunks = iter(flat.split([self.cuts[index].numel(rank) for rank in range(self.world) for index in self.mine]))
        for rank in range(self.world):
            for index, whole in zip(self.mine, wholes, strict=True):
                copy(self.cuts[index].part(whole, rank), next(chunks))

    def _exchange(
        self, sent: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        if self.world == 1:
            return [sent].pop
        return exchange(self.group, sent, sizes, expected)
