"""`plan`: what a training run will hold, send and take, before it runs."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...api.functional.arguments import blocks_of
from ...api.messages import hook_beside_8_bits
from ...comm import PowerSGDState
from ...errors import FullshardError
from ...forms import owner_of
from ...generators import restored_generators
from ...optim.guard import FAIL_ON_RUNS
from ...optim.probe import treats_elements
from ...policies import MixedPrecisionPolicy
from ...text import counted, size, table
from ...torch_private.fake_tensors import fake_tensors
from ...torch_private.mesh_without_group import mesh_without_group
from . import messages
from .costs import Hook, UnitCosts, axes_of, build_units, outline_of, unit_costs
from .optimizer_costs import (
    FakeShards,
    MakeOptimizer,
    OptimizerCosts,
    has_owners,
    optimizer_bytes,
    sharded_costs,
    takes_names,
)
from .profile import Profile, Step, TooMuch, profile
from .schedule import KINDS, WHOLE, Axes, Rates, Timeline
from .strategy import (
    REFINEMENTS,
    Strategy,
    UnitStrategy,
    check_counts,
    checked_node,
    refines,
    strategies,
    with_fields,
)

T = TypeVar("T")

H100 = Rates(flops=400e12, bandwidth=150e9, between=40e9, latency=20e-6)
"""Rates that are assumed for "cuda": bf16 on an H100 of a DGX node at 40% of its peak, NVLink within a node, and
400 Gb/s InfiniBand between nodes at the share that rings reach. Estimates; `measure_rates` measures."""

GLOO = Rates(flops=50e9, bandwidth=1e9, between=1e9, latency=300e-6, copy=8e9, overlap=0.0, large=0.5)
"""Rates that are assumed for "cpu": one core, gloo over loopback. Estimates."""

RESERVE = {"cuda": (1.05, 2**30), "cpu": (1.0, 0)}
"""By device: the ratio of bytes that the caching allocator reserves to bytes allocated, and the bytes of the context
and of NCCL's buffers (docs/plan.md has the measurements)."""


