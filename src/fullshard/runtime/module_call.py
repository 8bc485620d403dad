"""A call of a unit's module: gather before its forward, free after it; whatever it raises, the unit is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..containers import borrowed_from, cast_floating
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.transforms import current_transform
from ..watcher import RANK
from .call import Call, Forward
from .hints import add_hint
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
    depth = len(runner.forwards)
    try:
        args, kwargs = (_GUARDED_ENTER if compiled else enter)(runner, args, kwargs)
        return (_GUARDED_LEAVE if compiled else leave)(runner, module, forward(*args, **kwargs))
    except BaseException as error:
        (_GUARDED_BREAK if compiled else break_off)(runner, depth, error)
        raise


def enter(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and watch the inputs; returns them, cast and watched."""
    if current_transform() is not None:
        raise refused_transform(runner.unit.name)
    root = runner.root
    if root is None:
        root = runner.find_root(runner)
    recomputing = root.in_backward
    if not recomputing and root.pass_top is None:
        root.begin_forward(runner)
    forward = Forward()
    runner.forwards.append(forward)
    runner.happens(Happening.REENTER if recomputing else Happening.ENTER)
    if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor:
        forward.borrowed = borrowed_from(args, kwargs)
    policy = runner.settings.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args = cast_floating(policy.param_dtype, args, forward.borrowed)
        kwargs = cast_floating(policy.param_dtype, kwargs, forward.borrowed)
    if torch.is_grad_enabled():
        args, kwargs = forward.watch_inputs(Call(runner, runner.period), args, kwargs)
        if not forward.watches:
            runner.watch_parameters()
    return args, kwargs


def leave(runner: Runner, module: nn.Module, output: Any) -> Any:
    """Watch the output, and free. Returns the output, cast."""
    forwards = runner.forwards
    forward = forwards[-1]
    borrowed = forward.borrowed
    if borrowed is not None:
        borrowed.give_back()
    output = detached_from_unit(output, runner.unit, borrowed)
    if forward.call is not None:
        forward.watch_outputs(runner, output)
        runner.watch_what_is_hidden(forward)
        forward.call.period.leads_back |= forward.leads_back
    dtype = runner.settings.policy.output_dtype
    if dtype is not None:
        output = cast_floating(dtype, output, borrowed)
    forwards.pop()
    if not forwards:
        runner.left(module)
    return output


def break_off(runner: Runner, depth: int, error: BaseException) -> None:
    """The forward raised, or what comes before or after it: that is what the user sees, whatever happens here.

    Args:
        depth: how many forwards of the unit's modules ran around this one.
    """
    root, forwards = runner.root, runner.forwards
    if isinstance(error, RuntimeError):
        add_hint(error, runner)
    if len(forwards) > depth and (borrowed := forwards.pop().borrowed) is not None:
        borrowed.give_back()
    if forwards or root is None:
        return
    try:
        runner.happens(Happening.BROKEN)
        if root.pass_top is runner:
            RANK.catches(error)
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
