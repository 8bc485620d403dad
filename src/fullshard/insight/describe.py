"""The units of a sharded model: facts about their buckets, all of them in words, and the one that owns a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..comm import Comm, HookComm
from ..dtypes import dtype_name
from ..errors import ConfigError, check_module
from ..forms import owner_of as unit_of
from ..forms import successor_of
from ..mesh import MeshAxes
from ..optim import Muon, OwnerOptimizer
from ..optim.owners import Ownership, name_of
from ..optimizers import as_list
from ..runtime import Runner, left_alone, runner_of, runners_in
from ..shard import Bucket, ReduceSettings, Unit, walk
from ..text import clean_name, clean_path, counted, plain_class, size, table


@dataclass(frozen=True)
class BucketFacts:
    """Facts about one bucket.

    Attributes:
        parameters: their names, relative to the root once the model has run, before that to the sharded module.
        layout: the name of the layout's kind.
        mesh: how the mesh is used, and how gradients are reduced, in words.
        elements: number of elements of all parameters.
        padding: number of elements that the layout adds, over all ranks.
        gathered_bytes: bytes of the full bucket, in the compute dtype.
        rank_bytes: bytes of this rank's shard.
        storage_dtype, compute_dtype: the dtypes of the shard and of the full bucket.
        gather_dtype, scatter_dtype, all_reduce_dtype: the 8-bit dtypes in which parameters, gradients, and gradients
            between replicas are sent, if any.
        error_feedback: see `MixedPrecisionPolicy`.
        trains: whether any of the parameters requires a gradient.
    """

    parameters: tuple[str, ...]
    layout: str
    mesh: str
    elements: int
    padding: int
    gathered_bytes: int
    rank_bytes: int
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    gather_dtype: torch.dtype | None
    scatter_dtype: torch.dtype | None
    all_reduce_dtype: torch.dtype | None
    error_feedback: bool
    trains: bool


def bucket_facts(runner: Runner, bucket: Bucket) -> BucketFacts:
    """The facts of one bucket of a unit."""
    layout, settings = bucket.layout, runner.settings
    root = runner.root.top.settings.axes if runner.root is not None else settings.axes
    return BucketFacts(
        parameters=tuple(member.name for member in bucket.members),
        layout=layout.name,
        mesh=f"{_ranks(bucket.axes)}; gradients: {_gradients(bucket.axes, settings.reduce, settings.comm, root)}",
        elements=layout.parameter_numel,
        padding=layout.gathered_numel - layout.parameter_numel,
        gathered_bytes=bucket.full_bytes,
        rank_bytes=layout.shard_numel * bucket.storage_dtype.itemsize,
        storage_dtype=bucket.storage_dtype,
        compute_dtype=bucket.compute_dtype,
        gather_dtype=bucket.gather_dtype,
        scatter_dtype=bucket.scatter_dtype,
        all_reduce_dtype=bucket.all_reduce_dtype,
        error_feedback=bucket.error_feedback,
        trains=any(member.sharded.requires_grad for member in bucket.members),
    )


def _ranks(axes: MeshAxes) -> str:
    """How a mesh is used."""
    ways, copies = axes.shard.size, axes.copies
    split = f"sharded {ways} ways" if ways > 1 else "not sharded"
    if copies > 1:
        split += f"{' x' if ways > 1 else ','} {copies} replicas"
    return f"{counted(axes.world, 'rank')}: {split}"


def _gradients(axes: MeshAxes, reduce: ReduceSettings, comm: Comm, root: MeshAxes) -> str:
    """How the ranks' gradients are reduced; `root` is the mesh over which tokens are counted."""
    if isinstance(comm, HookComm) and comm.between:
        settings = comm.state
        kept = " with error feedback" if settings.use_error_feedback else ""
        return (
            f"mean over {axes.world}, between replicas by PowerSGD of rank {settings.matrix_approximation_rank}{kept}"
        )
    if getattr(comm, "scales_itself", False):
        return f"by a communication hook, over {axes.world}"
    if reduce.reduction == "tokens":
        return f"sum over {axes.world}, divided by the count of tokens of {root.world}"
    if reduce.reduction == "sum":
        return f"sum over {axes.world}"
    if reduce.divide_factor is not None and reduce.divide_factor != axes.world:
        return f"sum over {axes.world}, divided by {reduce.divide_factor:g}"
    return f"mean over {axes.world}"


