"""Plans changes of a model that is sharded already: its strategy is read from its units, its model is built anew.

A sharded model cannot be profiled itself: its modules gather their units, which fake tensors cannot. So the program
passes the function that built it, and the `step` that `fullshard.plan` takes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...api.wrapping import CustomPolicy
from ...forms import owner_of as unit_of
from ...names import clean_name
from ...optim import OwnerOptimizer
from ...optim.owners import views_of
from ...runtime import Runner
from ...shard import settings_of
from ..describe import named_runners
from . import messages
from .optimizer import Optimizers, as_list
from .plan import Plan, Planner
from .profile import Step
from .strategy import Strategy, node_size


def plan_changes(
    model: nn.Module,
    optimizer: Optimizers | None,
    build: nn.Module | Callable[[], nn.Module],
    *,
    batch: int,
    micro_batch: int,
    sequence: int,
    step: Step | None,
) -> tuple[Plan, dict[str, int]]:
    """The plan of a sharded model as it is, and the bytes that changes free at the peak of a step; negative: it grows.

    Args:
        model: the root.
        optimizer: those that step it; None: no state, and no temporary memory.
        build: see `fullshard.plan`: the same model, not sharded.
        batch, sequence, step: see `fullshard.plan`.
        micro_batch: sequences of a forward.

    Raises:
        ConfigError: see `fullshard.plan`; or `build` makes another model.
    """
    units = dict(named_runners(model))
    root = units.get("")
    if root is None or not root.unit.buckets:
        root = next(iter(units.values()))
    axes = root.settings.axes
    device = "cpu" if axes.shard.backend == "gloo" else "cuda"
    make = _maker(model, optimizer)
    planner = Planner(build, step, root.settings.policy, make, device)
    _check_same(model, planner.model)
    base = _strategy(units, root, planner.model, micro_batch)
    ranks = axes.world

    def planned(strategy: Strategy, world: int = ranks) -> Plan:
        strategy.check(world, batch)
        return planner.plan(strategy, world, batch, sequence, node_size(None, world))

    now = planned(base)
    peaks = {words: planned(strategy).peak for words, strategy in _smaller(base, units, planner.model).items()}
    peaks[f"shards over {2 * axes.shard.size} ranks in place of {axes.shard.size}"] = planned(base, 2 * ranks).peak
    saved = {words: now.peak - peak for words, peak in peaks.items()}
    return now, dict(sorted(saved.items(), key=lambda change: change[1]))


def _strategy(units: Mapping[str, Runner], root: Runner, built: nn.Module, micro_batch: int) -> Strategy:
    """The strategy of live units."""
    settings = root.settings
    kept = next((runner.unit.kept_axis.size for runner in units.values() if runner.unit.kept_axis is not None), None)
    first = next(bucket for runner in units.values() for bucket in runner.unit.buckets)
    return Strategy(
        replicate=settings.axes.copies,
        layout=settings_of(first).layout,
        reshard_after_forward=True if kept is None else kept,
        prefetch=_prefetch(root),
        micro_batch=micro_batch,
        offload=first.home is not None,
        units=_policy(units, built, {}),
        mp_policy=settings.policy,
    )


def _policy(units: Mapping[str, Runner], built: nn.Module, changes: Mapping[str, Any]) -> CustomPolicy:
    """A policy that makes the same modules of `built` units, with these arguments changed."""
    chosen: dict[int, dict[str, Any]] = {}
    for path, runner in units.items():
        if path and runner.unit.buckets:
            own: dict[str, Any] = {
                "mp_policy": runner.settings.policy,
                "layout": settings_of(runner.unit.buckets[0]).layout,
                "prefetch": _prefetch(runner),
            }
            if runner.settings.reshard_after_forward is False:
                own["reshard_after_forward"] = False
            chosen[id(built.get_submodule(path))] = {**own, **changes}
    return CustomPolicy(lambda module: chosen.get(id(module), False))


def _prefetch(runner: Runner) -> int:
    return max(runner.settings.prefetch.forward, runner.settings.prefetch.backward)


def _smaller(base: Strategy, units: Mapping[str, Runner], built: nn.Module) -> dict[str, Strategy]:
    """Strategies that may need less memory, by what has to change in the program."""
    changes = {}
    blocks = [runner for path, runner in units.items() if path and runner.unit.buckets]
    if any(map(_prefetch, blocks)) or base.prefetch:
        changes["prefetch=0"] = dataclasses.replace(base, prefetch=0, units=_policy(units, built, {"prefetch": 0}))
    keeps = any(runner.settings.reshard_after_forward is False for runner in blocks)
    if keeps or base.reshard_after_forward is not True:
        policy = _policy(units, built, {"reshard_after_forward": True})
        changes["reshard_after_forward=True"] = dataclasses.replace(base, reshard_after_forward=True, units=policy)
    if base.micro_batch % 2 == 0:
        halved = dataclasses.replace(base, micro_batch=base.micro_batch // 2)
        changes["half the micro-batch, and twice as many of them"] = halved
    if blocks:
        changes["activation checkpointing of the units"] = dataclasses.replace(base, checkpointing=True)
    if not base.offload:
        changes["CPUOffloadPolicy()"] = dataclasses.replace(base, offload=True)
    return changes


def _check_same(model: nn.Module, built: nn.Module) -> None:
    ours, theirs = ({clean_name(name) for name, _ in each.named_parameters()} for each in (model, built))
    if ours != theirs and not any(name.endswith("_flat_param") for name in ours):
        raise messages.another_model(sorted(ours ^ theirs))


def _maker(model: nn.Module, optimizers: Optimizers | None) -> Callable[..., Any]:
    """A function that makes optimizers with the settings of these for the named parameters of a model."""
    live = [] if optimizers is None else as_list(optimizers)
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}

    def make(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        by_name = dict(named_parameters)
        made = []
        for optimizer in live:
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                inside = [name for parameter in group["params"] for name in _names_in(parameter, names)]
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                groups.append({**settings, "params": [by_name[name] for name in inside if name in by_name]})
            made.append(_like(optimizer, [group for group in groups if group["params"]]))
        return made

    return make


def _names_in(parameter: torch.Tensor, names: Mapping[int, str]) -> list[str]:
    """The name of a parameter; of a `FlatParameter` or a view those of the parameters inside."""
    if (unit := unit_of(parameter)) is not None:
        for tensor, bucket, members in views_of(unit):
            if tensor is parameter:
                return [bucket.members[index].name for index in members]
    return [names[id(parameter)]] if id(parameter) in names else []


def _like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A new optimizer of the same kind, for these groups."""
    kind: Any = optimizer.optimizer_class if isinstance(optimizer, OwnerOptimizer) else type(optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    if isinstance(optimizer, OwnerOptimizer):
        return OwnerOptimizer(groups, kind, elementwise=optimizer.elementwise, **arguments)
    made: torch.optim.Optimizer = kind(groups, **arguments)
    return made
