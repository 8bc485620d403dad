"""What `Muon` and `OwnerOptimizer` share: which rank owns which parameter, and the exchanges of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Generic, TypeVar

import torch

from ..errors import ConfigError
from ..forms import NAME_KEY, owner_of
from ..mesh import Axis, device_of
from ..torch_private.local_tensor import inside
from .owners import (
    OtherCut,
    Owners,
    Ownership,
    agree,
    axes_of,
    batches_of,
    check_gradient,
    cut_of,
    keep,
    ownership,
    places_of,
    refuse_duplicates,
    token_of,
)
from .replicas import run_of, spread


@dataclass(eq=False)
class Param:
    """A parameter, and who steps it.

    Attributes:
        tensor: the parameter.
        elementwise: whether elements are stepped where they are.
        owner: the owner's rank on the shard axis; None if the parameter is not split along it.
        replica: the owner's rank on the replicate axis; None if there is no such axis, or if elementwise.
        bounds: if elementwise: see `element_bounds`, of this rank's part.
    """

    tensor: torch.Tensor
    elementwise: bool = False
    owner: int | None = None
    replica: int | None = None
    bounds: Sequence[int] = ()

    @cached_property
    def axes(self) -> tuple[Axis, Axis | None] | None:
        """The shard axis, and the replicate axis if that has several ranks; None if the parameter is in no unit."""
        return axes_of(self.tensor)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether all ranks gather and step it: it is split over two mesh axes."""
        return isinstance(cut_of(self.tensor), OtherCut)

    @cached_property
    def cut(self) -> Any:
        """The layout of the pieces that its owner assembles; None if it is whole, elementwise or gathered."""
        return None if self.elementwise or self.is_gathered else cut_of(self.tensor)

    @property
    def device(self) -> torch.device:
        """The device on which it is stepped; parameters in host memory are assembled on their group's device."""
        return self.local.device if self.cut is None else device_of(self.cut.group)

    @property
    def replicas(self) -> Axis | None:
        """The replicate axis along which the parameter has owners."""
        return None if self.axes is None or self.is_gathered else self.axes[1]

    @property
    def name(self) -> str:
        """The parameter's name, for errors."""
        return str(self.tensor.__dict__.get(NAME_KEY, "?"))

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter; shares memory."""
        return inside(self.tensor).detach()

    @property
    def in_replica(self) -> bool:
        """Whether a rank of this replica owns the parameter; if elementwise: elements of this rank's part."""
        axis, bounds = self.replicas, self.bounds
        if axis is None:
            return True
        if not self.elementwise:
            return self.replica == axis.rank
        return bounds[axis.rank] < bounds[axis.rank + 1] or (bounds[-1] == 0 and axis.rank == 0)

    @property
    def is_owned(self) -> bool:
        """Whether this rank steps the parameter; if elementwise: elements of it."""
        return self.in_replica and (self.owner is None or bool(self.cut.rank == self.owner))

    def run(self, local: torch.Tensor) -> torch.Tensor:
        """If elementwise: the run that this rank owns in a tensor like `self.local`; shares memory."""
        if local.dim() == 0:
            return local
        replica = self.replicas.rank if self.replicas is not None else 0
        return run_of(local, self.bounds[replica], self.bounds[replica + 1])

    def runs(self, local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The parts of a tensor like `self.local` that each replica's ranks own, as (replica, view)."""
        if self.elementwise:
            bounds = enumerate(pairwise(self.bounds))
            return [(replica, run_of(local, start, stop)) for replica, (start, stop) in bounds if start < stop]
        assert self.replica is not None
        return [(self.replica, local)] if local.numel() else []


P = TypeVar("P", bound=Param)
Entry = tuple[P, str, torch.dtype]
"""A tensor to exchange: its parameter; what it is, such as "gradient" or a key of the state; its dtype."""
Exchange = tuple[Owners, torch.device, list[Entry[P]]]
"""Entries of one kind, dtype and group, whose owner is in this replica; where these ranks exchange them."""


@dataclass(eq=False)
class ParamBatch(Generic[P]):
    """Parameters that are whole, and step, at the same time.

    Attributes:
        params: in this order.
        is_last: whether no other follows.
        gathers, scatters: to the owners, and back.
    """

    params: list[P]
    is_last: bool
    gathers: list[Exchange[P]]
    scatters: list[Exchange[P]]


@dataclass(frozen=True)
class _StepRule(Generic[P]):
    """How to step some parameters.

    Attributes:
        batches: at least one.
        compared: of the parameters that the same ranks compare: token, parameters, both groups, and how they are
            stepped (the optimizer, and their number of batches); then indices of their groups. See `agree`.
    """

    batches: list[ParamBatch[P]]
    compared: list[tuple[int, list[torch.Tensor], Any, Any, str, list[int]]]


class OnOwners(torch.optim.Optimizer, ABC, Generic[P]):
    """An optimizer whose parameters are stepped on their owners."""

    _balanced = "elements"  # what is balanced over owners
    _step_name = ""  # what steps parameters, which ranks compare
    _in_parts = True  # whether parameters may be stepped batch by batch

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._params: dict[int, P] = {}  # by id of the parameter
        self._in_order: list[P] = []  # see `_ordered`
        self._ownerships: list[Ownership] = []  # see `ownerships`
        self._plans: dict[Any, _StepRule[P]] = {}  # by what is stepped
        self._known: dict[Any, dict[int, bool]] = {}  # tokens that ranks have compared, by their groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_params" not in self.__dict__:  # a copy
            self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like `torch.optim.Optimizer.add_param_group`; checks the parameters.

        Raises:
            ConfigError: see the class.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [None] * len(group["params"])
        try:
            refuse_duplicates(group["params"], type(self).__name__)
            for parameter, name in zip(group["params"], names, strict=True):
                self._check_parameter(group, parameter, name)
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective among the ranks of each mesh.

        Returns:
            The result of `closure`, which is called first, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for param in self._ordered() if param.tensor.grad is not None]
        for param in params:
            check_gradient(param.tensor, param.tensor.grad)
        self._step(params)
        return loss

    def ownerships(self) -> list[Ownership]:
        """Which rank steps which parameter, or how many elements if elementwise, by unit. No communication."""
        self._ordered()
        return self._ownerships

    # What optimizers differ in.

    @abstractmethod
    def _check_parameter(self, group: dict[str, Any], parameter: torch.Tensor, name: str | None) -> None:
        """Refuse a parameter that this optimizer cannot step."""

    @abstractmethod
    def _new_param(self, parameter: torch.Tensor) -> P:
        """A parameter, without an owner yet."""

    @abstractmethod
    def _step(self, params: list[P]) -> None:
        """Step these parameters, which have gradients."""

    def _cost(self, param: P) -> int:
        """The cost of a step of a parameter, balanced over owners."""
        return param.tensor.numel()

    @abstractmethod
    def _nbytes(self, param: P) -> int:
        """The bytes of a whole parameter in a batch."""

    @abstractmethod
    def _entries(self, params: Sequence[P]) -> list[list[Entry[P]]]:
        """What a step of these gathers, which have owners: by kind, the one that is scattered first."""

    # Owners, and plans.

    def _param(self, parameter: torch.Tensor) -> P:
        if id(parameter) not in self._params:
            self._params[id(parameter)] = self._new_param(parameter)
        return self._params[id(parameter)]

    def _listed(self) -> list[P]:
        """All parameters, in the order of the groups."""
        return [self._param(parameter) for group in self.param_groups for parameter in group["params"]]

    def _ordered(self) -> list[P]:
        """All parameters, in an order that ranks share, whatever the order in their groups. They have owners."""
        ids = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(ids) != len(self._in_order) or {*ids} != self._params.keys():
            listed = self._listed()  # groups were added, or programs changed them
            places = places_of(param.tensor for param in listed)
            self._in_order = sorted(listed, key=lambda param: places.get(id(param.tensor), (-1, 0)))
            self._params = {id(param.tensor): param for param in listed}
            self._plans, self._known = {}, {}
            self._ownerships = self._assigned(self._in_order)
        return self._in_order

    def _assigned(self, params: Sequence[P]) -> list[Ownership]:
        """Choose owners: balance the costs of all parameters with the same ranks."""
        by_ranks: dict[Any, list[P]] = {}
        for param in params:
            cut, axis = param.cut, param.replicas
            if cut is not None or axis is not None:
                by_ranks.setdefault((cut and cut.group, axis and axis.group), []).append(param)
        ownerships = []
        for alike in by_ranks.values():
            cut, axis, costs = alike[0].cut, alike[0].replicas, [self._cost(param) for param in alike]
            ownerships.append(ownership([param.tensor for param in alike], cut, axis, costs, self._balanced))
            for param, (replica, rank) in zip(alike, ownerships[-1].owners, strict=True):
                param.owner = rank if cut is not None else None
                param.replica = replica if axis is not None else None
        return ownerships

    def _agreed(self, stepped: Sequence[P]) -> list[ParamBatch[P]]:
        """The batches of a step of these parameters, once ranks are found to be about to step the same. Collective.

        If elementwise, ranks of a shard axis exchange nothing, and may have gradients of different parts.
        """
        key = tuple([(param, param.tensor.grad.dtype) for param in stepped])  # type: ignore[union-attr]
        if key not in self._plans:
            keep(self._plans, key, self._new_step(stepped))
        for token, parameters, group, replicas, how, settings in self._plans[key].compared:
            # By group: its ranks may share others with different ranks, for which a step is new to some of them alone.
            known = self._known.setdefault((group, replicas), {})
            stepped_groups = [self.param_groups[index] for index in settings]
            agree(token, parameters, group, replicas, how, token in known, stepped_groups)
            if token not in known:
                keep(known, token, True)
        return self._plans[key].batches

    def _new_step(self, stepped: Sequence[P]) -> _StepRule[P]:
        numbers = self._numbers(stepped)
        by_ranks: dict[tuple[Any, Any], list[P]] = {}
        for param in self._ordered():
            cut, axis = param.cut, param.replicas
            if axis is None and cut is None:
                continue  # nothing is exchanged, or by its own collectives
            groups: tuple[Any, Any] = (cut and cut.group, axis and axis.group)
            if axis is not None:
                assert param.axes is not None
                groups = (axis.group, None) if param.elementwise else (param.axes[0].group, axis.group)
            by_ranks.setdefault(groups, []).extend([param] if param in numbers else [])
        compared = []
        for (group, replicas), params in by_ranks.items():
            tensors, count = [param.tensor for param in params], len({numbers[param] for param in params})
            how = f"{self._step_name}, in {count} batches" if count > 1 else self._step_name
            ids = set(map(id, tensors))
            settings = [at for at, of in enumerate(self.param_groups) if not ids.isdisjoint(map(id, of["params"]))]
            compared.append((token_of(tensors, how), tensors, group, replicas, how, settings))
        batches: list[list[P]] = [[] for _ in range(max(numbers.values(), default=0) + 1)]
        for param, number in numbers.items():
            batches[number].append(param)
        of_step = []
        for at, params in enumerate(batches):
            kinds = self._entries([param for param in params if param.cut is not None])
            gathers, scatters = exchanges_of(chain.from_iterable(kinds)), exchanges_of(kinds[0])
            of_step.append(ParamBatch(params, at == len(batches) - 1, gathers, scatters))
        return _StepRule(of_step, compared)

    def _numbers(self, stepped: Sequence[P]) -> dict[P, int]:
        """The batch of each parameter; batches of the same ranks are consecutive. See `in_turns` on their order.

        All are in one if the optimizer has to step all at once.
        """
        if not self._in_parts:
            return dict.fromkeys(stepped, 0)
        by_ranks: dict[Any, list[P]] = {}
        for param in stepped:
            tensor: Any = param.tensor
            cut, axis = param.cut, param.replicas
            ranks: Any = tensor.device_mesh if param.is_gathered else (cut and cut.group, axis and axis.group)
            by_ranks.setdefault(ranks, []).append(param)
        numbers: dict[P, int] = {}
        for params in by_ranks.values():
            owners = [(param.owner, param.replica) for param in params]
            numbers |= zip(params, batches_of([self._nbytes(param) for param in params], owners), strict=True)
        return numbers