def plan_in_words(unit: Unit) -> str:
    """The collectives of a unit's plan."""
    plan = unit.plan
    if plan is None:
        return "no plan yet: the first gather makes one (if offloaded or resharded to fewer ranks, each gather does)"
    gather = f"gathers {size(unit.gathered_bytes)} in {counted(len(plan.gathers), 'collective')}"
    if plan.copied_bytes:
        gather += f", copies {size(plan.copied_bytes)} out of it"
    gather += f", holds {size(plan.whole_bytes + plan.copied_bytes)}"
    if plan.varying:
        gather += " and the tensors that subclasses create"
    reduced = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    if not reduced:
        return f"{gather}; reduces nothing"
    dtypes = dict.fromkeys(dtype_name(gradients.reduce_dtype) for gradients in reduced)
    reduce = f"reduces {size(sum(gradients.buffer_bytes for gradients in reduced))} of {' and '.join(dtypes)}"
    reduce += _sent_in(gradients.bucket.scatter_dtype for gradients in reduced)
    if any(gradients.bucket.axes.replicate is not None for gradients in reduced):
        between = _sent_in(gradients.bucket.all_reduce_dtype for gradients in reduced)
        reduce += f", then its slice between replicas{between}"
    if residual := sum(gradients.residual_bytes for gradients in reduced):
        reduce += f"; keeps {size(residual)} of it for the next"
    return f"{gather}; {reduce}"


def _sent_in(dtypes: Iterable[torch.dtype | None]) -> str:
    """The 8-bit dtypes in which something is sent, as the end of a phrase."""
    names = sorted({dtype_name(dtype) for dtype in dtypes if dtype is not None})
    return f", sent in {' and '.join(names)}" if names else ""


def named_runners(model: nn.Module) -> list[tuple[str, Runner]]:
    """Every unit's runner, with the path of its first module as the user wrote it; "" for `model` itself."""
    runners: dict[int, tuple[str, Runner]] = {}
    for path, module in model.named_modules():
        if (runner := runner_of(module)) is not None:
            runners.setdefault(id(runner), (clean_path(path), runner))
    return list(runners.values())