@dataclass(frozen=True)
class Plan:
    """One strategy's step on rank 0, the rank with the most elements.

    Attributes:
        strategy: how the model is sharded and run.
        memory: bytes by kind at the moment of the peak: parameters (shards, buffers), gradients (reduced, and what
            error feedback keeps), optimizer, gathered, reducing (with gradients that are accumulated whole),
            activations (with gradients that are not collected yet), logits (with what the loss computes from them).
        most: by kind, its own peak.
        where: the moment of the peak.
        reserved: what the allocator and the device's context are expected to hold at the peak.
        device_memory: of one device; None: not given.
        sent: bytes that this rank sends in a step, by verb: "gather", "reduce", "all_reduce", "tensor" (in
            tensor-parallel collectives), "owners" and "replicas" (in exchanges of an optimizer with owners).
        collectives: their number, by verb.
        padding: of the layout, elements over all ranks; `elements`: of the parameters.
        micro_batches: forwards and backwards in a step.
        compute, exposed: seconds of computation, and of waiting for communication.
        waits: seconds of waiting, by unit.
        tokens: of all ranks in a step.
        flops: of one rank in a step.
        logits: bytes of the model's largest output.
        owners: what an optimizer with owners costs: the rank that needs the most, which `memory` and `sent` count, and
            how much larger the largest load of an owner is than the mean; None without owners.
        units: the costs of each unit.
    """

    strategy: Strategy
    memory: Mapping[str, int]
    most: Mapping[str, int]
    where: str
    reserved: int
    device_memory: int | None
    sent: Mapping[str, int]
    collectives: Mapping[str, int]
    elements: int
    padding: int
    micro_batches: int
    compute: float
    exposed: float
    waits: Mapping[str, float]
    tokens: int
    flops: int
    logits: int
    owners: OptimizerCosts | None
    units: tuple[UnitCosts, ...]

    @property
    def peak(self) -> int:
        """Most bytes allocated at one moment of a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether `reserved` is no more than `device_memory`; True if that is not given."""
        return self.device_memory is None or self.reserved <= self.device_memory

    @property
    def seconds(self) -> float:
        """The duration of a step, without the optimizer."""
        return self.compute + self.exposed

    def as_json(self) -> dict[str, Any]:
        """Numbers and strings only."""
        others = ("units", "strategy", "owners")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in others}
        if self.owners is not None:
            fields |= {"owner_rank": self.owners.rank, "owner_imbalance": self.owners.imbalance}
        strategy = {f.name: getattr(self.strategy, f.name) for f in dataclasses.fields(self.strategy)}
        strategy |= {name: str(strategy[name]) for name in ("layout", "units")}
        strategy["mp_policy"] = strategy["mp_policy"] and str(strategy["mp_policy"])
        fits = self.fits if self.device_memory is not None else None
        return {"strategy": strategy, "peak": self.peak, "fits": fits, "seconds": self.seconds, **fields}

    def __str__(self) -> str:
        """Where memory, bytes and time go."""
        lines = [f"{self.strategy}, micro-batch {self.strategy.micro_batch} x {self.micro_batches}", ""]
        rows = [(NAMES[kind], size(self.memory[kind])) for kind in KINDS]
        rows += [("allocated at the peak", size(self.peak)), (f"  in the {self.where}", "")]
        rows += [("expected with allocator and context", size(self.reserved))] if self.reserved != self.peak else []
        if self.device_memory is not None:
            fits = "fits" if self.fits else f"{size(self.reserved - self.device_memory)} too little"
            rows.append(("memory of a device", f"{size(self.device_memory)}  {fits}"))
        rows.append(("", ""))
        for verb, nbytes in self.sent.items():
            if nbytes:
                rows.append((f"sent in {self.collectives[verb]} x {VERBS[verb]}", size(nbytes)))
        if self.owners is not None:
            load = f"{self.owners.imbalance:.2f} x the mean"
            rows.append(("largest load of an owner", f"{load}; rank {self.owners.rank} needs the most memory"))
        rows.append(("padding of the layout", f"{100 * self.padding / max(self.elements, 1):.2f}%"))
        rows.append(
            ("a step", f"{self.seconds:.3g} s, of which {100 * self.exposed / max(self.seconds, 1e-12):.0f}% waiting")
        )
        slow = sorted(self.waits.items(), key=lambda item: -item[1])[:3]
        rows += [(f"  waits for {name or 'the root'}", f"{seconds:.3g} s") for name, seconds in slow]
        width = max(40, 2 + max(len(name) for name, _ in rows))
        return "\n".join([*lines, *[f"{name:<{width}}{value}".rstrip() for name, value in rows]])


NAMES = {
    "parameters": "parameters and buffers",
    "gradients": "reduced gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered units",
    "reducing": "reductions, and what waits for them",
    "activations": "activations and new gradients",
    "logits": "logits and loss",
}
VERBS = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "tensor": "tensor-parallel collectives",
    "owners": "exchange with owners",
    "replicas": "exchange of new values",
}


@dataclass(frozen=True)
class Plans:
    """Strategies in order: those that fit first, the fastest of them first; then those that need the least memory.

    Attributes:
        ranked: all plans.
        model: the model's class.
        ranks: of the world.
        left_out: why no strategy with checkpointing was planned; "" if they were.
    """

    ranked: tuple[Plan, ...]
    model: str
    ranks: int
    left_out: str = ""

    @property
    def best(self) -> Plan:
        """The first."""
        return self.ranked[0]

    @property
    def fits(self) -> bool:
        """Whether any fits."""
        return self.best.fits

    def __str__(self) -> str:
        """A table of the first ten, and the best in detail."""
        header = ("", "strategy", "micro-batch", "memory", "s a step", "waiting", "tokens/s")
        rows = [
            (
                ("fits" if plan.fits else "no") if plan.device_memory is not None else "",
                str(plan.strategy),
                f"{plan.strategy.micro_batch} x {plan.micro_batches}",
                size(plan.reserved),
                f"{plan.seconds:.3g}",
                f"{100 * plan.exposed / max(plan.seconds, 1e-12):.0f}%",
                f"{plan.tokens / plan.seconds:,.0f}" if plan.seconds else "-",
            )
            for plan in self.ranked[:10]
        ]
        more = [f"... and {len(self.ranked) - 10} more"] if len(self.ranked) > 10 else []
        more += [f"left out: checkpointing, with which the model raises {self.left_out}"] if self.left_out else []
        title = f"{self.model} on {counted(self.ranks, 'rank')}"
        if len(self.ranked) == 1:
            return f"{title}: {self.best}"
        return "\n".join([title, "", *table([header, *rows], left=(0, 1, 2)), *more, "", f"best: {self.best}"])


