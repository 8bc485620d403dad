"""Plans changes of a model that is sharded already: its strategy is read from its units.

A sharded model cannot be profiled itself: its modules gather their units, which fake tensors cannot. So an unsharded
copy on meta is planned, and the step is a forward with inputs like the last ones, and a backward of what it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...api.wrapping import CustomPolicy
from ...containers import leaves_in, map_leaves, tensors_in
from ...errors import FullshardError, PhaseError
from ...forms import owner_of as unit_of
from ...generators import restored_generators
from ...optim import OwnerOptimizer
from ...optim.in_backward import ON_HOST_KEY
from ...optim.probe import arguments_of
from ...optimizers import as_list, group_settings
from ...runtime import (
    CHANGES,
    Inputs,
    OtherInput,
    Runner,
    TensorInput,
    copy_unsharded,
    is_wrapped,
    runner_of,
    without_units,
)
from ...text import plain_name
from ..describe import named_runners
from . import messages
from .optimizer_costs import Optimizers
from .planner import Plan, Planner, RunSize
from .profile import Step
from .strategy import Strategy, node_size


@restored_generators()
def plan_changes(
    model: nn.Module,
    optimizer: Optimizers | None,
    build: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    step: Step | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    sequence: int = 1,
    until: float | None = None,
) -> tuple[Plan, dict[str, int], dict[str, str]]:
    """The plan of the sharded model as it is, and the bytes that changes free at a step's peak (negative: it grows).

    The third: changes that could not be planned, and why.

    Args:
        model: the root.
        optimizer: those that step it; None: no state, and no temporary memory.
        build: see `fullshard.plan`: the same model, not sharded; None: an unsharded copy of `model`.
        step: see `fullshard.plan`; None: a forward like the root's last one that built a graph, and the backward of
            the losses that it returned, or else of all outputs.
        batch: sequences of a rank and optimizer step; None: `micro_batch`.
        micro_batch: sequences of a forward; None: `batch`, or else as many as in that forward.
        sequence: see `fullshard.plan`.
        until: give up what is not planned at this time of `time.monotonic`; None: never.

    Raises:
        ConfigError: see `fullshard.plan`; `build` makes a different model; or there was no such forward.
    """
    units = dict(named_runners(model))
    root = units.get("")
    if root is None or not root.unit.buckets:
        root = next(iter(units.values()))
    axes = root.settings.axes
    device = "cpu" if axes.shard.backend == "gloo" else "cuda"
    if step is None and (build is None or _inputs(model) is not None):
        step = _Again(_inputs(model))
        micro_batch = micro_batch or batch or step.size
    micro_batch = micro_batch or batch or 1
    batch = batch or micro_batch
    built: Any = build
    if build is None:
        copies = copy_unsharded(model)
        built = copies[id(model)]
    tensor = [m.split.mesh.size() for runner in units.values() for m in runner.unit.members if m.split is not None]
    make = _maker(model, optimizer)
    planner = Planner(built, step, root.settings.policy, make, device, meshes=_meshes(units, root), until=until)
    planner.tensor = max(tensor, default=1)  # the model is split already
    if build is not None:
        _check_same(model, planner.model)
        copies = {
            id(module): planner.model.get_submodule(path)
            for path, runner in units.items()
            for module in runner.modules[:1]
        }
    chosen = _Chosen(units, copies)
    base = _strategy(chosen, root, micro_batch)
    if optimizer is not None and any(ON_HOST_KEY in each.__dict__ for each in as_list(optimizer)):
        base = dataclasses.replace(base, state_on_host=True)
    ranks = axes.world
    sequences: int = batch

    def planned(strategy: Strategy, world: int = ranks) -> Plan:
        strategy.check(world, sequences)
        return planner.plan(strategy, RunSize(world, sequences, sequence, node_size(None, world)))

    with without_units(model):
        now = planned(base)
        peaks, failed = {}, {}
        for words, strategy in _smaller(base, chosen, optimizer is not None and not planner.has_owners()).items():
            try:
                peaks[words] = planned(strategy).peak
            except FullshardError as error:  # a change that this model, or its inputs, cannot make
                failed[words] = messages.in_few_words(error)
        peaks[f"shards over {2 * axes.shard.size} ranks instead of {axes.shard.size}"] = planned(base, 2 * ranks).peak
    saved = {words: now.peak - peak for words, peak in peaks.items()}
    return now, dict(sorted(saved.items(), key=lambda change: change[1])), failed


def _inputs(model: nn.Module) -> Inputs | None:
    """The inputs of the last forward, if `model` is the root's module."""
    runner = runner_of(model)
    return runner.root.inputs if runner is not None and runner.root is not None and runner.is_top else None