def describe(
    model: nn.Module,
    plans: bool = False,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> str:
    """How the mesh is used, how gradients are reduced, and a table of the units of `model`.

    The first lines give the number of ranks, over how many the elements are split, how many replicas there are, and how
    gradients are reduced:

        8 ranks: sharded 2 ways x 4 replicas; gradients: mean over 8

    If these differ between units, each line names its units. Then follows the table: name, layout, dtype ("float32 as
    bfloat16": storage and compute dtype), parameters, bytes when gathered and per rank, padding; and totals. Then the
    parameters in no unit: those that are ignored, and those that each rank would train on its own because
    `fully_shard(model)` was forgotten.

    Args:
        model: a model sharded by either front-end.
        plans: also describe each unit's plan, which exists after the first gather: the bytes that it gathers and the
            number of collectives, the bytes copied out of them, the bytes alive until the unit is freed, the bytes that
            it reduces, and those that error feedback keeps from the first reduction on.
        optimizer: `Muon`, `OwnerOptimizer`, or a list: also describe which rank owns what, and how owners are balanced.
            Ordinary optimizers step each rank's shards, which the table shows.

    Returns:
        Lines about meshes, a header, one line per bucket, totals, and one line for each kind of parameters in no unit;
        with `plans`, one line for all units with equal plans; with `optimizer`, lines on owners. One sentence if the
        model has no units.

    Raises:
        ConfigError: `model` is not a module.
    """
    check_module("describe", model)
    buckets: list[tuple[str, BucketFacts]] = []
    meshes: dict[str, list[str]] = {}  # how the mesh is used -> names of units
    plan_units: dict[str, list[str]] = {}  # a plan in words -> names of units
    for path, runner in named_runners(model):
        name = path or "(root)"
        if plans and runner.unit.buckets:
            plan_units.setdefault(plan_in_words(runner.unit), []).append(name)
        for bucket in runner.unit.buckets:
            facts = bucket_facts(runner, bucket)
            names = meshes.setdefault(facts.mesh, [])
            if name not in names:
                names.append(name)
            buckets.append((name, facts))
    if not buckets:
        return "no units: neither fully_shard nor FullyShardedDataParallel was applied to this model"
    header = ("unit", "layout", "dtype", "tensors", "elements", "gathered", "per rank", "padding")
    rows = [(name, facts.layout, _dtype(facts), *_sizes([facts])) for name, facts in buckets]
    rows.append(("in all", "", "", *_sizes([facts for _, facts in buckets])))
    lines = [line if len(meshes) == 1 else f"{line} ({_some(names)})" for line, names in meshes.items()]
    plan_lines = [f"{_some(names)}: {plan}" for plan, names in plan_units.items()]
    optimizers = [] if optimizer is None else as_list(optimizer)
    lines += table([header, *rows], left=(0, 2))
    return "\n".join([*lines, *_outside(model), *plan_lines, *map(_owners, optimizers)])


MOST_OWNERS = 8
"""The most owners that are shown; of more, the most loaded ones and the least loaded one."""


def _owners(optimizer: torch.optim.Optimizer) -> str:
    """Who owns what an optimizer steps, in lines."""
    name = type(optimizer).__name__
    if isinstance(optimizer, OwnerOptimizer):
        name = f"{name} ({optimizer.optimizer_class.__name__})"
    if not isinstance(optimizer, (Muon, OwnerOptimizer)):
        return f"{name}: each rank steps its shards"
    ownerships = optimizer.ownerships()
    if not ownerships:
        return f"{name}: no owners, each rank steps its shards"
    if not ownerships[0].owners:
        steps = [sum(shared.loads[replica][0] for shared in ownerships) for replica in range(len(ownerships[0].ranks))]
        total = sum(steps)
        largest = f"the largest load is {max(steps) * len(steps) / max(total, 1):.2f} times the mean"
        shares = ", ".join(f"{elements:,}" for elements in steps)
        return f"{name}: of {total:,} elements on this rank, the replicas step {shares}; {largest}"
    lines = []
    for shared in ownerships:
        copies, shards = len(shared.ranks), len(shared.ranks[0])
        ranks = f"{copies * shards} ranks" + (f" ({copies} replicas x {shards})" if copies > 1 else "")
        largest = f"the largest load is {shared.imbalance:.2f} times the mean"
        count = f"{len(shared.parameters)} whole parameters on owners among {ranks}, exchanged without padding"
        lines.append(f"{name}: {count}; {shared.balanced} are balanced, {largest}")
        places = [(replica, rank) for replica in range(copies) for rank in range(shards)]
        places.sort(key=lambda place: -shared.loads[place[0]][place[1]])
        shown = places if len(places) <= MOST_OWNERS else [*places[: MOST_OWNERS - 1], places[-1]]
        lines += [_owner(shared, *place) for place in shown]
        lines += [f"  and {len(places) - len(shown)} ranks between these"] if len(shown) < len(places) else []
    return "\n".join(lines)


def _owner(shared: Ownership, replica: int, rank: int) -> str:
    """One owner, in a line."""
    parameters = [p for p, owner in zip(shared.parameters, shared.owners, strict=True) if owner == (replica, rank)]
    what = f"{sum(parameter.numel() for parameter in parameters):,} elements"
    if shared.balanced != "elements":
        what += f", {shared.loads[replica][rank]:,} {shared.balanced}"
    names = _some([name_of(parameter) for parameter in parameters]) or "nothing"
    return f"  rank {shared.ranks[replica][rank]}: {what}: {names}"


def _sizes(buckets: list[BucketFacts]) -> tuple[str, ...]:
    """The numeric columns, summed over several buckets."""
    elements = sum(facts.elements for facts in buckets)
    return (
        f"{sum(len(facts.parameters) for facts in buckets)}",
        f"{elements:,}",
        size(sum(facts.gathered_bytes for facts in buckets)),
        size(sum(facts.rank_bytes for facts in buckets)),
        f"{100 * sum(facts.padding for facts in buckets) / max(elements, 1):.1f}%",
    )


def _dtype(facts: BucketFacts) -> str:
    stored, computed = (dtype_name(dtype) for dtype in (facts.storage_dtype, facts.compute_dtype))
    cast = f" as {computed}" if computed != stored else ""
    verbs = {
        "gathered": facts.gather_dtype,
        "reduced": facts.scatter_dtype,
        "reduced between replicas": facts.all_reduce_dtype,
    }
    sent = "".join([f", {verb} in {str(dtype).removeprefix('torch.')}" for verb, dtype in verbs.items() if dtype])
    sent += " with error feedback" if facts.error_feedback else ""
    return f"{stored}{cast}{sent}{'' if facts.trains else ', frozen'}"


def _outside(model: nn.Module) -> list[str]:
    """A line for parameters that are ignored, and one for trainable parameters in no unit."""
    ignored = left_alone(runners_in(model))
    kinds: dict[str, list[tuple[str, int]]] = {}
    for path, parameter in model.named_parameters():
        if unit_of(parameter) is None and (id(parameter) in ignored or parameter.requires_grad):
            kind = "ignored" if id(parameter) in ignored else "in no unit, so each rank trains its own"
            kinds.setdefault(kind, []).append((clean_name(path), parameter.numel()))
    return [
        f"{kind}: {_some([name for name, _ in parameters])} ({sum(n for _, n in parameters):,} elements)"
        for kind, parameters in kinds.items()
    ]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


@dataclass(frozen=True)
class Owned:
    """The unit that owns a module or a parameter.

    Attributes:
        name: the unit's name in the model; "(root)" for the model itself.
        module: the unit's module, or the first of several.
        modules: all modules of the unit.
        buckets: the facts that `describe` shows about its buckets.
    """

    name: str
    module: nn.Module = field(repr=False)
    modules: tuple[nn.Module, ...] = field(repr=False)
    buckets: tuple[BucketFacts, ...]


def owner_of(model: nn.Module, module_or_parameter: nn.Module | torch.Tensor) -> Owned:
    """The unit of `model` that gathers a parameter, or a module's direct parameters. No communication.

    For a module that is not a unit, this is the innermost unit around it.

    Args:
        model: the root, sharded by either front-end.
        module_or_parameter: a module in `model`; or a parameter: a sharded or unsharded one, a `FlatParameter`, or the
            original from before the model was sharded.

    Returns:
        The unit's name, its modules, and the facts of its buckets.

    Raises:
        ConfigError: no unit of `model` owns it; the error says why (it is ignored, was added later, belongs to a
            different model, or has no unit around it).
    """
    check_module("owner_of", model)
    if not runners_in(model):
        raise ConfigError(f"{type(model).__name__} has no units: neither front-end was applied to it", topic="no-units")
    if isinstance(module_or_parameter, nn.Module):
        return _owned(model, _runner_around(model, module_or_parameter))
    if isinstance(module_or_parameter, torch.Tensor):
        return _owned(model, _runner_with(model, module_or_parameter))
    raise ConfigError(
        "owner_of takes a module or a parameter.",
        got=type(module_or_parameter).__name__,
        remedy="get them by name with model.get_submodule(name) or model.get_parameter(name)",
    )


def _runner_around(model: nn.Module, module: nn.Module) -> Runner:
    """The runner of the innermost unit around `module`."""
    runner: Runner | None
    for path, candidate, runner in walk(model, runner_of, "", runner_of(model)):
        if candidate is not module:
            continue
        if runner is None:
            raise ConfigError(
                f"No unit runs the module {clean_path(path) or '(root)'!r}: the model has units, but none around it.",
                remedy="apply fully_shard, or FullyShardedDataParallel, to a module around it",
                topic="root-forgotten",
            )
        return runner
    raise ConfigError(f"This {plain_class(module).__name__} is not a module of the model passed to owner_of.")


def _runner_with(model: nn.Module, parameter: torch.Tensor) -> Runner:
    """The runner of the unit that has `parameter`."""
    runners = runners_in(model)
    unit = unit_of(successor_of(parameter))
    for runner in runners:
        if runner.unit is unit:
            return runner
    name = next((clean_name(name) for name, p in model.named_parameters() if p is parameter), None)
    shape = f"{type(parameter).__name__} of shape {tuple(parameter.shape)}"
    if unit is not None:
        raise ConfigError(
            "This parameter belongs to a unit of another model, or of a module around this one.",
            parameter=", ".join(member.name for member in unit.members[:3]),
            got=f"{shape}, of unit {unit.name!r}",
            remedy="pass the root to owner_of",
        )
    if name is None:
        raise ConfigError("This tensor is not a parameter of the model passed to owner_of.", got=shape)
    if id(parameter) in left_alone(runners):
        raise ConfigError(
            "No unit owns this parameter: it is ignored.",
            parameter=name,
            got="a parameter in ignored_params, ignored_states or ignored_modules",
            remedy="do not ignore it; an ignored parameter is whole on every rank, and its gradient is not reduced",
        )
    raise ConfigError(
        "No unit owns this parameter.",
        parameter=name,
        expected="a parameter that existed when a unit around it was created",
        got="a parameter with no unit around it, or one that was added later",
        remedy="apply the front-end to a module around it, after all parameters are registered",
        topic="parameter-added",
    )


def _owned(model: nn.Module, runner: Runner) -> Owned:
    path = next((path for path, other in named_runners(model) if other is runner), "")
    facts = tuple(bucket_facts(runner, bucket) for bucket in runner.unit.buckets)
    modules = tuple(runner.modules)
    return Owned(path or "(root)", modules[0], modules, facts)
