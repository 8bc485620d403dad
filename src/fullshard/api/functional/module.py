"""`FSDPModule`: the class that `fully_shard` mixes into a module's class, with the methods that control a unit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn

from ...comm import (
    AllGather,
    GatherInGroupMemory,
    HookComm,
    ReduceInGroupMemory,
    ReduceScatter,
    custom,
    custom_of,
    separate_group,
)
from ...errors import ArgumentTypeError, ConfigError, check_switch, invalid_argument
from ...runtime import (
    RUNNER_KEY,
    InFlight,
    Runner,
    copy_module,
    deepcopy_module,
    pickling_error,
    run,
    run_method,
    runner_of,
    runners_in,
)
from ...runtime.reduce_kept import GradientReductionHandle, finalize, reduce_kept, reset_iteration
from ...text import plain_class
from ..gradient_settings import refuse_divisor, register_hook
from ..messages import hook_beside_collective, method_of_root
from . import messages

logger = logging.getLogger("fullshard")
_logged_symm_mem: list[str] = []  # logged once per process


class UnshardHandle:
    """A gather in flight, returned by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, runner: Runner) -> None:
        self._waiting: Runner | None = runner

    def wait(self) -> None:
        """Make the unsharded parameters usable and register them on the module. May be called more than once."""
        if self._waiting is not None:
            self._waiting.wait_unshard()
            self._waiting = None


