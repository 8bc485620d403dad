"""Copies of sharded models: `copy.deepcopy` (averages of weights, references), and unsharded ones, to plan with."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import PhaseError
from ..forms import FlatParameter, Member, Place
from ..shard import Bucket, Unit, clone_unit, place_clone
from ..text import WRAPPED, plain_class
from .messages import copied_in_part, copied_while_it_runs, no_unsharded_copy, pickled
from .runner import Runner
from .step import FORWARD_METHODS_KEY, run_method
from .units import RUNNER_KEY, runners_in, take_over_replaced

_COPYING = "fullshard: units being copied"


def deepcopy_module(module: Any, memo: dict[Any, Any]) -> Any:
    """Return a copy of `module` with its own units and shards on the same mesh. No communication.

    Copies values, settings and hooks, but not gradients (PyTorch's own parameters do not copy theirs either) and not
    gathered buffers: the copy starts sharded. Modules below `module` are copied with it; copy the root to copy a model.

    Raises:
        PhaseError: a forward or backward through the unit is running; gradients wait to be reduced; a parameter is
            tied to a module outside the copied ones.
    """
    if _COPYING in memo:  # a unit inside one that is being copied
        return _copy_plain(module, memo)
    runners = runners_in(module)
    for runner in runners:
        runner.recover_if_broken()
        if runner.is_running:
            raise copied_while_it_runs(plain_class(module).__name__)
    take_over_replaced(module)
    units = {id(runner): clone_unit(runner.unit, memo) for runner in runners}
    memo[_COPYING] = True
    try:
        new = _copy_plain(module, memo)
    finally:
        del memo[_COPYING]
    _set_up(runners, units, memo)
    return new


def copy_module(module: Any) -> Any:
    """Copy a module as `copy.copy` does: the copy has the same parameters, submodules and unit."""
    new = object.__new__(type(module))
    new.__setstate__(object.__reduce_ex__(module, 4)[2])
    return new


def pickling_error(module: Any) -> PhaseError:
    """The error for pickling a sharded module, for instance with `torch.save(model)`."""
    return pickled(plain_class(module).__name__)


def _copy_plain(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """Copy a module as `copy.deepcopy` does, except its unit and the methods that refer to it."""
    ours = {RUNNER_KEY, FORWARD_METHODS_KEY, *module.__dict__.get(FORWARD_METHODS_KEY, ())}
    state: Any = object.__reduce_ex__(module, 4)[2]  # from its __getstate__, or its __dict__
    new: nn.Module = object.__new__(type(module))
    memo[id(module)] = new
    new.__setstate__({name: copy.deepcopy(value, memo) for name, value in state.items() if name not in ours})
    return new


def _set_up(runners: Sequence[Runner], units: dict[int, Unit], memo: dict[Any, Any]) -> None:
    """Give the copied modules their units and runners."""
    copies: dict[int, Runner] = {}
    for old in runners:
        modules = old.modules
        missing = [module for module in modules if id(module) not in memo]
        if missing:
            raise copied_in_part(plain_class(missing[0]).__name__)
        unit = units[id(old)]
        below = {id(child): memo[id(child)] for module in modules for child in module.modules() if id(child) in memo}
        place_clone(unit, old.unit, below)
        copied = [memo[id(module)] for module in modules]
        new = copies[id(old)] = Runner(unit, copied, old.settings, old.find_root)
        new.set(ignored=old.settings.ignored.copied(memo), reduce_tokens=None)
        for module, new_module in zip(modules, copied, strict=True):
            new_module.__dict__[RUNNER_KEY] = new
            for name, method in module.__dict__.get(FORWARD_METHODS_KEY, {}).items():
                object.__setattr__(new_module, name, copy.deepcopy(method, memo))  # bound to the copy
                run_method(new_module, new, name)
    for new in copies.values():
        for name in ("forward_units", "backward_units"):
            chosen = getattr(new.settings.prefetch, name)
            if chosen is not None:  # dropped if any unit was not copied
                inside = all(id(runner) in copies for runner in chosen)
                new.set(**{f"prefetch_{name}": tuple(copies[id(r)] for r in chosen) if inside else None})


_WRAPPERS = (WRAPPED, "_orig_mod")
"""Attributes with the module inside a `FullyShardedDataParallel` instance, and inside a compiled module."""
_HOOKS = frozenset(name for name, value in nn.Module().__dict__.items() if name.endswith("_hooks"))


class _SharesTensors(TorchFunctionMode):
    """In which deep copies share the memory of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def copy_unsharded(model: nn.Module) -> dict[int, nn.Module]:
    """Copies of the modules of a model, by id, as they were before it was sharded: whole parameters, on meta.

    Without wrappers around modules, compiled forms, and forward hooks but torch's own (those of `parallelize_module`,
    for one). Parameters in no unit become buffers, and tensors in plain attributes too: all are on meta. What cannot be
    copied is shared, as are tensors in containers. Other objects are copied, since a forward may write to them: arrays
    take host memory. No communication, and no memory of tensors.

    Raises:
        NotSupportedError: parameters of a tensor subclass that defines its own gather, or `dp_mesh_dims`.
    """
    memo: dict[Any, Any] = {_COPYING: True}  # for `copy.deepcopy`: replacements of modules and tensors, by id
    shown: list[tuple[Place, nn.Parameter]] = []
    for runner in runners_in(model):
        for bucket in runner.unit.buckets:
            for member in bucket.members:
                whole = _whole_on_meta(member, bucket)
                memo |= {
                    id(old): whole for old in (member.sharded, member.unsharded, member.stand_in) if old is not None
                }
                shown += [(place, whole) for place in member.places]
    modules = {id(module): module for module in model.modules()}
    cores = {key: _core(module) for key, module in modules.items()}
    memo |= {id(core): object.__new__(plain_class(core)) for core in cores.values()}
    copies = {key: memo[id(core)] for key, core in cores.items()}
    memo |= copies
    with _SharesTensors():
        for core in {id(core): core for core in cores.values()}.values():
            memo[id(core)].__dict__.update(_attributes_of(core, memo))
    for place, whole in shown:
        if (new := copies.get(id(place.module))) is not None:
            new.__dict__.pop(place.name, None)
            new._parameters.setdefault(place.name, None)
            Place(new, place.name).show(whole)
    return copies


def _whole_on_meta(member: Member, bucket: Bucket) -> nn.Parameter:
    if not bucket.form.plain:
        raise no_unsharded_copy(member.name, "its class defines its own gather")
    whole: Any = torch.empty(member.slot.shape, dtype=bucket.storage_dtype, device="meta")
    if member.split is not None:
        if member.split.data_dims:
            raise no_unsharded_copy(member.name, "it was sharded with dp_mesh_dims")
        whole = member.split.unsharded(whole)
    return nn.Parameter(whole, requires_grad=member.sharded.requires_grad)


def _core(module: nn.Module) -> nn.Module:
    """The module inside wrappers of the front-end and of `torch.compile`."""
    while (inner := next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)) is not None:
        module = inner
    return module


