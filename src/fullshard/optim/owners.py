"""Whole matrices for optimizers that need them: each is assembled on one rank, its owner, and its pieces go back.

One exchange (all-to-all) brings all pieces to the owners, and one takes the results back: a rank sends what it holds of
each matrix and nothing else, so there is no padding, and holds about as many whole numbers as it has in shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ..comm import objects_of_all
from ..errors import ConfigError, DivergenceError
from ..forms import NAME_KEY, FlatShard, owner_of
from ..forms.run import Run
from ..torch_private.local_tensor import local_of


@dataclass(frozen=True)
class RowsCut:
    """A matrix that ranks hold split along one dim, as by `torch.chunk`: a `DTensor`."""

    group: dist.ProcessGroup
    shape: torch.Size
    dim: int
    world: int
    rank: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Begin and length of a rank's piece along the dim."""
        size = self.shape[self.dim]
        each = -(-size // self.world)
        begin = min(rank * each, size)
        return begin, min(each, size - begin)

    def numel(self, rank: int) -> int:
        """Of the piece that `rank` of the group holds."""
        return self.shape.numel() // max(self.shape[self.dim], 1) * self.bounds(rank)[1]

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A whole matrix without values, with the dtype and the device of `like`."""
        return like.new_empty(self.shape)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """A matrix with memory that `part` can view: as it is, or a copy."""
        return whole

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The view of the piece of `rank` in a matrix from `empty` or `laid_out`."""
        return whole.narrow(self.dim, *self.bounds(rank))


@dataclass(frozen=True)
class RunCut:
    """A matrix of which each rank holds a run of elements: a `FlatShard`."""

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
        """As `RowsCut.numel`."""
        start, stop = self.run.bounds(rank)
        return stop - start

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """As `RowsCut.empty`."""
        order = self.run.order
        inverse = [order.index(dim) for dim in range(len(order))]
        return like.new_empty([self.run.shape[dim] for dim in order]).permute(inverse)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """As `RowsCut.laid_out`."""
        return whole if whole.permute(self.run.order).is_contiguous() else self.empty(whole).copy_(whole)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """As `RowsCut.part`; in one dim."""
        start, stop = self.run.bounds(rank)
        return whole.permute(self.run.order).view(-1)[start:stop]


Cut = RowsCut | RunCut


class OtherCut:
    """A `DTensor` that is split over two mesh axes, or otherwise: it has no owner."""


def cut_of(tensor: torch.Tensor) -> Cut | OtherCut | None:
    """How a sharded tensor is cut; None for one that this rank holds whole."""
    if isinstance(tensor, FlatShard):
        return RunCut(tensor._run)
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    split = [at for at, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(at) > 1]
    if not split:
        return None
    (at, *more), placement = split, tensor.placements[split[0]]
    if more or type(placement) is not Shard:
        return OtherCut()
    return RowsCut(
        mesh.get_group(at), tensor.shape, placement.dim % tensor.dim(), mesh.size(at), mesh.get_local_rank(at)
    )


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing memory."""
    return local_of(tensor) if isinstance(tensor, (DTensor, FlatShard)) else tensor


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Refuse a gradient that is not split as its parameter, such as a whole one that a program assigned.

    Raises:
        ConfigError: names the parameter.
    """
    here, expected = local_piece(gradient).shape, local_piece(parameter).shape
    if here != expected:
        raise ConfigError(
            "A sharded parameter was given a gradient that is not split as it is.",
            parameter=_name(parameter),
            expected=f"{type(parameter).__name__}, of which this rank holds {tuple(expected)}",
            got=f"{type(gradient).__name__}, {tuple(here)}",
            remedy="take torch.zeros_like(parameter), and copy this rank's part into it",
        )


def places_of(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """By id, a place for each parameter of a unit, which all ranks share in whatever order each was given them."""
    places: dict[int, tuple[int, int]] = {}
    for parameter in parameters:
        if id(parameter) not in places and (unit := owner_of(parameter)) is not None:
            places |= {id(member.sharded): (unit.number, at) for at, member in enumerate(unit.members)}
    return places


def check_alike(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Compare the parameters that ranks are about to exchange. Collective.

    Raises:
        DivergenceError: they differ; names the first that does, on every rank.
    """
    names = [f"{_name(parameter)}, {tuple(parameter.shape)}" for parameter in parameters]
    everyone = objects_of_all(names, group, "optimizers' state")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip_longest(everyone[0], theirs, fillvalue="none")
            expected, got = next((one, other) for one, other in pairs if one != other)
            raise DivergenceError(
                "Ranks are about to step different parameters, or have gradients of different ones.",
                parameter=expected.partition(",")[0] if expected != "none" else got.partition(",")[0],
                rank=dist.get_global_rank(group, rank),
                expected=f"{expected}, as on rank {dist.get_global_rank(group, 0)}",
                got=got,
                remedy="build the optimizer from the same parameters on every rank; set .grad to None on all or none",
                topic="ranks-differ",
            )


def _name(parameter: torch.Tensor) -> str:
    """A parameter's name with that of its unit, as far as they are known."""
    unit, name = owner_of(parameter), parameter.__dict__.get(NAME_KEY, "?")
    known = unit is not None and unit.name not in ("", "?") and not name.startswith(unit.name)
    return f"{unit.name}.{name}" if known else name


def balanced(costs: Sequence[int], world: int) -> list[int]:
    """An owner for each cost: the largest first, each to the rank that has the least (Graham 1969)."""
    owners, loads = [0] * len(costs), [0] * world
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners


def keep(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan of exchanges; of very many kinds of steps (which parameters have gradients), the latest."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan


MOST_PLANS = 1024


class Owners:
    """Owners of the matrices of one group of ranks, and the two exchanges.

    Args:
        cuts: of the matrices, all of the same group and in the same order on its ranks.
        owners: rank of the group, for each matrix; see `balanced`.

    Attributes:
        mine: indices of the matrices that this rank owns.
    """

    def __init__(self, cuts: Sequence[Cut], owners: Sequence[int]) -> None:
        self.cuts, self.group = cuts, cuts[0].group
        self.world, self.rank = cuts[0].world, cuts[0].rank
        of_rank = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(self.world)]
        self.mine = of_rank[self.rank]
        self._order = [index for indices in of_rank for index in indices]  # by owner
        numel = [cut.numel(self.rank) for cut in cuts]
        self._held = [sum(numel[index] for index in indices) for indices in of_rank]
        self._owned = [sum(cuts[index].numel(rank) for index in self.mine) for rank in range(self.world)]

    def gather(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole matrices that this rank owns, of every rank's pieces. Collective."""
        sent = torch.cat([pieces[index].reshape(-1) for index in self._order])
        received = self._exchange(sent, self._held, self._owned)
        del sent  # before the matrices are allocated
        wholes = [self.cuts[index].empty(received) for index in self.mine]
        self._pass(received, lambda part, taken: part.copy_(taken.view_as(part)), wholes)
        return wholes

    def scatter(self, wholes: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's pieces of the owners' matrices, each with the shape of its counterpart in `like`. Collective."""
        sent = torch.empty(sum(self._owned), dtype=like[0].dtype, device=like[0].device)
        laid_out = [self.cuts[index].laid_out(whole) for index, whole in zip(self.mine, wholes, strict=True)]
        self._pass(sent, lambda part, place: place.view_as(part).copy_(part), laid_out)
        del laid_out  # before this rank's pieces are allocated
        received = self._exchange(sent, self._owned, self._held)
        parts = received.split([like[index].numel() for index in self._order])
        by_index = dict(zip(self._order, parts, strict=True))
        return [by_index[index].view(piece.shape) for index, piece in enumerate(like)]

    def _pass(self, flat: torch.Tensor, act: Any, wholes: Sequence[torch.Tensor]) -> None:
        """Call `act(part of a whole, its place in `flat`)` for all ranks and matrices, in the exchange's order."""
        places = iter(flat.split([self.cuts[index].numel(rank) for rank in range(self.world) for index in self.mine]))
        for rank in range(self.world):
            for index, whole in zip(self.mine, wholes, strict=True):
                act(self.cuts[index].part(whole, rank), next(places))

    def _exchange(self, sent: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]) -> torch.Tensor:
        if self.world == 1:
            return sent
        received = sent.new_empty(sum(expected))
        width = sent.dtype.itemsize  # as bytes: backends support different dtypes
        scaled = partial(map, width.__mul__)
        dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), [*scaled(expected)], [*scaled(sizes)], group=self.group
        )
        return received
