"""A call of a unit's module: gather before its forward, free after it; whatever it raises, the unit is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..containers import cast_floating
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.transforms import current_transform
from .call import Call
from .outputs import detached_from_unit
from .phases import Happening, refused_transform
from .runner import Runner

FORWARD_METHODS_KEY = "_fullshard_forward_methods"
"""Where a module keeps its methods that count as forwards, by name."""


def run(
    runner: Runner, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward`, which is `module`'s, with the unit gathered."""
    compiled = torch.compiler.is_compiling() or dynamo_is_active()  # a compiled block is one graph between the hooks
    try:
        args, kwargs = (_GUARDED_ENTER if compiled else enter)(runner, args, kwargs)
        return (_GUARDED_LEAVE if compiled else leave)(runner, module, forward(*args, **kwargs))
    except BaseException as error:
        (_GUARDED_BREAK if compiled else break_off)(runner, error)
        raise


def enter(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and watch the inputs; returns them, cast and watched."""
    calls = runner.calls
    calls.append(None)
    if current_transform() is not None:
        raise refused_transform(runner.unit.name)
    root = runner.root
    if root is None:
        root = runner.find_root(runner)
    recomputing = root.in_backward
    if not recomputing and root.pass_top is None:
        root.begin_forward(runner)
    runner.happens(Happening.REENTER if recomputing else Happening.ENTER)
    policy = runner.settings.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args = cast_floating(policy.param_dtype, args)
        kwargs = cast_floating(policy.param_dtype, kwargs)
    if torch.is_grad_enabled():
        calls[-1] = call = Call(runner, runner.period)
        args, kwargs = call.watch_inputs(args, kwargs)
        if not call.watches:
            runner.watch_parameters()
    return args, kwargs


def leave(runner: Runner, module: nn.Module, output: Any) -> Any:
    """Watch the output, and free. Returns the output, cast."""
    calls = runner.calls
    call = calls[-1]
    output = detached_from_unit(output, runner.unit)
    if call is not None:
        output = call.watch_outputs(output)
        runner.watch_what_is_hidden(call)
        call.period.leads_back |= call.leads_back
    dtype = runner.settings.policy.output_dtype
    if dtype is not None:
        output = cast_floating(dtype, output)
    calls.pop()
    if not calls:
        runner.left(module)
    return output


def break_off(runner: Runner, error: BaseException) -> None:
    """The forward raised, or what comes before or after it: that is what the user sees, whatever happens here."""
    root, calls = runner.root, runner.calls
    if calls:
        calls.pop()
    if calls or root is None:
        return
    try:
        runner.happens(Happening.BROKEN)
        if root.pass_top is runner:
            root.break_forward(error)
    except Exception as second:
        error.add_note(f"Unit {runner.unit.name or '(root)'!r} could not be put back after this: {second!r}")


_GUARDED_ENTER = torch.compiler.disable(enter)
_GUARDED_LEAVE = torch.compiler.disable(leave)
_GUARDED_BREAK = torch.compiler.disable(break_off)


def run_method(module: nn.Module, runner: Runner, name: str) -> None:
    """Make a method of a unit's module count as a forward: the unit is gathered before it and freed after it."""
    method = getattr(module, name)

    def forward_method(*args: Any, **kwargs: Any) -> Any:
        return run(runner, module, method, args, kwargs)

    forward_method.__name__ = name
    object.__setattr__(module, name, forward_method)
    module.__dict__.setdefault(FORWARD_METHODS_KEY, {})[name] = method