@restored_generators()
def plan(
    model: nn.Module | Callable[[], nn.Module],
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    batch: int = 1,
    sequence: int = 1,
    step: Step | None = None,
    strategy: Strategy | Sequence[Strategy] | None = None,
    fixed: Mapping[str, Any] | None = None,
    mp_policy: MixedPrecisionPolicy | Sequence[MixedPrecisionPolicy] = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    optimizer: str | MakeOptimizer = "AdamW",
    device: str = "cuda",
    device_memory: int | None = None,
    meshes: Mapping[str, tuple[int, int]] | None = None,
    tensor_parallel: int = 1,
    parallelize: Parallelize | None = None,
    rates: Rates | None = None,
    comm_hook: Hook | None = None,
) -> Plans:
    """Compute memory, traffic and time of a training step before it runs, for one strategy or for the best ones.

    Runs one step of the model on fake tensors, and the engine's own units on meta tensors. Needs no device, no process
    group, and no memory for the model. The model is not changed.

        plans = fullshard.plan(build, ranks=64, batch=4, sequence=2048, device_memory=80 * 2**30)
        print(plans)
        plans.best.strategy

    Args:
        model: not sharded; or a function that builds it, which is called with `meta` as the default device and may
            return a pair of model and `step`.
        ranks: number of ranks over which data is split. The world has `tensor_parallel` times as many.
        ranks_per_node: of one machine; None: 8, or the whole world if it is smaller. Axes with more ranks send between
            machines. A search also tries one copy per machine.
        batch: sequences of one rank in one optimizer step, over all micro-batches.
        sequence: tokens of a sequence.
        step: makes a batch, runs the model and returns a loss; None: token ids go in, and the cross entropy of the
            logits is the loss. See `Step`.
        strategy: one, or several to compare; None: the search compares layouts, copies, when units are freed,
            checkpointing and micro-batches, and tries on each what may make it faster or smaller: prefetch, how
            gradients are accumulated, a single unit, steps in the backward; and offloading where nothing fits (on a
            CPU nothing can be offloaded).
        fixed: fields of `Strategy` that the search sets and does not vary: {"layout": "flat", "micro_batch": 4}.
        mp_policy: dtypes, as for `fully_shard`; a search compares several.
        optimizer: a class of `torch.optim` by name, with its defaults; or a function of a list of parameters, or of
            `named_parameters` if its argument has this name, which returns an optimizer or a list of them. `Muon` and
            `OwnerOptimizer` get the sharded parameters, and run as they are; the rank that needs the most decides.
        device: "cuda" or "cpu": decides on layouts, rates, and what the allocator holds besides.
        device_memory: bytes of one device.
        meshes: by pattern of parameter names (`fnmatch`), over how many ranks these parameters are split, and how often
            the split copies are repeated: (8, 8) for experts of which each of 8 ranks has its own.
        tensor_parallel: ranks over which tensors are split, which compute the same batch.
        parallelize: called as `parallelize(model, mesh)` with the model that was built and a 1-D mesh of these ranks,
            which has no process group; it calls `parallelize_module`.
        rates: of computation and communication; None: estimates for an H100, or for one core and gloo.
        comm_hook: a `PowerSGDState` and its hook, as for `register_comm_hook`; planned are the steps that compress
            (from `start_powerSGD_iter` on). Strategies without replicas are left out of a search.

    Returns:
        The plans, best first. Bytes are exact but for temporary memory inside kernels; times are an estimate.

    Raises:
        ConfigError: an argument is invalid, or the model or the optimizer cannot run on fake tensors.
        LayoutError: a parameter that the layout cannot hold.
    """
    policies = list_of(MixedPrecisionPolicy, "mp_policy", mp_policy)
    check_counts(ranks=ranks, batch=batch, sequence=sequence, tensor_parallel=tensor_parallel)
    node = checked_node(ranks, ranks_per_node, tensor_parallel)
    tensor = tensor_parallel, parallelize
    hook = checked_hook(comm_hook)
    planner = Planner(model, step, policies[0], optimizer, device, device_memory, meshes, tensor, rates, hook)
    size_of_run = RunSize(ranks, batch, sequence, node)
    fixed = fixed or {}
    if strategy is None:
        planner.check_fixed(fixed)
        chosen = with_fields(strategies(ranks, ranks_per_node, batch, policies, tensor_parallel), fixed, ranks, batch)
        plans = list(planner.search(chosen, size_of_run, fixed))
    elif fixed:
        raise messages.fixed_without_search(fixed)
    else:
        chosen = list_of(Strategy, "strategy", strategy)
        for choice in chosen:
            choice.check(ranks, batch)
        plans = [planner.plan(choice, size_of_run) for choice in chosen]
    ranked = sorted(plans, key=lambda p: (not p.fits, p.seconds if p.fits else p.peak))
    return Plans(tuple(ranked), type(planner.model).__name__, ranks * tensor_parallel, planner.left_out)


