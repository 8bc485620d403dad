"""Which unit owns a module or a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..forms import owner_of as unit_of_parameter
from ..forms import successor_of
from ..names import clean_name, clean_path, plain_class
from ..runtime import Runner, left_alone, runner_of, runners_in
from ..shard import walk
from .facts import BucketFacts, bucket_facts


@dataclass(frozen=True)
class Owned:
    """The unit that owns what was asked for.

    Attributes:
        name: the unit's, from the model; "(root)" for the model itself.
        module: that the unit is of; the first one, of a unit of several modules.
        modules: all of them.
        buckets: what it holds, as `describe` shows it.
    """

    name: str
    module: nn.Module = field(repr=False)
    modules: tuple[nn.Module, ...] = field(repr=False)
    buckets: tuple[BucketFacts, ...]


def owner_of(model: nn.Module, module_or_parameter: nn.Module | torch.Tensor) -> Owned:
    """Which unit of `model` gathers a parameter, or the parameters that a module itself has. No communication.

    Of a module that is no unit it is the innermost unit around it, whose parameters are gathered while it runs: that
    of its own parameters, not of those in units below it.

    Args:
        model: sharded by either front-end; the root, so that names and all units are in sight.
        module_or_parameter: a module in it; or a parameter: as `model.parameters()` gives it, as its module shows it
            while the unit is gathered, a `FlatParameter`, or the one that was there before the model was sharded.

    Returns:
        The unit's name, its module, and the facts of its buckets.

    Raises:
        ConfigError: no unit of `model` owns it; the error says why (it was to be left alone, it was added later, it is
            of another model, no unit is around it).
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"owner_of takes a model, got {type(model).__name__}")
    if not runners_in(model):
        raise ConfigError(f"{type(model).__name__} has no units: neither front-end was applied to it", topic="no-units")
    if isinstance(module_or_parameter, nn.Module):
        return _record(model, _runs(model, module_or_parameter))
    if isinstance(module_or_parameter, torch.Tensor):
        return _record(model, _holds(model, module_or_parameter))
    raise ConfigError(
        "owner_of takes a module or a parameter.",
        got=type(module_or_parameter).__name__,
        remedy="model.get_submodule(name) and model.get_parameter(name) find them by name",
    )


def _runs(model: nn.Module, module: nn.Module) -> Runner:
    """The innermost unit around `module`."""
    for path, found, runner in walk(model, runner_of, "", runner_of(model)):
        if found is not module:
            continue
        if runner is None:
            raise ConfigError(
                f"No unit runs the module {clean_path(path) or '(root)'!r}: there are units in the model, but none "
                "around it.",
                remedy="apply fully_shard, or FullyShardedDataParallel, to a module around it",
                topic="root-forgotten",
            )
        known: Runner = runner
        return known
    raise ConfigError(f"This {plain_class(module).__name__} is no module of the model that owner_of was given.")


def _holds(model: nn.Module, parameter: torch.Tensor) -> Runner:
    """The unit that holds `parameter`."""
    runners = runners_in(model)
    unit = unit_of_parameter(successor_of(parameter))
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
            remedy="give owner_of the root",
        )
    if name is None:
        raise ConfigError("This tensor is no parameter of the model that owner_of was given.", got=shape)
    if id(parameter) in left_alone(runners):
        raise ConfigError(
            "No unit owns this parameter: it was to be left alone.",
            parameter=name,
            got="a parameter in ignored_params, ignored_states or ignored_modules",
            remedy="take it out of them; left as it is, it is whole on every rank, and nothing reduces its gradient",
        )
    raise ConfigError(
        "No unit owns this parameter.",
        parameter=name,
        expected="a parameter that was there when a unit around it was made",
        got="one without a unit around it, or one that was added later",
        remedy="apply the front-end to a module around it, after all parameters are registered",
        topic="parameter-added",
    )


def _record(model: nn.Module, runner: Runner) -> Owned:
    path = next((path for path, module in model.named_modules() if runner_of(module) is runner), "")
    facts: list[Any] = [bucket_facts(runner, bucket) for bucket in runner.unit.buckets]
    modules = tuple(runner.modules)
    return Owned(clean_path(path) or "(root)", modules[0], modules, tuple(facts))