class _Again:
    """A step with inputs like those of the last forward.

    Attributes:
        size: their sequences: the first tensor's first dim.

    Raises:
        ConfigError: there was no forward, or its inputs are of other kinds.
    """

    def __init__(self, inputs: Inputs | None) -> None:
        if inputs is None:
            raise messages.cannot_repeat(
                "this is not the root, or it was not called with gradients yet.", "call the root first, or pass step="
            )
        leaves = list(leaves_in((inputs.args, inputs.kwargs)))
        others = [leaf.kind for leaf in leaves if isinstance(leaf, OtherInput)]
        if others:
            raise messages.cannot_repeat(f"inputs of class {', '.join(others[:3])} cannot be repeated.")
        self._inputs = inputs
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, TensorInput) and leaf.shape]
        self.size = int(shapes[0][0]) if shapes and shapes[0][0] else 1

    def __call__(self, model: nn.Module, micro_batch: int, sequence: int) -> torch.Tensor:
        def zeros(leaf: Any) -> Any:
            if not isinstance(leaf, TensorInput):
                return leaf
            first = [micro_batch] if leaf.shape[:1] == (self.size,) else leaf.shape[:1]
            shape = (*first, *leaf.shape[1:])
            return torch.zeros(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad, device="cpu")

        inputs = self._inputs
        args, kwargs = map_leaves(zeros, inputs.args), map_leaves(zeros, inputs.kwargs)
        if hasattr(getattr(model, "config", None), "use_cache"):  # as Transformers itself does where it checkpoints
            kwargs = {"use_cache": False, **kwargs}
        with nullcontext() if inputs.autocast is None else torch.autocast("cpu", inputs.autocast):
            try:
                output = model(*args, **kwargs)
            except PhaseError as error:  # raised by a unit that is not the copy's: see `without_units`
                raise messages.cannot_repeat(
                    "the model calls a sharded module that is not among its submodules.",
                    "pass step=, a function that leaves this out",
                    error.what,
                ) from None
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        losses = [tensor for tensor in tensors if tensor.dim() == 0] or tensors
        if not losses:
            raise messages.cannot_repeat("no output needs a gradient.")
        return sum([loss.sum() for loss in losses[1:]], losses[0].sum())


class _Chosen:
    """The units below the root, and the modules of the model that is planned.

    Args:
        units: by path; the root is "".
        modules: by id of the sharded model's.

    Attributes:
        named: what frees memory, as an argument of the model's front-end.
    """

    def __init__(self, units: Mapping[str, Runner], modules: Mapping[int, nn.Module]) -> None:
        self.units = units
        self.named = {kind: names[is_wrapped(next(iter(units.values())))] for kind, names in CHANGES.items()}
        self.blocks = [runner for path, runner in units.items() if path and runner.unit.buckets]
        self._modules = modules

    def policy(self, **changes: Any) -> CustomPolicy:
        """A policy that makes the same modules units, with these arguments of `fully_shard` changed."""
        chosen: dict[int, dict[str, Any]] = {}
        for runner in self.blocks:
            own: dict[str, Any] = {
                "mp_policy": runner.settings.policy,
                "layout": runner.unit.buckets[0].settings.layout,
                "prefetch": _prefetch(runner),
            }
            if runner.settings.reshard_after_forward is False:
                own["reshard_after_forward"] = False
            for module in runner.modules:
                if id(module) in self._modules:
                    chosen[id(self._modules[id(module)])] = {**own, **changes}
        return CustomPolicy(lambda module: chosen.get(id(module), False))


def _strategy(chosen: _Chosen, root: Runner, micro_batch: int) -> Strategy:
    """The strategy of live units."""
    settings, runners = root.settings, chosen.units.values()
    kept = next((runner.unit.kept_axis.size for runner in runners if runner.unit.kept_axis is not None), None)
    first = next(bucket for runner in runners for bucket in runner.unit.buckets)
    return Strategy(
        replicate=settings.axes.copies,
        layout=first.settings.layout,
        reshard_after_forward=True if kept is None else kept,
        prefetch=_prefetch(root),
        micro_batch=micro_batch,
        offload=first.home is not None,
        units=chosen.policy(),
        mp_policy=settings.policy,
    )