class RunSize(NamedTuple):
    """The size of a run; `node`: ranks on one machine; other fields: see `plan`."""

    ranks: int
    batch: int
    sequence: int
    node: int


class Planner:
    """Plans strategies of one model; profiles and unit costs are computed once for all of them.

    Args: see `plan`; `tensor` is `tensor_parallel` and `parallelize`; `until`: see `profile`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        step: Step | None,
        mp_policy: MixedPrecisionPolicy,
        optimizer: str | MakeOptimizer,
        device: str,
        device_memory: int | None = None,
        meshes: Mapping[str, tuple[int, int]] | None = None,
        tensor: tuple[int, Parallelize | None] = (1, None),
        rates: Rates | None = None,
        hook: Hook | None = None,
        until: float | None = None,
    ) -> None:
        if device not in RESERVE:
            raise messages.invalid("device", '"cuda" or "cpu"', device)
        if device_memory is not None:
            check_counts(device_memory=device_memory)
        if rates is not None and not isinstance(rates, Rates):
            raise messages.invalid("rates", "a fullshard.Rates, as fullshard.measure_rates() returns", rates)
        self.model, own_step = built_model(model)
        _parallelize(self.model, isinstance(model, nn.Module), *tensor)
        self.policy, self.device, self.device_memory, self.tensor = mp_policy, device, device_memory, tensor[0]
        self.meshes = _checked_meshes(meshes, [name for name, _ in self.model.named_parameters()])
        self.step, self.hook, self.until = step or own_step or tokens_to_loss, hook, until
        self.make = _optimizer(optimizer, device)
        self.rates = rates or assumed_rates(device)
        self.blocks = cache(self._blocks)
        self._profiles: dict[Any, Profile | None] = {}
        self.left_out = ""  # why strategies with checkpointing are
        self.costs = cache(self._costs)
        self.optimizer = cache(self._optimizer)
        self.sharded, self.has_owners = cache(self._sharded), cache(self._has_owners)
        self.is_custom, self.named = callable(optimizer), callable(optimizer) and takes_names(optimizer)

    @property
    def offloads(self) -> bool:
        """Whether there is a device whose shards can be in host memory."""
        return self.device != "cpu"

    @property
    def backend(self) -> str:
        """The backend whose costs decide on layouts."""
        return "nccl" if self.device == "cuda" else "gloo"

    def _blocks(self, units: Any) -> list[tuple[str, dict[str, Any]]]:
        if units == "model":
            return []
        blocks = [(name, overrides) for name, _, overrides in blocks_of(self.model, units)]
        for name, overrides in blocks:
            if "shard_placement_fn" in overrides:
                raise messages.placement_of_a_block(name)
        return blocks

    def profile(
        self,
        policies: tuple[tuple[str, MixedPrecisionPolicy], ...],
        micro_batch: int,
        sequence: int,
        recomputes: bool,
        most: int | None = None,
    ) -> Profile | None:
        """The profile of these units, by path; None: more bytes than `most` are alive."""
        key = policies, micro_batch, sequence, recomputes
        if key not in self._profiles or (most is None and self._profiles[key] is None):
            how: dict[str, Any] = {"checkpointing": recomputes, "tensor_parallel": self.tensor, "until": self.until}
            result = None
            try:
                result = profile(self.model, dict(policies), self.step, micro_batch, sequence, most=most, **how)
            except TooMuch:
                pass
            except FullshardError:
                raise
            except Exception as error:
                if not any(parameter.requires_grad for parameter in self.model.parameters()):
                    raise messages.nothing_trains() from error
                raise messages.step_failed(error, micro_batch, sequence, recomputes) from error
            self._profiles[key] = result
        return self._profiles[key]

    def _costs(self, units: tuple[tuple[str, UnitStrategy], ...], shard: int, replicate: int) -> tuple[UnitCosts, ...]:
        axes = axes_of(shard, replicate, self.backend)
        separate = {pattern: axes_of(*sizes, self.backend) for pattern, sizes in self.meshes.items()}
        return tuple(unit_costs(self.model, dict(units), axes, separate, self.hook))

    def _has_owners(self) -> bool:
        """Whether any of the optimizers has owners."""
        if not self.is_custom:
            return False
        units = Strategy(units="model").by_unit([], self.policy, 1)
        sharded = self._shards_of(tuple(units.items()), 1, 1, 0)
        try:
            return has_owners(self.make(sharded.parameters))
        except Exception as error:
            if self.named or isinstance(error, FullshardError):
                raise messages.optimizer_failed(error) from error
            return False  # it may need plain tensors, and is called with these then

    def _shards_of(
        self, units: tuple[tuple[str, UnitStrategy], ...], shard: int, replicate: int, rank: int
    ) -> FakeShards:
        """The parameters that train, as they are on a rank."""
        axes = axes_of(shard, replicate, self.backend, rank)
        separate = {pattern: axes_of(*sizes, self.backend, rank) for pattern, sizes in self.meshes.items()}
        with fake_tensors() as fakes:
            outline = outline_of(self.model, "cpu")
            built = build_units(outline, dict(units), axes, separate)
        trained = [(name, parameter) for name, parameter in outline.named_parameters() if parameter.requires_grad]
        return FakeShards(trained if self.named else [parameter for _, parameter in trained], fakes, built)

    def _sharded(
        self, units: tuple[tuple[str, UnitStrategy], ...], shard: int, replicate: int, only: str | None = None
    ) -> OptimizerCosts:
        """The costs of optimizers that get sharded parameters, or their names; `only`: of the step of one unit."""
        try:
            shards_of = partial(self._shards_of, units, shard, replicate)
            return sharded_costs(shards_of, self.make, shard * replicate, self.backend == "nccl", only)
        except Exception as error:
            raise messages.optimizer_failed(error) from error

    def _optimizer(self, shards: tuple[Any, ...]) -> tuple[int, int]:
        try:
            return optimizer_bytes(shards, self.make)
        except Exception as error:
            raise messages.optimizer_failed(error) from error

    def plan(self, strategy: Strategy, run: RunSize) -> Plan:
        """The plan of one strategy."""
        ranks, batch, sequence, node = run
        for pattern, sizes in self.meshes.items():
            if ranks % (sizes[0] * sizes[1]):
                expected = f"a pair (shard, replicate) whose product divides {ranks}"
                raise messages.invalid(f"meshes[{pattern!r}]", expected, sizes)
        if not self.offloads:
            strategy = dataclasses.replace(strategy, offload=False, state_on_host=False)  # which do nothing there
        shard = ranks // strategy.replicate
        axes = Axes(shard, strategy.replicate, self.tensor, node)
        micro_batches = batch // strategy.micro_batch
        how = self._how(strategy, shard)
        if self.hook is not None and strategy.replicate == 1:
            raise messages.hook_without_replicas(ranks)
        if self.hook is not None and (packed := [name for name, u in how.items() if u.policy.all_reduce_dtype]):
            raise hook_beside_8_bits(packed[0] or "the root", "all_reduce_dtype")
        step = self.profile(_policies(how), strategy.micro_batch, sequence, strategy.checkpointing)
        assert step is not None
        # Whether units are prefetched, freed or offloaded changes nothing in what they cost.
        alike = {name: dataclasses.replace(u, prefetch=0, offload=False, reshard=True) for name, u in how.items()}
        units = tuple(
            dataclasses.replace(costs, strategy=how[costs.name])
            for costs in self.costs(tuple(alike.items()), shard, strategy.replicate)
        )
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        ran = {moment.unit for moment in step.moments if moment.kind == "enter"}  # others get no gradients, no state
        on_device = [costs for costs in units if not costs.strategy.offload and costs.name in ran]
        in_parts = strategy.step_in_backward or strategy.state_on_host
        if self.has_owners() and (in_parts or self.tensor > 1):
            beside = "step_in_backward" if strategy.step_in_backward else "state_on_host"
            raise messages.owners_beside("tensor_parallel" if self.tensor > 1 else beside)
        placed = tuple((name, dataclasses.replace(u, offload=how[name].offload)) for name, u in alike.items())
        first = {costs.shards: costs.name for costs in reversed(on_device)}  # of units that are alike

        def stepped(costs: UnitCosts) -> tuple[int, int]:
            """Bytes of a unit's state, and of temporary memory in its step."""
            if not self.named:
                return self.optimizer(costs.shards)
            sharded = self.sharded(placed, shard, strategy.replicate, first[costs.shards])
            return sharded.state, sharded.temporary

        owners = None
        if self.has_owners() or self.named:
            on_shards = self.sharded(placed, shard, strategy.replicate)
            state, temporary, owners = on_shards.state, on_shards.temporary, on_shards if on_shards.owns else None
        else:
            state, temporary = self.optimizer(sum([costs.shards for costs in on_device], ()))
        temporaries = {WHOLE: temporary}
        hosted: dict[str, int] = {}
        if in_parts:
            temporaries = {costs.name: 0 for costs in units}
            temporaries |= {costs.name: stepped(costs)[1] for costs in on_device}
        if strategy.state_on_host:
            state, hosted = 0, {costs.name: stepped(costs)[0] for costs in on_device}
        timeline = Timeline(
            step,
            units,
            strategy,
            micro_batches,
            self.rates,
            axes,
            besides=buffers,
            state=state,
            temporary=temporaries,
            hosted=hosted,
            exchanges={} if owners is None else owners.sent,
        )
        factor, context = RESERVE[self.device]
        return Plan(
            strategy=strategy,
            memory=timeline.peak,
            most=timeline.most,
            where=timeline.where,
            reserved=round(sum(timeline.peak.values()) * factor) + context,
            device_memory=self.device_memory,
            sent=dict(timeline.sent),
            collectives=dict(timeline.collectives),
            elements=sum(costs.elements for costs in units),
            padding=sum(costs.padding for costs in units),
            micro_batches=micro_batches,
            compute=timeline.compute,
            exposed=timeline.exposed,
            waits=dict(timeline.waits),
            tokens=batch * sequence * ranks,
            flops=step.flops * micro_batches,
            logits=step.logits,
            owners=owners,
            units=units,
        )

    def search(self, chosen: Sequence[Strategy], run: RunSize, fixed: Collection[str]) -> Iterator[Plan]:
        """Plan these strategies, and the refinements of each that help; with offloading if none of them fits.

        Fields in `fixed` are not changed. A strategy without checkpointing is left out if its activations alone do not
        fit: with checkpointing it needs less.
        """
        if self.hook is not None:  # it replaces the all-reduce of replicas
            chosen = [choice for choice in chosen if choice.replicate > 1]
            if not chosen:
                raise messages.hook_without_replicas(run.ranks)
        fits, planned, failed, both = False, False, None, "checkpointing" not in fixed
        for offload in (False, True):
            if offload and (fits or not self.offloads or "offload" in fixed):
                break
            for choice in chosen:
                if both and (failed if choice.checkpointing else not self._activations_fit(choice, run)):
                    continue
                try:
                    first = self.plan(dataclasses.replace(choice, offload=True) if offload else choice, run)
                except messages.StepFailed as error:
                    if not (both and choice.checkpointing):
                        raise
                    failed, self.left_out = error, messages.in_few_words(error)
                    continue
                for plan in (first, *self._refine(first, run, fixed)):
                    fits = fits or plan.fits
                    planned = True
                    yield plan
        if failed is not None and not planned:
            raise failed

    def _how(self, strategy: Strategy, shard: int) -> dict[str, UnitStrategy]:
        return strategy.by_unit(self.blocks(strategy.units), self.policy, shard)

    def _activations_fit(self, strategy: Strategy, run: RunSize) -> bool:
        """Whether they fit, or are recomputed."""
        if strategy.checkpointing or self.device_memory is None:
            return True
        policies = _policies(self._how(strategy, run.ranks // strategy.replicate))
        return self.profile(policies, strategy.micro_batch, run.sequence, False, self.device_memory) is not None

    def _refine(self, best: Plan, run: RunSize, fixed: Collection[str]) -> list[Plan]:
        """The refinements of a plan that help: at least 1% faster; or smaller, if it does not fit."""
        first, better = best, list[Plan]()
        for change in REFINEMENTS:
            if (
                any(name in fixed for name in change)
                or not refines(best.strategy, change, run.batch)
                or not self._may_fit(best, change)
            ):
                continue
            refined = self.plan(dataclasses.replace(best.strategy, **change), run)
            if refined.fits and (not best.fits or refined.seconds < 0.99 * best.seconds):
                better.append(refined)
                best = refined
            elif not best.fits and refined.peak < best.peak:  # several changes together may fit
                best = refined
        return better if best.fits or best is first else [best]

    def check_fixed(self, fixed: Mapping[str, Any]) -> None:
        """Refuse a field that would have no effect: on a CPU everything is in host memory.

        Raises:
            ConfigError: `offload` or `state_on_host` is set there.
        """
        for name in ("offload", "state_on_host"):
            if fixed.get(name) is True and not self.offloads:
                raise messages.nothing_to_offload(name)

    def _may_fit(self, plan: Plan, change: Mapping[str, Any]) -> bool:
        """Whether to plan a refinement at all: one unit is gathered whole, and owners step all parameters at once."""
        in_parts = "step_in_backward" in change or "state_on_host" in change
        if (in_parts and self.has_owners()) or ("state_on_host" in change and plan.fits):
            return False
        if "units" in change and not plan.fits:
            return False
        whole = sum(costs.gathered for costs in plan.units)
        return "units" not in change or self.device_memory is None or whole < self.device_memory


def _policies(how: Mapping[str, UnitStrategy]) -> tuple[tuple[str, MixedPrecisionPolicy], ...]:
    return tuple((name, unit.policy) for name, unit in how.items())


def tokens_to_loss(model: nn.Module, micro_batch: int, sequence: int) -> torch.Tensor:
    """The default `step`: token ids [micro_batch, sequence] go in; the cross entropy of the logits, shifted, comes out.

    A model of Hugging Face's, which takes `labels`, computes its own loss.
    """
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64, device="cpu")
    if hasattr(getattr(model, "config", None), "model_type"):
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss
    output = model(tokens)
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    logits = getattr(output, "logits", output)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


Parallelize = Callable[[nn.Module, DeviceMesh], object]
"""`parallelize(model, mesh)` splits a model's parameters over a mesh."""


def _parallelize(model: nn.Module, given: bool, tensor_parallel: int, parallelize: Parallelize | None) -> None:
    """Split the parameters of a model over ranks that do not exist.

    Args:
        given: whether the model is the caller's own.
    """
    if parallelize is None and tensor_parallel == 1:
        return
    if parallelize is None or tensor_parallel == 1 or given:
        raise messages.nothing_to_parallelize(tensor_parallel, given)
    try:
        parallelize(model, mesh_without_group((tensor_parallel,)))
    except FullshardError:
        raise
    except Exception as error:
        raise messages.parallelize_failed(error, tensor_parallel) from error


def assumed_rates(device: str) -> Rates:
    """The rates that are assumed for "cuda" or "cpu"."""
    return H100 if device == "cuda" else GLOO


def built_model(model: Any) -> tuple[nn.Module, Step | None]:
    """A model, or the model that a function builds on the meta device, and the step that it may return with it.

    Raises:
        ConfigError: it cannot be built, is not a module, or is sharded already.
    """
    step = None
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise messages.not_a_model(model)
        try:
            with torch.device("meta"):
                model = model()
        except FullshardError:
            raise
        except (Exception, SystemExit) as error:
            raise messages.build_failed(error) from error
        if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
            model, step = model
        if not isinstance(model, nn.Module):
            raise messages.not_a_model(model)
    for name, parameter in model.named_parameters():
        if owner_of(parameter) is not None:
            raise messages.sharded_already(name)
    return model, step


def _optimizer(optimizer: str | MakeOptimizer, device: str) -> MakeOptimizer:
    if callable(optimizer):
        return optimizer
    kinds: dict[str, Any] = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and kind is not torch.optim.Optimizer
        and issubclass(kind, torch.optim.Optimizer)
        and name not in ("LBFGS", "SparseAdam")  # which need a closure, and sparse gradients
    }
    if optimizer not in kinds:
        raise messages.unknown_optimizer(optimizer, sorted(kinds))
    kind = kinds[optimizer]
    matrix = nn.Parameter(torch.zeros(2, 2, device="cpu"))
    if optimizer in FAIL_ON_RUNS["torch"] and not treats_elements(kind([matrix])):
        raise messages.needs_whole_tensors(optimizer)
    many = device == "cuda" and "foreach" in kind.__init__.__code__.co_varnames  # its default on a GPU
    options: dict[str, Any] = {"foreach": True} if many else {}
    return partial(kind, **options)


