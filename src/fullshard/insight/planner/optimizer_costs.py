"""Measures an optimizer's state, temporary memory and exchanges by running it on fake tensors.

An optimizer that steps elements runs on plain tensors of the rank's shards. `Muon` and `OwnerOptimizer` run as they
are, on the parameters of the engine's own units, as ranks that do not exist: the owners, the layout of exchanges and
the order of a step are theirs. Their exchanges are counted by the group in which nothing is sent.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...containers import leaves_in
from ...forms import owner_of
from ...optim import Muon, OwnerOptimizer
from ...optim.owners import Ownership, axes_of
from ...optimizers import as_list, parameters_of
from ...shard import Unit
from ...torch_private.fake_tensors import fake_tensors
from ...torch_private.local_tensor import inside, plain_tensors
from ...torch_private.mesh_without_group import AbsentGroup
from .profile import HOST, Tracker

Shard = tuple[tuple[int, ...], torch.dtype, bool]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizers]

MOST_RANKS = 8
"""Worlds of up to this many ranks are run rank by rank; of a larger one, this many ranks that differ are run."""


@dataclass(frozen=True)
class OptimizerCosts:
    """What an optimizer costs the rank that needs the most. Bytes on the device, unless stated otherwise.

    Attributes:
        state: most of a rank, between steps. Without that of shards in host memory: what owners assemble is on the
            device, and so is its state.
        temporary: what a step allocates besides, so that the sum is the most of a rank.
        sent: by verb ("owners": over the shard axis; "replicas"), what that rank sends in a step, and in how many
            exchanges.
        owns: whether any of the optimizers has owners.
        rank: that rank; 0 if all need the same.
        imbalance: the largest load of an owner over the mean; 1 without owners.
    """

    state: int
    temporary: int
    sent: Mapping[str, tuple[int, int]]
    owns: bool
    rank: int
    imbalance: float


@dataclass(frozen=True)
class FakeShards:
    """Sharded parameters of a rank on fake tensors.

    Attributes:
        parameters: those that train, or pairs of name and parameter.
        fakes: the context in which they were made: their memory is the same memory only there.
        units: by path; own the parameters, which do not keep them alive.
    """

    parameters: list[Any]
    fakes: AbstractContextManager[Any]
    units: Mapping[str, Unit]


class _SuppliedValues(TorchDispatchMode):
    """Supplies the values that an optimizer reads from tensors without values, such as norms: False, or 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def has_owners(optimizers: Optimizers) -> bool:
    """Whether any of these steps whole parameters, or elements, on their owners."""
    return any(isinstance(optimizer, (Muon, OwnerOptimizer)) for optimizer in as_list(optimizers))


def takes_names(make: Callable[..., Any]) -> bool:
    """Whether a `MakeOptimizer` takes pairs of name and parameter, by the name of its argument."""
    try:
        return next(iter(inspect.signature(make).parameters), None) == "named_parameters"
    except ValueError:  # a builtin
        return False


def optimizer_bytes(shards: Sequence[Shard], make: MakeOptimizer) -> tuple[int, int]:
    """Bytes of state, and of the most temporary memory that a step allocates.

    Runs a single shard of each shape and dtype, then two of each, which shows whether temporary memory grows with the
    number of parameters (`foreach`) or not (a loop, `fused`).

    Args:
        shards: shape, dtype, and whether it trains.
        make: creates the optimizer for a list of parameters.

    Raises:
        Exception: whatever the optimizer raises.
    """
    counts = Counter((shape, dtype) for shape, dtype, trains in shards if trains)
    if not counts:
        return 0, 0
    kinds = list(counts)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
    with fake_tensors():
        states, once = _run(kinds, make)
        _, twice = _run([*kinds, *kinds], make)
    whole = sum(size * counts[kind] for kind, size in zip(kinds, sizes, strict=True))
    grows = (whole - sum(sizes)) / max(sum(sizes), 1)
    state = sum(nbytes * counts[kind] for kind, nbytes in zip(kinds, states, strict=True))
    return state, round(once + (twice - once) * grows)


def _run(kinds: Sequence[tuple[Any, torch.dtype]], make: MakeOptimizer) -> tuple[list[int], int]:
    """Take two steps; returns each parameter's bytes of state, and the temporary bytes of the second step."""
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu")) for shape, dtype in kinds]
    optimizers = as_list(make(parameters))
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    temporary = _step_twice(optimizers, parameters)
    return [sum(t.nbytes for t in _state_of(optimizers, p)) for p in parameters], temporary


def sharded_costs(
    parameters_of: Callable[[int], FakeShards],
    make: MakeOptimizer,
    ranks: int,
    foreach: bool,
    only: str | None = None,
) -> OptimizerCosts:
    """The costs of optimizers that get sharded parameters; the rank that needs the most decides.

    Args:
        parameters_of: makes the parameters of a rank.
        make: creates the optimizers.
        ranks: of the mesh (replicate, shard).
        foreach: whether element-wise optimizers step all parameters together, as is their default on a GPU.
        only: the path of the unit that steps; None: all of them.

    Raises:
        Exception: whatever an optimizer raises.
    """
    runs = [_run_as(rank, parameters_of(rank), make, foreach, only) for rank in _busiest(parameters_of, make, ranks)]
    needs_most = max(runs, key=lambda run: (run.state + run.temporary, -run.rank))
    most = max(run.state for run in runs)
    return replace(needs_most, state=most, temporary=needs_most.state + needs_most.temporary - most)


