"""PyTorch's private FSDP names in an adopted program: replaced where Fullshard has an equivalent, refused elsewhere.

Modules of `torch.distributed.fsdp` get a class whose attribute access checks the caller: PyTorch itself gets every
name; a program's module gets public names, equivalents of private ones, or an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from ..api.wrapper.fsdp import FullyShardedDataParallel
from ..runtime import runner_of
from . import messages


def _lazy_init(state: nn.Module, root_module: nn.Module) -> nn.Module:
    """Like PyTorch's for its wrapper: run lazy initialization of an instance's root before the first forward."""
    if isinstance(state, FullyShardedDataParallel):
        state.check_is_root()
    return state


def _get_module_fsdp_state(module: nn.Module) -> nn.Module | None:
    """Like PyTorch's: an instance of the wrapper is its own state."""
    return module if isinstance(module, FullyShardedDataParallel) else None


def _is_fsdp_flattened(tensor: Any) -> bool:
    """Like PyTorch's: whether a parameter is a `FlatParameter`, or an original parameter that views one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _has_fsdp_params(state: Any, module: nn.Module) -> bool:
    """Like PyTorch's: whether the instance manages any parameters itself."""
    runner = runner_of(module)
    return runner is not None and bool(runner.unit.buckets)


SERVED: Mapping[str, Callable[..., Any]] = {
    "_get_module_fsdp_state": _get_module_fsdp_state,
    "_has_fsdp_params": _has_fsdp_params,
    "_is_fsdp_flattened": _is_fsdp_flattened,
    "_lazy_init": _lazy_init,
}
"""Equivalents of private functions that client libraries import."""

INSTEAD: Mapping[str, str] = {
    "FSDPState": "the methods of FSDPModule; fullshard.describe(model) for what each unit holds",
    "FSDPParam": "model.parameters(), DTensors outside of forward and backward; fullshard.describe(model)",
    "FSDPParamGroup": "the methods of FSDPModule; fullshard.record_events() for what a unit does and when",
    "FlatParamHandle": "FullyShardedDataParallel.summon_full_params; fullshard.describe(model)",
    "_FSDPState": "isinstance(module, FullyShardedDataParallel), and its public methods",
    "_unshard_params": "FullyShardedDataParallel.summon_full_params",
    "_unshard": "FSDPModule.unshard(), FullyShardedDataParallel.summon_full_params",
    "_reshard": "FSDPModule.reshard()",
    "_optim_state_dict": "FullyShardedDataParallel.optim_state_dict",
    "_get_fsdp_states": "FullyShardedDataParallel.fsdp_modules(model)",
    "_get_fsdp_handles": "FullyShardedDataParallel.fsdp_modules(model)",
    "foreach_all_gather": "FSDPModule.set_custom_all_gather",
    "foreach_reduce": "FSDPModule.set_custom_reduce_scatter, set_all_reduce_hook",
}
"""Public replacements to recommend for private names; `ANY` for all other names."""

ANY = "the public methods of FSDPModule and FullyShardedDataParallel; see docs/adopt.md"

TRUSTED = ("torch", "fullshard", "importlib", "_frozen_importlib")
"""Packages whose modules may access every name."""

_warned: set[tuple[str, str]] = set()


def guard(modules: Iterable[ModuleType], lenient: Callable[[], bool]) -> None:
    """Guard the private names of these modules for the rest of the process.

    Args:
        modules: modules of PyTorch's FSDP. If the module's own name is private, all its names are guarded.
        lenient: called at each use: whether to warn instead of raising.
    """
    _Guarded.lenient = staticmethod(lenient)
    for module in modules:
        if type(module) is ModuleType:
            module.__class__ = _Guarded


class _Guarded(ModuleType):
    lenient: Callable[[], bool]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("__") or not _is_private(self, name, value) or _is_trusted(sys._getframe(1)):
            return value
        if name not in SERVED:
            _refuse(self, name, "uses", sys._getframe(1))
        return SERVED.get(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__") and not isinstance(value, ModuleType) and _in_private_module(self):
            if not _changes_nothing(vars(self).get(name), value) and not _is_trusted(sys._getframe(1)):
                _refuse(self, name, "replaces", sys._getframe(1))
        super().__setattr__(name, value)


def _changes_nothing(old: Any, new: Any) -> bool:
    """Whether the new value is Fullshard's, or an empty subclass of it (verl's way around a metaclass)."""
    if old is new or getattr(new, "__module__", "").startswith("fullshard."):
        return True
    if not isinstance(new, type) or any(not name.startswith(("__", "_abc_")) for name in vars(new)):
        return False
    return isinstance(old, type) and old.__module__.startswith("fullshard.") and issubclass(new, old)


def _is_trusted(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "torch")).partition(".")[0] in TRUSTED


def _in_private_module(module: ModuleType) -> bool:
    return any(part.startswith("_") for part in ModuleType.__getattribute__(module, "__name__").split("."))


def _is_private(module: ModuleType, name: str, value: Any) -> bool:
    """Whether a name is private to PyTorch's FSDP; constants and objects of other libraries or Fullshard are not."""
    origin = getattr(value, "__module__", None)
    if not isinstance(origin, str) or not origin.startswith("torch.distributed.fsdp"):
        return False
    return name.startswith("_") or _in_private_module(module)


def _refuse(module: ModuleType, name: str, verb: str, frame: FrameType) -> None:
    """Raise, or warn once per name and file if the program was adopted leniently.

    Raises:
        PrivateNameError: it was not adopted leniently.
    """
    path, where = f"{module.__name__}.{name}", f"{frame.f_globals.get('__name__')}, {frame.f_code.co_filename}"
    error = messages.private_name(path, verb, f"{where}:{frame.f_lineno}", INSTEAD.get(name, ANY))
    if not _Guarded.lenient():
        raise error
    if (path, where) not in _warned:
        _warned.add((path, where))
        warnings.warn(str(error), stacklevel=3)