def list_of(kind: type[T], name: str, value: T | Sequence[T]) -> list[T]:
    """Return a list of one object of this class, or of several."""
    listed = [value] if isinstance(value, kind) else value
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(each, kind) for each in listed):
        raise messages.invalid(name, f"a {kind.__name__}, or a list of some", value)
    return list(listed)


def checked_hook(hook: Any) -> Hook | None:
    """The hook with a copy of its state that compresses from the first reduction on."""
    if hook is None:
        return None
    if not isinstance(hook, tuple) or len(hook) != 2 or not isinstance(hook[0], PowerSGDState) or not callable(hook[1]):
        expected = "a PowerSGDState and powerSGD_hook, both of fullshard.comm_hooks: no other hook can be planned"
        raise messages.invalid("comm_hook", expected, hook)
    state = copy.copy(hook[0])
    state.start_powerSGD_iter = 0
    return state, hook[1]


def _checked_meshes(
    meshes: Mapping[str, tuple[int, int]] | None, names: Sequence[str]
) -> Mapping[str, tuple[int, int]]:
    if not isinstance(meshes, Mapping | None):
        raise messages.invalid("meshes", "a dict: pattern of parameters' names -> (ranks, replicas)", meshes)
    for pattern, sizes in (meshes or {}).items():
        if not isinstance(pattern, str):
            raise messages.invalid("a key of meshes", "a pattern of fnmatch, such as *.experts.*", pattern)
        if not isinstance(sizes, tuple) or len(sizes) != 2:
            raise messages.invalid(f"meshes[{pattern!r}]", "a pair: (ranks of the shard axis, replicas)", sizes)
        for count in sizes:
            check_counts(**{f"meshes[{pattern!r}]": count})
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise messages.mesh_of_nothing(pattern, names)
    return meshes or {}
