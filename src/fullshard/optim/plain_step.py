"""torch's element-wise optimizers step plain tensors: this rank's parts of sharded parameters.

A sharded parameter is a `DTensor` or a `FlatShard`. Each operation on one goes through the dispatch of its class, which
takes several times as long as the operation on a few thousand elements, for the result of the same operation on the
local tensor inside. So a step is that of a second object with the optimizer's settings, whose parameters are views of
those local tensors, with local gradients and state; it is made for the step. Programs see the optimizer that they
built, with its parameters, and state of their class (`docs/decisions/0021-steps-of-local-tensors.md`).

A step goes its own way, on the sharded parameters, if it has a closure or the optimizer has hooks or methods of others,
which may look at any of these, and if anything else is unusual: a class that is not torch's, gradients or state that
are not split like their parameter, a gradient of another dtype, a setting that is a `DTensor`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..containers import NONES, drain
from ..forms import SHARDED_TYPES, SPLIT_OF_ROWS, FlatShard, RowShard
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.local_tensor import plain_access, read_grad, write_grad
from ..torch_private.step_hooks import TABLES, is_hooked, part_of, second_object, step_without_hooks
from .probe import ELEMENT_WISE

_STEP = "_fullshard_step"
"""Attribute of an optimizer of local tensors: the `_Step` that it is for."""
_NOT_SHARED = {_STEP, "param_groups", "state", *TABLES}
_LOCAL = repeat("_local_tensor")
_SPLIT_OF_RUNS = attrgetter("_run.split")
_OF_ROWS = {RowShard, DTensor}
_SHARDED = {RowShard, DTensor, FlatShard}
_PLAIN = {torch.Tensor, nn.Parameter}
_STATES = {dict, type(None)}
_EMPTY: Any = repeat({})
_KIND = attrgetter("shape", "dtype", "device")
_DIM: Callable[[Any], int] = torch.Tensor.dim
_DETACH: Callable[[Any], torch.Tensor] = torch.Tensor.detach


def on_plain_tensors(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Return the arguments of the same step on local tensors, if it can run on these. For `hook_around_all`.

    Returns:
        The arguments, with another object in place of `optimizer`; None: the step goes its own way.
    """
    if is_compiling() or dynamo_is_active() or len(args) > 1 or kwargs or is_hooked(optimizer):
        return None
    second = on_local_tensors(optimizer)
    return None if second is None else ((second,), {})


def on_local_tensors(optimizer: Optimizer) -> Optimizer | None:
    """A second object, whose step without hooks is that of `optimizer` on local tensors, and ends by `after_step`.

    Returns:
        None if the step has to run on the sharded parameters.
    """
    groups = optimizer.param_groups
    settings = {*map(type, chain.from_iterable(map(dict.values, groups)))}
    differentiable = any([group.get("differentiable") for group in groups])
    if differentiable or not settings.isdisjoint(_SHARDED) or not _is_torchs_own(optimizer):
        return None
    parameters: list[Any] = [*chain.from_iterable([group["params"] for group in groups])]
    step = _step_of(optimizer, parameters)
    if step is None:
        return None
    parts = iter(step.parts)
    groups = [{**group, "params": [*islice(parts, len(group["params"]))]} for group in groups]
    return second_object(optimizer, param_groups=groups, state=step.state, **{_STEP: step})


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch's element-wise ones, and every method that a step calls is torch's."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind.__name__ not in ELEMENT_WISE:
        return False
    for function in (kind.step, kind._init_group):
        while function is not None:
            if not function.__globals__["__name__"].startswith("torch."):
                return False
            function = getattr(function, "__wrapped__", None)
    return _methods_of(kind).isdisjoint(optimizer.__dict__)


@cache
def _methods_of(kind: type) -> frozenset[str]:
    """The names of its methods, but for those by which schedulers count steps, and hooks are registered."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name))) - {"step", "register_step_pre_hook"}


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """End what `on_plain_tensors` began. For `hook_around_all`."""
    if not is_compiling() and (step := args[0].__dict__.get(_STEP)) is not None:
        step.end(optimizer, args[0])


def step_part_plainly(optimizer: Optimizer, parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Like `step_part`, on local tensors if possible."""
    part = part_of(optimizer, parameters)
    given = (part, *args)
    given, kwargs = on_plain_tensors(part, given, kwargs) or (given, kwargs)
    step_without_hooks(*given, **kwargs)
    after_step(part, given, kwargs)