def _prefetch(runner: Runner) -> int:
    return runner.settings.prefetch.backward  # the peak is there; the wrapper may gather further ahead in forward


def _smaller(base: Strategy, chosen: _Chosen, steps: bool) -> dict[str, Strategy]:
    """Strategies that may need less memory, by what has to change in the program.

    Args:
        base: the strategy now.
        chosen: the units.
        steps: whether the program has an optimizer that steps parameters one by one.
    """
    changes = {}
    if any(map(_prefetch, chosen.blocks)) or base.prefetch:
        changes[chosen.named["prefetch"]] = dataclasses.replace(base, prefetch=0, units=chosen.policy(prefetch=0))
    keeps = any(runner.settings.reshard_after_forward is False for runner in chosen.blocks)
    if keeps or base.reshard_after_forward is not True:
        policy = chosen.policy(reshard_after_forward=True)
        changes[chosen.named["free"]] = dataclasses.replace(base, reshard_after_forward=True, units=policy)
    if base.micro_batch % 2 == 0:
        halved = dataclasses.replace(base, micro_batch=base.micro_batch // 2)
        changes["half the micro-batch, and twice as many of them"] = halved
    if chosen.blocks:
        changes["activation checkpointing of the units"] = dataclasses.replace(base, checkpointing=True)
    if steps and not base.offload and not base.state_on_host:
        changes["optimizer_state_on_host(optimizer)"] = dataclasses.replace(base, state_on_host=True)
    if not base.offload:
        changes[chosen.named["offload"]] = dataclasses.replace(base, offload=True)
    return changes


def _meshes(units: Mapping[str, Runner], root: Runner) -> dict[str, tuple[int, int]]:
    """How parameters are split that are on another mesh than the root, by name."""
    own = root.settings.axes
    return {
        plain_name(member.name): (bucket.axes.shard.size, bucket.axes.copies)
        for runner in units.values()
        for bucket in runner.unit.buckets
        if (bucket.axes.shard.size, bucket.axes.copies) != (own.shard.size, own.copies)
        for member in bucket.members
    }


def _check_same(model: nn.Module, built: nn.Module) -> None:
    ours, theirs = ({plain_name(name) for name, _ in each.named_parameters()} for each in (model, built))
    if ours != theirs and not any(name.endswith("_flat_param") for name in ours):
        raise messages.another_model(sorted(ours ^ theirs))


def _maker(model: nn.Module, optimizers: Optimizers | None) -> Callable[..., Any]:
    """A function that makes optimizers with the settings of these for the named parameters of a model."""
    live = [] if optimizers is None else as_list(optimizers)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}

    def make(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        by_name = {plain_name(name): parameter for name, parameter in named_parameters}
        optimizers: list[torch.optim.Optimizer] = []
        for optimizer in live:
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                inside = [name for parameter in group["params"] for name in _names_in(parameter, names)]
                groups.append(
                    {**group_settings(group), "params": [by_name[name] for name in inside if name in by_name]}
                )
            optimizers.append(_like(optimizer, [group for group in groups if group["params"]]))
        return optimizers

    return make


def _names_in(parameter: torch.Tensor, names: Mapping[int, str]) -> list[str]:
    """The name of a parameter; of a `FlatParameter` or a view those of the parameters inside."""
    if (unit := unit_of(parameter)) is not None:
        for tensor, _, members in unit.optimizer_views():
            if tensor is parameter:
                return [plain_name(member.name) for member in members]
    return [names[id(parameter)]] if id(parameter) in names else []


def _like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A new optimizer of the same kind, for these groups."""
    kind: Any = optimizer.optimizer_class if isinstance(optimizer, OwnerOptimizer) else type(optimizer)
    arguments = arguments_of(kind, optimizer.defaults)
    if isinstance(optimizer, OwnerOptimizer):
        return OwnerOptimizer(groups, kind, elementwise=optimizer.elementwise, **arguments)
    new: torch.optim.Optimizer = kind(groups, **arguments)
    return new
