"""The units that a function of either front-end acts on, and whether it may act now."""

from __future__ import annotations

from torch import nn

from ..errors import check_module
from ..runtime import Runner, runners_in
from ..text import plain_class
from . import messages


def runners_of(module: nn.Module, function: str) -> list[Runner]:
    """The runners of all units in `module`.

    Args:
        module: a unit, or a module that contains units.
        function: the function that was called, for the error.

    Raises:
        ConfigError: it is not a module, or contains no unit.
    """
    check_module(function, module)
    runners = runners_in(module)
    if not runners:
        has_parameters = any(True for _ in module.parameters())
        raise messages.no_units(function, plain_class(module).__name__, has_parameters)
    return runners


def refuse_running(runners: list[Runner], function: str) -> None:
    """Recover from exceptions, and raise if a forward or backward through any of these units is running.

    Args:
        runners: the runners of the units.
        function: the function that was called, for the error.

    Raises:
        PhaseError: names the unit.
    """
    for runner in runners:
        runner.recover_if_broken()
        if runner.is_running:
            raise messages.called_within_a_pass(function, runner.unit.name)


def refuse_contexts(runner: Runner, name: str, function: str) -> None:
    """Raise if a unit is inside `keep_gathered` or `summon_full_params`.

    Args:
        runner: the unit's runner.
        name: the unit's name.
        function: the function that was called, for the error.

    Raises:
        PhaseError: names the unit.
    """
    if runner.held or runner.unit.showing.summoned:
        context = "keep_gathered" if runner.held else "summon_full_params"
        raise messages.moved_within_a_context(function, context, name)