def _busiest(parameters_of: Callable[[int], FakeShards], make: MakeOptimizer, ranks: int) -> list[int]:
    """The ranks to run.

    Without owners rank 0, which has the most elements. Else all; of many those whose owned elements, and largest
    parameter, are the most and differ.
    """
    sharded = parameters_of(0)
    optimizers = make(sharded.parameters)
    if not has_owners(optimizers):
        return [0]
    if ranks <= MOST_RANKS:
        return list(range(ranks))
    owned: dict[int, list[int]] = defaultdict(list)  # by rank, elements of each parameter
    for shared in _ownerships(optimizers):
        for parameter, (replica, rank) in zip(shared.parameters, shared.owners, strict=False):
            owned[shared.ranks[replica][rank]].append(parameter.numel())
        for of_replica, loads in zip(shared.ranks, shared.loads, strict=True):
            if not shared.owners:
                owned[of_replica[0]].append(loads[0])
    alike: dict[tuple[int, ...], int] = {}
    for rank in sorted(owned):
        alike.setdefault(tuple(sorted(owned[rank])), rank)
    largest = sorted(alike, key=lambda numels: -sum(numels) - 3 * max(numels))  # Newton-Schulz takes three of its size
    return sorted({0, *[alike[numels] for numels in largest[:MOST_RANKS]]})


def _ownerships(optimizers: Optimizers) -> list[Ownership]:
    return [
        shared
        for optimizer in as_list(optimizers)
        if isinstance(optimizer, (Muon, OwnerOptimizer))
        for shared in optimizer.ownerships()
    ]


def _run_as(rank: int, sharded: FakeShards, make: MakeOptimizer, foreach: bool, only: str | None) -> OptimizerCosts:
    """Take two steps as one rank; the costs of the second."""
    optimizers = as_list(make(sharded.parameters))
    steps = [only is None or owner_of(p) is sharded.units[only] for p in parameters_of(optimizers)]
    for optimizer in optimizers:
        if not isinstance(optimizer, (Muon, OwnerOptimizer)):
            _on_plain_tensors(optimizer)
        for group in optimizer.param_groups if foreach else ():
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    stepped = list(compress(parameters_of(optimizers), steps))
    groups = list(dict.fromkeys(verb_and_group for p in stepped for verb_and_group in _groups_of(p)))
    with sharded.fakes, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about addresses of fake tensors
        for parameter in stepped:
            parameter.grad = torch.empty_like(parameter)
        temporary = _step_twice(optimizers, stepped, groups)
    sent: dict[str, tuple[int, int]] = {}
    for verb, exchanges in groups:
        nbytes, count = sent.get(verb, (0, 0))
        sent[verb] = nbytes + sum(exchanges.sent), count + len(exchanges.sent)
    return OptimizerCosts(
        state=sum(t.nbytes for p in stepped for t in _state_of(optimizers, p) if t.device != HOST),
        temporary=temporary,
        sent=sent,
        owns=has_owners(optimizers),
        rank=rank,
        imbalance=max([1.0, *[shared.imbalance for shared in _ownerships(optimizers)]]),
    )


def _groups_of(parameter: torch.Tensor) -> list[tuple[str, AbsentGroup]]:
    """The groups over which a parameter's owners exchange, and the verbs under which they are counted."""
    shard, replicate = axes_of(parameter) or (None, None)
    axes = {"owners": shard, "replicas": replicate}
    groups = [(verb, axis.group) for verb, axis in axes.items() if axis is not None]
    return [(verb, group) for verb, group in groups if isinstance(group, AbsentGroup)]


def _on_plain_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Make an element-wise optimizer step plain tensors in place of the shards of DTensors."""
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            plain = nn.Parameter(inside(parameter.detach()), requires_grad=True)
            group["params"][at] = plain
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[plain] = {key: inside(value) for key, value in state.items()}


def _step_twice(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[torch.Tensor],
    groups: Sequence[tuple[str, AbsentGroup]] = (),
) -> int:
    """Take two steps; returns the temporary bytes of the second, the only one whose exchanges are counted."""
    with _SuppliedValues():
        for optimizer in optimizers:
            optimizer.step()
    for _, group in groups:
        group.sent.clear()
    existing = [
        part
        for parameter in parameters
        for tensor in (parameter, parameter.grad, *_state_of(optimizers, parameter))
        if tensor is not None
        for part in plain_tensors(tensor)
    ]
    with Tracker(existing) as tracker, _SuppliedValues():
        for optimizer in optimizers:
            optimizer.step()
    return tracker.peak


def _state_of(optimizers: Sequence[torch.optim.Optimizer], parameter: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a parameter's state."""
    states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
    tensors = [leaf for state in states for leaf in leaves_in(state) if isinstance(leaf, torch.Tensor)]
    return [part for tensor in tensors for part in plain_tensors(tensor)]