class FSDPModule:
    """Mixed into the class of every module that `fully_shard` is applied to.

    Its methods control the unit. Those with `recurse` act on all units below as well.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an unsharded instance of the original class, for slices of containers and `type(self)(...)`.

        An instance of `cls` itself could not run without a unit.
        """
        plain: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return plain(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its own hooks and compiled form, while the unit is gathered."""
        runner: Runner | None = self.__dict__.get(RUNNER_KEY)
        if runner is None:
            runner = self._runner()  # raises, with the reason
        return run(runner, self, super().__call__, args, kwargs)  # type: ignore[arg-type,misc]

    def _get_name(self) -> str:
        """The name of the module's original class, by which Transformers' `Trainer` looks up a model's loss."""
        name: str = super()._get_name()  # type: ignore[misc]
        return plain_class(self).__name__ if name == type(self).__name__ else name

    def __repr__(self) -> str:
        text = super().__repr__()
        return f"FSDP{text}" if text.startswith(f"{plain_class(self).__name__}(") else text

    def _runner(self) -> Runner:
        runner = runner_of(self)  # type: ignore[arg-type]
        if runner is None:
            raise messages.unit_lost(plain_class(self).__name__)
        return runner

    def _get_fsdp_state(self) -> UnitState:
        """The unit under the names that PyTorch's libraries use."""
        return UnitState(self._runner())

    def _units(self, recurse: bool = True) -> Iterator[Runner]:
        yield from runners_in(self) if recurse else [self._runner()]  # type: ignore[arg-type]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not recursive. They stay until `reshard()` or the end of the next forward.

        Args:
            async_op: return at once, with a handle whose `wait()` makes the parameters usable; the module's
                forward waits by itself.
        """
        runner = self._runner()
        runner.unshard()
        handle = UnshardHandle(runner)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters and register the sharded ones; not recursive."""
        self._runner().reshard()

    def reset_iter_state(self) -> None:
        """Reset all units to the state in which a step begins, after an exception in forward or backward.

        Fullshard does this by itself at the next forward of the root; the method is for code written for PyTorch,
        and for freeing memory at once. Gradients that are not reduced yet are dropped; with manual finalization, those
        of all backwards since the last `finalize_backward()`.

        Raises:
            PhaseError: this is not the root, the model runs, or gradients of this iteration were added to older ones.
        """
        root = self._root_runner("reset_iter_state()").root
        if root is not None:
            reset_iteration(root)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Declare whether the next backward is the last of a step with several backwards.

        Every backward of Fullshard waits for its reductions and leaves `.grad` complete, so nothing depends on it; it
        exists for programs written for PyTorch.

        Raises:
            PhaseError: this module has lost its unit.
        """
        check_switch("set_is_last_backward()", is_last_backward)
        self._runner()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Make `finalize_backward()` end each iteration, after any number of backwards, as pipelines need.

        Gradients of a backward with gradient sync are complete when it returns, as always; those of backwards without
        sync wait for `finalize_backward()`.

        Raises:
            PhaseError: this is not the root; or a backward has begun and is not finalized yet.
        """
        check_switch("set_manual_backward_finalization()", enabled)
        runner = self._root_runner("set_manual_backward_finalization()")
        root = runner.root
        if runner.settings.manual_finalization is bool(enabled):
            return
        if root is not None and (root.in_backward or root.unfinalized or root.finalizing is not None):
            raise messages.finalization_within_iteration()
        runner.set(manual_finalization=bool(enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that backwards without gradient sync left, and end the iteration.

        Applies the current settings; units are freed as `set_reshard_after_backward` says. Does nothing before
        the first forward. Collective.

        Args:
            async_op: return with the reductions in flight, and a handle whose `wait()` completes `.grad`. Until then a
                forward or another finalization raises, also for roots that share the communication context.

        Raises:
            PhaseError: this is not the root; `set_manual_backward_finalization(True)` was not called; the model runs;
                the previous handle was not waited for; or hybrid sharding is set not to reduce between replicas.
        """
        runner = self._root_runner("finalize_backward()")
        handle = GradientReductionHandle(None)
        if runner.root is not None:
            if not runner.settings.manual_finalization:
                raise messages.no_manual_finalization()
            handle = finalize(runner.root)
        if async_op:
            return handle
        handle.wait()
        return None

    def _root_runner(self, method: str) -> Runner:
        runner = self._runner()
        if runner.root is not None and not runner.is_top:
            raise method_of_root(method, runner.unit.name)
        return runner

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients after backward (True), or keep them unsharded without communication (False).

        Unsharded gradients accumulate in the dtype of the reduction and are included in the next reduction.
        """
        requires_gradient_sync = check_switch("set_requires_gradient_sync()", requires_gradient_sync)
        for runner in self._units(recurse):
            runner.set(reduce_sync=requires_gradient_sync, reduce_all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh, reduce over the replicate axis too (True), or for now only over the shard axis (False)."""
        requires_all_reduce = check_switch("set_requires_all_reduce()", requires_all_reduce)
        for runner in self._units(recurse):
            runner.set(reduce_all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free units after forward (True) or keep them until their backward (False)."""
        reshard_after_forward = check_switch("set_reshard_after_forward()", reshard_after_forward)
        for runner in self._units(recurse):
            runner.set(reshard_after_forward=reshard_after_forward)
            runner.unit.drop_kept()
            runner.unit.kept_axis = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free units after backward (True), or keep them for the next forward (False).

        A unit that stays gathered is gathered again if its shard has changed: an optimizer step in between is safe.
        """
        reshard_after_backward = check_switch("set_reshard_after_backward()", reshard_after_backward)
        for runner in self._units(recurse):
            runner.set(reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of gathered parameters when they are freed (True), so that their addresses stay the same.

        For CUDA graphs and generators that hold data pointers. The unit then takes as much memory as if it were
        never freed; its values are gathered again all the same.
        """
        keep = check_switch("set_keep_unsharded_storage()", keep)
        for runner in self._units(recurse):
            runner.unit.keep_storage(keep)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch exactly these units' parameters in this unit's forward, instead of the recorded order."""
        self._runner().set(prefetch_forward_units=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch exactly these units' parameters in this unit's backward, instead of the recorded order."""
        self._runner().set(prefetch_backward_units=_units_of(modules))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook(reduced)` with each reduced slice [shard_numel], after any all-reduce, before it becomes `.grad`.

        Not recursive, as PyTorch's: call it on each unit.

        Args:
            hook: may change the tensor in place (for instance, to reduce it further by its own communication).
            stream: accepted for compatibility with PyTorch; the hook runs on the compute stream, in program order.
        """
        self._runner().set(reduce_hook=hook)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce the gradients of this unit and all below, instead of the engine's averaging.

        PyTorch's `fully_shard` has no such method; its wrapper has.

        Args:
            state: passed to each call of the hook.
            hook: with a `comm_hooks.PowerSGDState`, `hook(state, gradient)` with a `comm_hooks.GradientSlice`, in place
                of the all-reduce between the replicas of a hybrid mesh (replicate, shard), which may be of one shard.
                Otherwise, on a mesh of one dim, `hook(state, gradient, slice)`, which writes this rank's slice [S] of
                the mean of `gradient` [world * S].

        Raises:
            UsageError: a hook is registered already, or the mesh is hybrid and the hook not PowerSGD.
            ConfigError: the hook is not callable; gradients are not averaged; or PowerSGD has no replicas, a process
                group of other ranks; or the reduction that the hook replaces is in 8 bits, or a custom one.
        """
        register_hook(list(self._units()), state, hook)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit with `comm`, in memory that `comm` allocates; not recursive.

        Args:
            comm: called as `comm(output_tensor, input_tensor, group, async_op=True)`; returns a work or None. Its
                `allocate(size, *, dtype, device)` makes the output, which is then copied into the unit's own buffer.
        """
        self._set_custom("all-gather", comm, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients over the shard axis with `comm`, from memory it allocates; not recursive.

        Args:
            comm: called as `comm(output_tensor, input_tensor, group, op, async_op=True)`; returns a work or None. Its
                `allocate(size, *, dtype, device)` makes the input, into which the gradients are copied.
        """
        self._set_custom("reduce-scatter", comm, reduce_scatter=comm)

    def _set_custom(self, what: str, comm: Any, **collective: Any) -> None:
        if not callable(comm) or not callable(getattr(comm, "allocate", None)):
            raise messages.invalid_collective(what, comm)
        runner = self._runner()
        if runner.settings.group_memory:
            raise messages.collective_beside_group_memory()
        current = runner.settings.comm
        if "reduce_scatter" in collective and isinstance(current, HookComm) and not current.between:
            raise hook_beside_collective(runner.unit.name)
        runner.set(comm=custom(current, **collective))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate this unit through memory that the process group's backend allocates (NCCL's for NVLink SHARP).

        Not recursive.

        Raises:
            ConfigError: the backend has no such memory (gloo has none), or custom collectives are set.
        """
        check_switch("set_allocate_memory_from_process_group_for_comm()", enable)
        runner = self._runner()
        if not enable:
            if runner.settings.group_memory:
                inner = custom(runner.settings.comm, all_gather=None, reduce_scatter=None)
                runner.set(comm=inner, group_memory=False)
            return
        comm = runner.settings.comm
        if runner.settings.group_memory or not runner.unit.buckets:
            return
        if custom_of(comm).replaces:
            raise messages.collective_beside_group_memory()
        axes = runner.unit.buckets[0].axes
        gather, reduce = [kind(axes.shard, axes.device) for kind in (GatherInGroupMemory, ReduceInGroupMemory)]
        runner.set(comm=custom(comm, all_gather=gather, reduce_scatter=reduce), group_memory=True)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted for programs written for PyTorch; has no effect, which is logged once.

        Gathers go straight into the unit's own memory; there is no path through symmetric memory.
        """
        self._runner()
        if not _logged_symm_mem:
            _logged_symm_mem.append(backend)
            logger.info("set_symm_mem_for_comm(%r) has no effect: units gather without symmetric memory", backend)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce over a separate process group (True), so that reductions and gathers can overlap.

        Creates a group for each set of ranks, collectively: call it on every rank.
        """
        check_switch("set_separate_reduce_scatter_group()", enable)
        for runner in self._units(recurse):
            groups: dict[tuple[int, ...], Any] = {}
            if enable:
                for bucket in runner.unit.buckets:
                    groups |= separate_group(bucket.axes.shard)
            runner.set(comm=custom(runner.settings.comm, reduce_groups=groups))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the gathers of the next forward wait for `event`, recorded after the optimizer step. For the root.

        Fullshard's gathers follow the current stream already; only an optimizer step on a different stream needs this.
        The event is used once.

        Raises:
            ConfigError: not an event.
            PhaseError: this is not the root.
        """
        if not callable(getattr(event, "wait", None)):
            raise invalid_argument("set_post_optim_event()", event, "a torch.Event")
        self._root_runner("set_post_optim_event()").post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor` instead of the number of data-parallel ranks.

        Raises:
            ConfigError: not a positive number; or the unit's `reduction` is not "mean".
        """
        if not factor > 0:
            raise invalid_argument("the gradient divide factor", factor, "a positive number")
        refuse_divisor(self._runner(), "a gradient divide factor")
        self._runner().set(reduce_divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use sums in this unit's reductions and scale separately, instead of the backend's averaging.

        Not recursive, as PyTorch's: call it on each unit.

        Raises:
            ConfigError: the unit's `reduction` is not "mean": gradients are summed already.
        """
        enable = check_switch("set_force_sum_reduction_for_comms()", enable)
        if enable:
            refuse_divisor(self._runner(), "set_force_sum_reduction_for_comms(True)")
        self._runner().set(reduce_force_sum=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give parameters that this rank did not use a gradient (the other ranks', or zeros) instead of None.

        Fullshard always includes them in the reduction, so ranks may use different parameters either way; without
        this setting, a parameter that no rank used gets no `.grad`. With it, units whose forward did not run take part
        as well.
        """
        reduce_scatter_unused_params = check_switch("set_reduce_scatter_unused_params()", reduce_scatter_unused_params)
        for runner in self._units(recurse):
            runner.set(reduce_fill_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units may be in reduction at once; 1 by default. Each has a full gradient buffer."""
        is_int = type(max_input_buffers) is int
        if not is_int or max_input_buffers < 1:
            kind = ConfigError if is_int else ArgumentTypeError
            raise invalid_argument("max_input_buffers", max_input_buffers, "an int of at least 1", kind=kind)
        for runner in self._units(recurse):
            runner.set(reduce_max_in_flight=max_input_buffers)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's parameters are needed in its backward (an embedding's are not)."""
        unshard_in_backward = check_switch("set_unshard_in_backward()", unshard_in_backward)
        self._runner().set(unshard_in_backward=unshard_in_backward)

    def __copy__(self) -> Any:
        """Copy as `copy.copy` copies any module: the same parameters, submodules and unit.

        The unit belongs to this module: the copy's forward raises a `PhaseError` once this module is gone. Needed
        because `__new__` would return an unsharded module.
        """
        if (inherited := getattr(super(), "__copy__", None)) is not None:
            return inherited()
        return copy_module(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickling_error(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy with separate shards on the same mesh; see `runtime/copy.py`. For averages of weights (EMA)."""
        return deepcopy_module(self, memo)

    @torch.inference_mode(False)  # the new shards must serve training later
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply `to`, `to_empty`, `float`, ... to whole shards: they allocate a single new shard and copy nothing."""
        unit = self._runner().unit
        if not any(True for _ in unit.members):
            return super()._apply(fn, recurse)  # type: ignore[misc]
        applied, finish = unit.apply(fn)
        result = super()._apply(applied, recurse)  # type: ignore[misc]
        finish()
        return result


def _units_of(modules: Sequence[FSDPModule], what: str = "be prefetched") -> tuple[Runner, ...]:
    runners = []
    for module in modules:
        runner = runner_of(module) if isinstance(module, nn.Module) else None
        if runner is None:
            raise messages.not_units(what, type(module).__name__)
        runners.append(runner)
    return tuple(runners)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the chunks of a pipeline) share a communication context.

    They share the bound on reductions in flight (`set_reduce_scatter_max_input_buffers`), so that their buffers do not
    add up. Collectives run in program order on the backend's own stream either way. May be called before the first
    forward or between steps.

    Raises:
        ConfigError: a module is not a unit, or is below another root.
    """
    runners = list(_units_of(modules, "share a communication context"))
    for runner, module in zip(runners, modules, strict=True):
        if runner.root is not None and not runner.is_top:
            raise messages.not_a_root(plain_class(module).__name__, runner.unit.name)
    if not runners:
        return
    first = runners[0]
    in_flight = InFlight()
    if first.root is not None:
        in_flight = first.root.reducer.in_flight
    elif first.settings.in_flight is not None:
        in_flight = first.settings.in_flight
    for runner in runners:
        runner.set(in_flight=in_flight)
        if runner.root is not None:
            runner.root.reducer.share(in_flight)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit's module count as a forward: parameters are gathered before it and freed after it.

    A no-op if `module` is not a unit, so that unsharded models can run the same code.

    Raises:
        ConfigError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        name = plain_class(module).__name__
        raise messages.no_such_method(name, method_name)
    run_method(module, module._runner(), method_name)


# The state that PyTorch's pipeline stages and libraries read from a unit, by `fully_shard.state(module)`. A stage keeps
# gradients through the backwards of all micro-batches, then asks each unit of its module in turn to reduce its own, and
# the root to wait for them (`torch.distributed.pipelining.stage`). Here the root does both.


class UnitState:
    """A stateless view of a unit, with the attribute names of PyTorch's module state."""

    __slots__ = ("_runner",)

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def _fsdp_param_groups(self) -> tuple[()]:
        """Empty: the root reduces everything itself, in `_root_post_backward_final_callback`."""
        return ()

    @property
    def _is_root(self) -> bool | None:
        """Whether the unit's forward is called from outside; None until the first forward decides."""
        return None if self._runner.root is None else self._runner.is_top

    @property
    def _state_ctx(self) -> Any:
        """The state that all units below a root share: `all_states`."""
        return SimpleNamespace(
            all_states=[UnitState(unit) for unit in self._runner.rooted().units if isinstance(unit, Runner)]
        )

    @property
    def _comm_ctx(self) -> object:
        """The communication context: the same object for roots that `share_comm_ctx` joined."""
        root, in_flight = self._runner.root, self._runner.settings.in_flight
        return root.reducer.in_flight if root is not None else self._runner if in_flight is None else in_flight

    def _lazy_init(self) -> None:
        """Determine the root, as the first forward does. Collective."""
        self._runner.rooted()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that the units below the root accumulated without sync. Collective.

        Raises:
            PhaseError: the unit is not the root, or is running.
        """
        root = self._runner.rooted()
        if not self._runner.is_top:
            raise method_of_root("_root_post_backward_final_callback()", self._runner.unit.name)
        reduce_kept(root)


def state_of(module: nn.Module) -> UnitState | None:
    """The state of a unit's module; None for other modules."""
    runner = runner_of(module)
    return None if runner is None else UnitState(runner)
