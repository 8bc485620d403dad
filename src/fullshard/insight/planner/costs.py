"""What a unit allocates and sends: the engine's own units, run once on meta tensors over ranks that do not exist.

Layouts, gather plans, reduction buffers and the account of bytes are those of a training run. Only the order of a step
is stated a second time (`schedule.py`); tests hold it to the engine's events.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ...comm import DONE, Comm, HookComm, Pending, TorchComm
from ...forms import with_parts
from ...mesh import Axis, MeshAxes, ShardPlacementResult
from ...shard import (
    BuildSettings,
    Found,
    GradState,
    Home,
    ReduceSettings,
    Unit,
    build_unit,
    find_parameters,
    find_shared,
    show_shared,
)
from ...torch_private.local_tensor import inside, plain_tensors
from ...torch_private.mesh_without_group import mesh_without_group
from .profile import HOST, Tracker, sent_around
from .strategy import UnitStrategy

Hook = tuple[object, Callable[..., object]]
"""The arguments of `register_comm_hook`."""


class SilentComm(TorchComm):
    """Collectives that send nothing, and count what they would send (`sent_around`).

    Attributes:
        sent: bytes that this rank would send, and collectives, by verb.
        counted_as: a verb under which all are counted; None: their own.
    """

    kind = "silent"
    communicates = False

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {}
        self.counted_as: str | None = None

    def _count(self, verb: str, axis: Axis, buffer: torch.Tensor, times: int = 1) -> Pending:
        if axis.size > 1:
            count = self.sent.setdefault(self.counted_as or verb, [0, 0])
            count[0] += sent_around(buffer.numel() * buffer.element_size(), axis.size, times)
            count[1] += 1
        return DONE

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._count("gather", axis, out)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        return self._count("reduce", axis, buffer)

    def exchange(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor) -> Pending:
        return self._count("reduce", axis, buffer)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        return self._count("all_reduce", axis, tensor, 2)


@dataclass(frozen=True)
class GatherCosts:
    """A gather of one unit. Bytes, unless stated otherwise.

    Attributes:
        cast: of the copies of shards in the dtypes that they are gathered in, where these differ from their own.
        in_flight: allocated while it is in flight, `cast` included.
        opening: most at its end, while memory that only the gather needs is still allocated.
        sent: by this rank.
        collectives: their number.
    """

    cast: int
    in_flight: int
    opening: int
    sent: int
    collectives: int


@dataclass(frozen=True)
class UnitCosts:
    """A unit on one rank. Bytes, unless stated otherwise.

    Attributes:
        name: path of its module; "" for the root.
        strategy: how it is run.
        elements, padding: of its parameters, and what the layout adds over all ranks.
        parameters, gradients: of its shards, and of the reduced slices of those that train.
        shards: shape, dtype and whether it trains, of each parameter's part on this rank.
        computed: of its shards in the dtypes that they are gathered in.
        gather, regather: of the shards; and of the slices that are kept after a forward (None: none are).
        gathered: while it is gathered.
        kept: of the slices that are kept after a forward.
        buffer: of the reduction, while it is in flight.
        scratch, scratch_again: what collectives and casts of a reduction allocate besides, for the first gradient of a
            step and for those added to it.
        received: of these, what is freed once the collective over the shard axis has arrived.
        partial: of gradients that are reduced over the shard axis only, set aside for the next micro-batch.
        residuals: what error feedback keeps, always.
        between: what the all-reduce over the replicate axis allocates.
        passing: what a hook in its place allocates while it is called.
        replicating: slices that may be reduced over the replicate axis at once; 0: there is none.
        sent: bytes that this rank sends in one reduction and all-reduce, and the number of collectives in each.
    """

    name: str
    strategy: UnitStrategy
    elements: int
    padding: int
    parameters: int
    gradients: int
    shards: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    computed: int
    gather: GatherCosts
    regather: GatherCosts | None
    gathered: int
    kept: int
    buffer: int
    scratch: int
    scratch_again: int
    received: int
    partial: int
    residuals: int
    between: int
    passing: int
    replicating: int
    sent: Mapping[str, tuple[int, int]]


def axes_of(shard: int, replicate: int = 1, backend: str = "gloo", rank: int = 0) -> MeshAxes:
    """The axes of ranks that do not exist, seen from `rank`. Rank 0 has the most elements in every layout.

    Args:
        shard, replicate: ranks over which elements are split, and over which the split copies are repeated.
        backend: whose costs decide on layouts: "gloo" or "nccl".
        rank: number of the rank on the mesh (replicate, shard); of a larger world, modulo its ranks.
    """
    shape = (replicate, shard) if replicate > 1 else (shard,)
    rank %= replicate * shard
    mesh = mesh_without_group(shape, rank=rank)
    replica, place = divmod(rank, shard)

    def axis(dim: int, size: int, at: int) -> Axis:
        return Axis(mesh.get_group(dim), size, at, backend, tuple(range(size)))

    between = axis(0, replicate, replica) if replicate > 1 else None
    return MeshAxes(mesh, torch.device("cpu"), axis(len(shape) - 1, shard, place), between, rank)


def unit_costs(
    model: nn.Module,
    units: Mapping[str, UnitStrategy],
    axes: MeshAxes,
    meshes: Mapping[str, MeshAxes] | None = None,
    hook: Hook | None = None,
) -> list[UnitCosts]:
    """The costs of each unit, in the order in which units are made.

    Args:
        model: not changed; only shapes, dtypes and `requires_grad` are read. Of a DTensor, its local tensor.
        units: by path of the modules that are units, how they are run: innermost first, the root ("") last.
        axes: see `axes_of`.
        meshes: by pattern of names (`fnmatch`), the axes of parameters that have their own (experts).
        hook: reduces gradients between replicas, from the first reduction on.

    Raises:
        LayoutError, ConfigError: what `fully_shard` would raise.
    """
    outline = outline_of(model)
    comm = SilentComm()
    separate = _separate(outline, meshes)
    settings = _settings(axes, comm, separate)
    built: dict[int, Unit] = {}  # by id of the outline's module
    taken: set[int] = set()
    alike: dict[tuple[object, ...], UnitCosts] = {}
    costs = []
    for path, strategy in units.items():
        module = outline.get_submodule(path)
        parameters = find_parameters([module], lambda inner: built.get(id(inner)), taken)
        key = (strategy, *map(partial(_kind, separate), parameters))
        if any(item.owner is not None for item in parameters) or key not in alike:
            unit = build_unit(parameters, settings(strategy))
            ranks = strategy.kept_ranks
            unit.keep_among(replace(axes.shard, size=ranks, ranks=tuple(range(ranks))) if ranks else None, axes)
            built[id(module)] = unit
            alike[key] = _costs(unit, comm, strategy, hook)
        else:
            taken |= {id(item.parameter) for item in parameters}
        costs.append(replace(alike[key], name=path))
    return costs


def build_units(
    outline: nn.Module,
    units: Mapping[str, UnitStrategy],
    axes: MeshAxes,
    meshes: Mapping[str, MeshAxes] | None = None,
) -> dict[str, Unit]:
    """Shard an outline of a model: all of its units, by path. Arguments and errors: see `unit_costs`."""
    settings = _settings(axes, SilentComm(), _separate(outline, meshes))
    built: dict[str, Unit] = {}
    by_module: dict[int, Unit] = {}
    taken: set[int] = set()

    def unit_of(module: nn.Module) -> Unit | None:
        return by_module.get(id(module))

    for path, strategy in units.items():
        module = outline.get_submodule(path)
        parameters, shared = (find([module], unit_of, taken) for find in (find_parameters, find_shared))
        built[path] = by_module[id(module)] = build_unit(parameters, settings(strategy))
        show_shared(shared)
    return built


def _settings(
    axes: MeshAxes, comm: Comm, separate: Mapping[int, ShardPlacementResult]
) -> Callable[[UnitStrategy], BuildSettings]:
    """How units of a strategy are built; `separate`: see `_separate`."""
    placement = (lambda p: separate.get(id(p))) if separate else None
    home = Home(HOST, axes.device)
    return lambda strategy: BuildSettings(
        axes, comm, strategy.policy, strategy.layout, placement, home=home if strategy.offload else None
    )


def _separate(outline: nn.Module, meshes: Mapping[str, MeshAxes] | None) -> dict[int, ShardPlacementResult]:
    """The mesh of each parameter that has its own, by id of the parameter."""
    results = {pattern: ShardPlacementResult(mesh=chosen) for pattern, chosen in (meshes or {}).items()}  # type: ignore[arg-type]
    return {
        id(parameter): result
        for name, parameter in outline.named_parameters()
        for pattern, result in results.items()
        if fnmatch.fnmatchcase(name, pattern)
    }


def _kind(separate: Mapping[int, ShardPlacementResult], item: Found) -> tuple[object, ...]:
    """The properties of a parameter that determine its costs."""
    p = item.parameter
    return p.shape, p.stride(), p.dtype, p.requires_grad, type(p), separate.get(id(p))


def outline_of(model: nn.Module, device: str = "meta") -> nn.Module:
    """The tree of a model's modules and parameters, without values; shared ones are shared."""
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def outline(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        copy = modules[id(module)] = nn.Module()
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                meta = with_parts(inside(parameter), partial(torch.empty_like, device=device))
                parameters[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            copy.register_parameter(name, parameters[id(parameter)])
        for name, child in module._modules.items():
            if child is not None:
                copy.add_module(name, outline(child))
        return copy

    return outline(model)


def _costs(unit: Unit, comm: SilentComm, strategy: UnitStrategy, hook: Hook | None) -> UnitCosts:
    """Gather and free the unit, then reduce two gradients into it, and read its account of bytes."""
    ledger, buckets = unit.ledger, unit.buckets
    layouts = [bucket.layout for bucket in buckets]
    gathered_as = [(bucket.gather_dtype or bucket.compute_dtype, bucket.sent_bytes) for bucket in buckets]
    cast = sum(n for (dtype, n), bucket in zip(gathered_as, buckets, strict=True) if dtype != bucket.storage_dtype)
    gathered = kept = 0
    gather, regather = GatherCosts(0, 0, 0, 0, 0), None
    if buckets:
        gather = _gather(unit, comm, cast)
        gathered = unit.gathered.live_bytes
        kept = ledger.gathered - gathered
        if kept:
            unit.free()
            regather = _gather(unit, comm, 0)
            unit.drop_kept()
        unit.showing.show_unsharded()
    comm.sent = {}
    hooked = HookComm(comm, *hook) if hook is not None else comm
    buffer, scratch, received, between, _ = _reduce(unit, comm, hooked)
    _, scratch_again, _, _, passing = _reduce(unit, comm, hooked)
    between_replicas = [g for g in unit.gradients if g.bucket.trains and g.bucket.axes.replicate is not None]
    return UnitCosts(
        name="",
        strategy=strategy,
        elements=sum(layout.parameter_numel for layout in layouts),
        padding=sum(layout.gathered_numel - layout.parameter_numel for layout in layouts),
        parameters=sum(part.nbytes for b in buckets for shard in b.shard_tensors for part in plain_tensors(shard)),
        gradients=sum(gradients.held_bytes for gradients in unit.gradients),
        shards=tuple(
            (tuple(member.local.shape), bucket.storage_dtype, member.sharded.requires_grad)
            for bucket in buckets
            for member in bucket.members
        ),
        computed=sum(nbytes for _, nbytes in gathered_as),
        gather=gather,
        regather=regather,
        gathered=gathered,
        kept=kept,
        buffer=buffer,
        scratch=scratch,
        scratch_again=scratch_again,
        received=received,
        partial=sum(g.bucket.layout.shard_numel * g.reduce_dtype.itemsize for g in between_replicas),
        residuals=sum(gradients.residual_bytes for gradients in unit.gradients),
        between=between,
        passing=passing,
        replicating=min((b.axes.shard.size for b in buckets if any(b.axes.replicate for b in buckets)), default=0),
        sent={verb: (nbytes // 2, count // 2) for verb, (nbytes, count) in comm.sent.items()},
    )


def _gather(unit: Unit, comm: SilentComm, cast: int) -> GatherCosts:
    """Gather the unit, and keep slices if it keeps any."""
    ledger = unit.ledger
    before, comm.sent = ledger.gathered, {}
    ledger.restart_peak()
    unit.issue_gather(comm)
    in_flight = ledger.gathered - before
    unit.finish_gather(keep=not before)
    opening = max(ledger.peak, ledger.gathered) - before
    sent, collectives = comm.sent.get("gather", (0, 0))
    return GatherCosts(cast, in_flight, opening, sent, collectives)


def _reduce(unit: Unit, comm: SilentComm, hooked: Comm) -> tuple[int, int, int, int, int]:
    """Reduce one gradient of every parameter that trains.

    Args:
        hooked: `comm`, or a hook around it.

    Returns:
        Bytes: `buffer`, `scratch`, `received`, `between` and `passing` of `UnitCosts`.
    """
    ledger, before = unit.ledger, unit.ledger.reducing
    trained = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    for gradients in trained:
        for member in gradients.bucket.members:
            parameter = member.unsharded
            if parameter is not None and parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        gradients.collect(ledger)
    buffer, scratch, received, between, passing = ledger.reducing - before, 0, 0, 0, 0
    for gradients in trained:
        assert gradients.state is GradState.PENDING
        gradients.issue_reduce(hooked, ReduceSettings(), None, unit.name)
        scratch += gradients.running.scratch
        received += gradients.running.received
    for gradients in trained:
        ledger.reduce(-gradients.wait(unit.name))
        if gradients.bucket.axes.replicate is not None:
            tracker = Tracker([gradients.running.out])
            for tensor in gradients.residuals.values() if hooked is not comm else ():
                tracker.count(tensor)
            kept = tracker.live
            comm.counted_as = "all_reduce"  # if packed, it is an exchange and a gather
            with tracker if hooked is not comm else nullcontext():
                between += gradients.replicate()
            gradients.wait(unit.name)
            comm.counted_as = None
            passing = max(passing, tracker.peak - kept)
        gradients.deliver(False)
    return buffer, scratch, received, between, passing