class _Step:
    """A step on local tensors. Owns views of parameters, which hold their gradients.

    Args:
        parameters: of the optimizer, in order.
        parts: by parameter, a view of the local tensor inside; a plain parameter itself.
        states: each parameter's state; None if it does not exist yet.
        stepped: the sharded parameters that have a gradient, and their sharded state.

    Attributes:
        values: the state as local tensors, all parameters' in one list, before the step.
        state: the same, by part.
    """

    def __init__(self, parameters: list[Any], parts: list[Any], states: list[Any], stepped: list[Any]) -> None:
        self.parameters, self.parts, self._stepped = parameters, parts, stepped
        began = [*map(is_not, states, NONES)]
        states = [*compress(states, began)]
        values = [*chain.from_iterable(map(dict.values, states))]
        self.values = [*map(getattr, values, _LOCAL, values)]
        dicts = map(dict, map(zip, states, repeat(iter(self.values))))
        self.state = defaultdict(dict[Any, Any], zip(compress(parts, began), dicts, strict=True))
        self._began = len(self.state)

    def end(self, optimizer: Optimizer, second: Optimizer) -> None:
        """Give the optimizer the attributes and state that the step, of the `second` object, created or replaced."""
        increment_version(self._stepped)
        for name in second.__dict__.keys() - _NOT_SHARED:
            optimizer.__dict__[name] = second.__dict__[name]
        values = [*chain.from_iterable(map(dict.values, self.state.values()))]
        lengths = len(self.state), len(values)
        if lengths == (self._began, len(self.values)) and all(map(is_, values, self.values)):
            return
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if part in self.state:
                state = optimizer.state.setdefault(parameter, {})
                for key, value in self.state[part].items():
                    if key not in state or getattr(state[key], "_local_tensor", state[key]) is not value:
                        state[key] = _around(value, parameter, part)


def _around(value: Any, parameter: Any, part: torch.Tensor) -> Any:
    """State of a part as state of its parameter: split like it if it has a value for each element."""
    if parameter is part or not isinstance(value, torch.Tensor) or value.shape != part.shape:
        return value
    if isinstance(parameter, FlatShard):
        return FlatShard(value, parameter._run)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def _step_of(optimizer: Optimizer, parameters: list[Any]) -> _Step | None:
    """The step of these parameters on local tensors; None if it cannot run on these."""
    kinds, states = {*map(type, parameters)} - _PLAIN, [*map(optimizer.state.get, parameters)]
    if not kinds or not kinds <= SHARDED_TYPES or not {*map(type, states)} <= _STATES:
        return None
    is_sharded = [*map(kinds.__contains__, map(type, parameters))]
    with plain_access():
        sharded = [*compress(parameters, is_sharded)]
        parts = [*map(getattr, sharded, _LOCAL)]
        grads: list[Any] = [*map(read_grad, sharded)]
        has_grad = [*map(is_not, grads, NONES)]
        stepped, grads = [*compress(sharded, has_grad)], [*compress(grads, has_grad)]
        if [*map(type, grads)] != [*map(type, stepped)] or _splits(grads) != _splits(stepped):
            return None
        grads = [*map(getattr, grads, _LOCAL)]
        if {*map(type, parts), *map(type, grads)} != {torch.Tensor} or 0 in map(_DIM, parts):
            return None
        state = _state_of(stepped, [*map(optimizer.state.get, stepped, _EMPTY)])
        if state is None or [*map(_KIND, compress(parts, has_grad))] != [*map(_KIND, grads)]:
            return None
        views = [*map(_DETACH, parts)]
        drain(map(write_grad, compress(views, has_grad), grads))
        parts = views
        if len(parts) < len(parameters):
            ahead = iter(views)
            parts = [next(ahead) if type(parameter) in kinds else parameter for parameter in parameters]
        return _Step(parameters, parts, states, [*stepped, *state])


def _state_of(parameters: list[Any], states: list[Any]) -> list[Any] | None:
    """The sharded tensors in the state of sharded parameters; None if any is not split like its parameter."""
    values = [*chain.from_iterable(map(dict.values, states))]
    owners = chain.from_iterable(map(repeat, parameters, map(len, states)))
    is_sharded = [*map(_SHARDED.__contains__, map(type, values))]
    sharded = [*compress(values, is_sharded)]
    plain = compress(values, map(is_, map(type, values), repeat(torch.Tensor)))
    if any(map(_DIM, plain)) or _splits([*compress(owners, is_sharded)]) != _splits(sharded):
        return None
    return sharded


def _splits(tensors: list[Any]) -> list[Any]:
    """How each of these sharded tensors is split."""
    kinds = {*map(type, tensors)}
    if kinds <= _OF_ROWS:
        return [*map(SPLIT_OF_ROWS, tensors)]
    if kinds == {FlatShard}:
        return [*map(_SPLIT_OF_RUNS, tensors)]
    return [_SPLIT_OF_RUNS(tensor) if type(tensor) is FlatShard else SPLIT_OF_ROWS(tensor) for tensor in tensors]
