"""`FSDPModule`: what a module's class gains by `fully_shard`, and the methods that steer a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from ..errors import ConfigError, PhaseError, message
from ..runtime import UnitHooks
from ..shard import Unit

HOOKS_KEY = "_fullshard_hooks"
"""Where a unit's module keeps its hooks, in its `__dict__`."""


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks of the unit that `module` is (one of) the modules of; None if it is no unit."""
    found: UnitHooks | None = module.__dict__.get(HOOKS_KEY)
    return found


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `module`."""
    return HOOKS_KEY in module.__dict__


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` is (one of) the modules of; None if it is no unit."""
    hooks = hooks_of(module)
    return hooks.unit if hooks is not None else None


class UnshardHandle:
    """A gather in flight, returned by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, hooks: UnitHooks) -> None:
        self._hooks: UnitHooks | None = hooks

    def wait(self) -> None:
        """Make the unsharded parameters usable and register them on the module. May be called more than once."""
        if self._hooks is not None:
            self._hooks.wait_unshard()
            self._hooks = None


class FSDPModule:
    """Mixed into the class of a module that `fully_shard` was applied to.

    The methods of this class steer the unit. Those with `recurse` act on all units below as well.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call, with its own hooks and its compiled form inside, and the unit gathered around it."""
        hooks: UnitHooks = self.__dict__[HOOKS_KEY]
        return hooks.run(self, super().__call__, args, kwargs)  # type: ignore[arg-type,misc]

    def _hooks(self) -> UnitHooks:
        found = hooks_of(self)  # type: ignore[arg-type]
        if found is None:
            raise PhaseError(f"{type(self).__name__} has lost its unit; apply fully_shard to it again")
        return found

    def _units(self, recurse: bool = True) -> Iterator[UnitHooks]:
        if not recurse:
            yield self._hooks()
            return
        seen: set[int] = set()
        for module in self.modules():  # type: ignore[attr-defined]
            hooks = hooks_of(module)
            if hooks is not None and id(hooks) not in seen:
                seen.add(id(hooks))
                yield hooks

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not recursive. They stay until `reshard()` or the next forward's end.

        Args:
            async_op: return at once, with a handle whose `wait()` makes the parameters usable; the module's
                forward waits by itself.
        """
        hooks = self._hooks()
        hooks.unshard()
        handle = UnshardHandle(hooks)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters and register the sharded ones; not recursive."""
        self._hooks().reshard()

    def reset_iter_state(self) -> None:
        """Bring all units back to where a step begins, after an exception in forward or backward.

        Fullshard does this by itself at the next forward of the root; the method is for code written for PyTorch,
        and for freeing memory at once. Gradients that were not reduced yet are dropped.

        Raises:
            PhaseError: this is not the root.
        """
        hooks = self._hooks()
        if hooks.root is None:
            return
        if not hooks.is_top:
            raise PhaseError(f"reset_iter_state() is for the root unit; {hooks.unit.name!r} is below it")
        hooks.root.recover()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last of a step of several.

        Every backward of Fullshard waits for its reductions and leaves `.grad` complete, so this only records the
        fact; it exists for programs written for PyTorch.
        """
        for hooks in self._units():
            hooks.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients after backward (True), or keep them unsharded without communication (False).

        Kept gradients are added up in the dtype of the reduction and join the next one.
        """
        for hooks in self._units(recurse):
            hooks.requires_gradient_sync = requires_gradient_sync
            hooks.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh: reduce over the replicate axis too (True), or only over the shard axis for now (False)."""
        for hooks in self._units(recurse):
            hooks.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free units after forward (True) or keep them until their backward (False)."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}")
        for hooks in self._units(recurse):
            hooks.reshard_after_forward = reshard_after_forward
            hooks.unit.small_axis = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free units after backward (True), or keep them for the next forward (False).

        A kept unit is gathered anew when its shard has changed since: an optimizer step in between is safe.
        """
        for hooks in self._units(recurse):
            hooks.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch exactly these units' parameters in this unit's forward, in place of the recorded order."""
        self._hooks().forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch exactly these units' parameters in this unit's backward, in place of the recorded order."""
        self._hooks().backward_prefetch = _units_of(modules)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook(reduced)` with each reduced slice [shard_numel], after any all-reduce, before it becomes `.grad`.

        Args:
            hook: may change the tensor in place (to reduce it further by its own communication, say).
            stream: accepted for PyTorch's signature; the hook runs on the compute stream, in program order.
        """
        for hooks in self._units():
            hooks.all_reduce_hook = hook

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor` in place of the number of data-parallel ranks."""
        if not factor > 0:
            raise ConfigError(f"the gradient divide factor must be positive, got {factor!r}")
        self._hooks().divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use sums in all reductions and scale separately, in place of the backend's averaging."""
        for hooks in self._units():
            hooks.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give parameters that this rank did not use a gradient (of the other ranks', or zeros) in place of None.

        Fullshard always includes them in the reduction, so ranks may use different parameters either way; without
        this, a parameter unused on this rank gets a `.grad` only if the reduced one is not zero here.
        """
        for hooks in self._units(recurse):
            for gradients in hooks.unit.gradients:
                gradients.fill_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units' reductions may be in flight at once; 1 by default. Each holds one full gradient buffer."""
        if max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for hooks in self._units(recurse):
            hooks.max_reducing = max_input_buffers

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit's parameters are needed in its backward (an embedding's are not)."""
        self._hooks().unshard_in_backward = unshard_in_backward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PhaseError(
            message(
                f"{type(self).__name__} is sharded and cannot be deep-copied yet.",
                expected="copy.deepcopy before fully_shard",
                remedy="deep-copy the model first and shard both copies, or build it anew and load the state dict",
            )
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`to`, `to_empty`, `float`, ... act on whole shards, so that they cost one new shard and no copies."""
        unit = self._hooks().unit
        if not any(True for _ in unit.members):
            return super()._apply(fn, recurse)  # type: ignore[misc]
        applied = unit.apply(fn)
        result = super()._apply(applied, recurse)  # type: ignore[misc]
        unit.finish_apply()
        return result


def _units_of(modules: Sequence[FSDPModule]) -> tuple[UnitHooks, ...]:
    found = []
    for module in modules:
        hooks = hooks_of(module) if isinstance(module, nn.Module) else None
        if hooks is None:
            raise ConfigError(
                message(
                    "Only units can be prefetched.",
                    expected="modules that fully_shard was applied to",
                    got=type(module).__name__,
                )
            )
        found.append(hooks)
    return tuple(found)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit's module count as a forward: parameters are gathered before it and freed after it.

    A no-op if `module` is no unit, so that code can be shared with unsharded models.

    Raises:
        ConfigError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(f"{type(module).__name__} has no method {method_name!r} to register as a forward")
    hooks = module._hooks()

    def forward_method(*args: Any, **kwargs: Any) -> Any:
        return hooks.run(module, method, args, kwargs)

    forward_method.__name__ = method_name
    object.__setattr__(module, method_name, forward_method)