def _attributes_of(module: nn.Module, memo: dict[Any, Any]) -> dict[str, Any]:
    """The `__dict__` of a module's copy."""
    methods = module.__dict__.get(FORWARD_METHODS_KEY, {})
    left_out = {RUNNER_KEY, FORWARD_METHODS_KEY, "_compiled_call_impl", "_parameters", "_buffers", "_modules", *methods}
    attributes: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
    parameters: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in left_out:
            continue
        if name in _HOOKS:
            kept = {key: hook for key, hook in value.items() if _is_torchs(hook)} if "forward" in name else {}
            attributes[name] = OrderedDict(kept)
        elif id(value) in memo and isinstance(value, torch.Tensor):
            parameters[name] = memo[id(value)]
        elif isinstance(value, torch.Tensor):
            buffers[name] = _on_meta(value)
        else:
            attributes[name] = _copied_or_shared(value, memo)
    for name, parameter in module._parameters.items():
        if parameter is None or id(parameter) in memo:
            parameters[name] = None if parameter is None else memo[id(parameter)]
        elif not isinstance(parameter, FlatParameter):
            buffers[name] = memo[id(parameter)] = _on_meta(parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in memo:
            memo[id(buffer)] = _on_meta(buffer)
        buffers[name] = None if buffer is None else memo[id(buffer)]
    children = {name: None if child is None else memo[id(child)] for name, child in module._modules.items()}
    return {**attributes, "_parameters": parameters, "_buffers": buffers, "_modules": children}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def _is_torchs(hook: Any) -> bool:
    named = hook if hasattr(hook, "__module__") and hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__).startswith("torch.")


def _copied_or_shared(value: Any, memo: dict[Any, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a class raises that cannot be copied: process groups, locks, open files
        return value


@contextmanager
def without_units(model: nn.Module) -> Iterator[None]:
    """Context in which no unit of a model can run: a copy's code that calls the original, from a closure, raises."""
    runners = {module: module.__dict__.pop(RUNNER_KEY) for module in model.modules() if RUNNER_KEY in module.__dict__}
    try:
        yield
    finally:
        for module, runner in runners.items():
            module.__dict__[RUNNER_KEY] = runner