def exchanges_of(entries: Iterable[Entry[P]]) -> list[Exchange[P]]:
    """The exchanges of entries whose owner is in this replica: kinds separately, to save memory."""
    by_kind: dict[Any, list[Entry[P]]] = {}
    for entry in entries:
        param, kind, dtype = entry
        if param.in_replica:
            by_kind.setdefault((param.cut.group, kind, dtype), []).append(entry)
    exchanges = []
    for (group, *_), those in by_kind.items():
        ranks: list[Any] = [param.owner for param, *_ in those]
        exchanges.append((Owners([param.cut for param, *_ in those], ranks), device_of(group), those))
    return exchanges


def to_replicas(tensors: Iterable[tuple[Param, torch.Tensor]], by_unit: bool) -> None:
    """Copy what each replica's ranks own to the other replicas. Collective, once for each dtype.

    Args:
        tensors: parameters, each with a tensor like this rank's part of it, or with one that only its owner has.
        by_unit: whether each unit has a collective of its own, which takes less memory.
    """
    alike: dict[Any, tuple[Axis, list[list[torch.Tensor]]]] = {}
    for param, tensor in tensors:
        if (axis := param.replicas) is not None:
            key = owner_of(param.tensor) if by_unit else None, axis.group, tensor.dtype
            _, by_replica = alike.setdefault(key, (axis, [[] for _ in range(axis.size)]))
            for replica, run in param.runs(tensor):
                by_replica[replica].append(run)
    for axis, by_replica in alike.values():
        if any(by_replica):
            spread(axis, by_replica)
