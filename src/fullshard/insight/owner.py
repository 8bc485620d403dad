"""The unit that owns a module or a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import ConfigError
from ..forms import owner_of as unit_of_parameter
from ..forms import successor_of
from ..names import clean_name, clean_path, plain_class
from ..runtime import Runner, left_alone, runner_of, runners_in
from ..shard import walk
from .describe import BucketFacts, bucket_facts, named_runners


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
    if not isinstance(model, nn.Module):
        raise ConfigError(f"owner_of takes a model, got {type(model).__name__}")
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
