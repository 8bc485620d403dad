"""`FullyShardedDataParallel`, the wrapper front-end (FSDP1's interface) on the engine and its flat layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...agreement import broadcast_states, checked
from ...comm import Comm, make_comm
from ...containers import Borrowed, borrowed_from, map_tensors
from ...errors import check_switch
from ...forms import owner_of
from ...mesh import Axis
from ...optim import guard as optimizer_guard
from ...optim.clip import checked_clipping, clip_units, refuse_to_clip_stepped
from ...policies import Check, Unused
from ...runtime import (
    RUNNER_KEY,
    Root,
    Runner,
    copy_module,
    deepcopy_module,
    find_root,
    move_buffers,
    name_members,
    notice_torch,
    own_modules,
    pickling_error,
    run,
    shown_part,
)
from ...text import WRAPPED, clean_name
from ..gradient_settings import register_hook, without_sync
from ..messages import method_of_root
from . import messages
from .configs import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from .instances import (
    PlannedInstance,
    check_arguments,
    check_plans,
    flat_of,
    materialise,
    plan_blocks,
    put_in_place,
    warn_of_host,
    without_iterators,
)
from .markers import Markers, mark_wrapped
from .precision import FullPrecision, cast_buffers, policy_of, use_full_precision
from .state_dicts import StateDictMethods, default_settings, instances_of
from .summon import is_summoned, may_run_summoned, summon_full_params, summoned_around, without_backward

_OF_ROOT = ("self", "__class__", "module", "auto_wrap_policy", "full_precision_in_eval", "check", "unused")
"""Local names of the constructor that are not arguments of the instances that `auto_wrap_policy` makes."""


class FullyShardedDataParallel(Markers, StateDictMethods, nn.Module):
    """A module wrapper that shards its parameters, gradients and optimizer state over ranks.

    It has the interface of `torch.distributed.fsdp.FullyShardedDataParallel`: a program written for that runs with its
    import changed. Settings of PyTorch's own classes are accepted as well.

    Args:
        module: the module. Submodules that are wrapped already remain separate instances.
        process_group: the ranks to shard over (None: all); for hybrid strategies a pair (shard, replicate) or None,
            which shards inside a node.
        sharding_strategy: see `ShardingStrategy`; None: FULL_SHARD. On one rank it becomes NO_SHARD, with a warning.
        cpu_offload: see `CPUOffload`; on a CPU there is nothing to offload.
        auto_wrap_policy: which submodules become instances first; a policy of `fullshard.wrap`, "auto", or a set of
            module classes.
        backward_prefetch: see `BackwardPrefetch`; None: nothing is gathered ahead in backward.
        mixed_precision: see `MixedPrecision`.
        ignored_modules: modules whose parameters and buffers this instance and those around it leave alone.
            Deprecated in favour of `ignored_states`.
        param_init_fn: called with each module that has parameters on meta, to give them values; None: its
            `reset_parameters()` is called on empty memory.
        device_id: the compute device; None: the accelerator that the process group serves, else the CPU.
        sync_module_states: make all ranks start from rank 0's parameters and buffers.
        forward_prefetch: accepted; forward gathers one unit ahead either way, after the first pass.
        limit_all_gathers: True: at most two units that are freed after use are gathered at any time in forward; False:
            three.
        use_orig_params: True: `named_parameters()` yields the original Parameter objects, each showing the 1-D part
            that this rank owns (maybe empty). False: a single `FlatParameter` per instance.
        ignored_states: parameters or modules to leave alone.
        device_mesh: instead of `process_group`: 1-D (shard), or 2-D (replicate, shard) for hybrid strategies.
        full_precision_in_eval: Fullshard's own, for the root: in eval mode compute in the parameters' own dtype, with
            buffers in theirs (PyTorch: FSDP_USE_FULL_PREC_IN_EVAL=1).
        comm: Fullshard's own: "torch", "null" (skips communication, to time the rest), or a `Comm`.
        check: Fullshard's own, for the root: when ranks compare what they are about to run; see `fully_shard`.
        unused: Fullshard's own, for the root: what happens to units that only some ranks run; see `fully_shard`.
        reduction: Fullshard's own: "mean" over ranks, "sum", or "tokens" (see `set_token_count`); the same for all
            instances of a model.

    Raises:
        ConfigError: an invalid argument, or conflicting ones. Nothing has changed then.
        LayoutError: parameters that share memory without being the same object.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        full_precision_in_eval: bool = False,
        comm: str | Comm = "torch",
        check: Check = "first",
        unused: Unused = "error",
        reduction: str = "mean",
    ) -> None:
        keywords = dict(locals())
        for name in _OF_ROOT:
            keywords.pop(name, None)
        keywords = without_iterators({**keywords, "comm": make_comm(comm)})
        check_switch("FullyShardedDataParallel(full_precision_in_eval=)", full_precision_in_eval)
        arguments = check_arguments(module, keywords)
        super().__init__()
        plan = PlannedInstance(module, keywords, arguments, *checked(check, unused))
        blocks = [] if auto_wrap_policy is None else plan_blocks(plan, auto_wrap_policy, type(self))
        check_plans([*blocks, plan])
        for note in arguments.notes:
            warnings.warn(note, stacklevel=2)
        for block in blocks:
            put_in_place(module, block.module, type(self)(block.module, **block.keywords))
        materialise(module, param_init_fn, arguments.axes.device, arguments.ignored_modules)
        if sync_module_states:
            broadcast_states(own_modules(module), arguments.axes, keywords["comm"], arguments.ignored)
        self._arguments = arguments
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        self.use_orig_params, self.full_precision_in_eval = use_orig_params, full_precision_in_eval
        self._fullshard_settings = default_settings(StateDictType.FULL_STATE_DICT)
        mark_wrapped(self, module, arguments.ignored_modules)
        if device_id is None:
            warn_of_host(module, arguments)
        unit_settings = plan.unit_settings()
        self.__dict__[RUNNER_KEY] = Runner(plan.build(), [self], unit_settings, _find_root)
        self._guard()
        name_members([self])
        move_buffers(own_modules(module, arguments.ignored_modules), arguments.axes.device)
        self.register_load_state_dict_pre_hook(type(self)._before_load)
        self.register_load_state_dict_post_hook(type(self)._after_load)
        optimizer_guard.install()
        notice_torch()

    # Settings.

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation checkpoint wrapper around it."""
        wrapped: nn.Module = self._modules[WRAPPED]  # type: ignore[assignment]
        inner = wrapped._modules.get("_checkpoint_wrapped_module")
        return inner if inner is not None else wrapped

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force."""
        return self._arguments.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The mixed precision in force: none for a module exempt from it."""
        mixed = self._arguments.mixed_precision
        return MixedPrecision() if isinstance(mixed, FullPrecision) else mixed

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether sharded state lives on the host."""
        return self._arguments.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._arguments.backward_prefetch

    @property
    def compute_device(self) -> torch.device:
        """The device on which forward and backward run."""
        return self._arguments.axes.device

    @property
    def process_group(self) -> Any:
        """The group that parameters are sharded over (for NO_SHARD: replicated over)."""
        return self._arguments.axes.shard.group

    @property
    def _own_axis(self) -> Axis:
        axes = self._arguments.axes
        return axes.shard if axes.shard.size > 1 or axes.replicate is None else axes.replicate

    @property
    def rank(self) -> int:
        """This process's index in `process_group`."""
        return self._own_axis.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self._own_axis.size

    @property
    def params(self) -> list[nn.Parameter]:
        """The instance's own flat parameters: empty without parameters, several if dtypes are mixed."""
        return [flat_of(bucket) for bucket in self._runner().unit.buckets]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _lazy_init(self) -> Root:
        """The root above this instance. If there is none, this instance becomes a root."""
        return self._runner().rooted()

    def check_is_root(self) -> bool:
        """Whether this instance is a root: its forward is called from outside. Runs lazy initialization if needed."""
        self._lazy_init()
        return self._runner().is_top

    # The nn.Module interface.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered around it."""
        runner: Runner = self.__dict__[RUNNER_KEY]
        arguments = self._arguments
        if runner.unit.showing.summoned:
            if not may_run_summoned(self):
                raise messages.forward_without_parameters()
            return without_backward(self._modules[WRAPPED](*args, **kwargs))  # type: ignore[misc]
        if runner.root is None:
            self._lazy_init()
        wrapped: nn.Module = self._modules[WRAPPED]  # type: ignore[assignment]
        if runner.is_top:
            if self.full_precision_in_eval:
                use_full_precision(self, not self.training)
            if _moves_inputs(arguments.axes.device):
                return run_on(arguments.axes.device, runner, self, wrapped, args, kwargs)
        return run(runner, self, wrapped, args, kwargs)

    def _guard(self) -> None:
        """Refuse direct calls of the wrapped module where they would compute with local parts of its parameters.

        Other forms of parameters refuse such use themselves.
        """
        unit = self._runner().unit
        if any(bucket.form.keeps_originals and bucket.layout.world > 1 for bucket in unit.buckets):
            unit.showing.guard(self.module, refuse_bypass)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED or WRAPPED not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules[WRAPPED], name)

    def __getitem__(self, key: int) -> Any:
        if hasattr(self, WRAPPED):
            return self.module.__getitem__(key)  # type: ignore[operator]
        raise messages.wraps_nothing()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Copy with separate shards on the same ranks; see `fullshard.runtime.copy.deepcopy_module`."""
        for instance in self.fsdp_modules(self):
            memo[id(instance._arguments)] = instance._arguments  # process groups cannot be copied
        copied = deepcopy_module(self, memo)
        for instance in self.fsdp_modules(self):
            if RUNNER_KEY in memo[id(instance)].__dict__:  # missing while an instance around it is being copied
                memo[id(instance)]._guard()
        return copied

    def __copy__(self) -> Any:
        """Copy as `copy.copy` copies any module: the same parameters, submodules and unit."""
        return copy_module(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickling_error(self)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Run `nn.Module.apply` with this instance's parameters whole, and write changes back. Collective.

        Inside `summon_full_params`, whose `writeback` then applies, nothing is communicated.
        """
        if may_run_summoned(self):
            return super().apply(fn)
        with summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module.named_parameters`; inside `summon_full_params` with the names of the unwrapped module."""
        summoned = is_summoned(self)
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (clean_name(name) if summoned else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `nn.Module.named_buffers`; inside `summon_full_params` with the names of the unwrapped module."""
        summoned = is_summoned(self)
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (clean_name(name) if summoned else name), buffer

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All instances in `module`, itself included; with `root_only` only roots (runs lazy initialization)."""
        check_switch("fsdp_modules(root_only=)", root_only)
        return [child for child in instances_of(module) if not root_only or child.check_is_root()]

    # Training.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate unsharded gradients without communication; the next one reduces all.

        Raises:
            PhaseError: this is not the root.
        """
        self._must_be_root("no_sync()")
        with without_sync([child._runner() for child in self.fsdp_modules(self)]):
            yield

    def clip_grad_norm_(self, max_norm: float | torch.Tensor, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`. Collective.

        Exact for any mix of strategies, and for unmanaged parameters (whole on every rank).

        Returns:
            The total norm before clipping, in the widest dtype of this rank's gradients (float32 if it has none).

        Raises:
            PhaseError: this is not the root.
            ConfigError: an invalid `max_norm` or `norm_type`, or a parameter steps during the backward.
        """
        self._must_be_root("clip_grad_norm_()")
        order = checked_clipping(max_norm, norm_type)
        parameters = list(self.parameters())
        refuse_to_clip_stepped(parameters)
        units = [child._runner().unit for child in self.fsdp_modules(self)]
        others = [parameter for parameter in parameters if owner_of(parameter) is None]
        return clip_units(units, others, float(max_norm), order, self.compute_device)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce the gradients of all instances below this root, instead of the engine's averaging.

        Args:
            state: passed to each call of the hook.
            hook: under NO_SHARD `hook(state, gradient)`, in place; otherwise `hook(state, gradient, slice)`, which
                writes this rank's slice [S] of the reduced gradient [world * S]. PyTorch's default hooks (all-reduce,
                reduce-scatter, fp16 and bf16 compression) work. With a `comm_hooks.PowerSGDState` and `powerSGD_hook`,
                which may be called by a function of yours, `hook(state, gradient)` with a `comm_hooks.GradientSlice`,
                in place of the all-reduce between replicas: under NO_SHARD and hybrid strategies.

        Raises:
            UsageError: this is not the root, a hook is registered already, or the strategy is hybrid and the hook not
                PowerSGD.
            ConfigError: the hook is not callable; `reduction` is not "mean"; or PowerSGD has no replicas, or a process
                group of other ranks.
        """
        if not self.check_is_root():
            raise messages.hook_below_root()
        register_hook([child._runner() for child in self.fsdp_modules(self)], state, hook)

    def _must_be_root(self, method: str) -> None:
        if not self.check_is_root():
            raise method_of_root(method, self._runner().unit.name)

    summon_full_params = staticmethod(summon_full_params)


def run_on(device: torch.device, runner: Runner, module: nn.Module, wrapped: nn.Module, args: Any, kwargs: Any) -> Any:
    """`run` with inputs moved to `device`: the caller's containers hold the moved tensors during the call."""
    borrowed, args, kwargs = _moved(device, args, kwargs)
    try:
        return run(runner, module, wrapped, args, kwargs)
    finally:
        if borrowed is not None:
            _give_back(borrowed)


def _moves_inputs(device: torch.device) -> bool:
    return device.type != "cpu"


def _on_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _moved(device: torch.device, args: Any, kwargs: Any) -> tuple[Borrowed | None, Any, Any]:
    borrowed = borrowed_from(args, kwargs)
    return borrowed, *map_tensors(partial(_on_device, device), (args, kwargs), borrowed)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _give_back(borrowed: Borrowed) -> None:
    borrowed.give_back()


def refuse_bypass(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of wrapped modules, registered while they show sharded parameters.

    Raises:
        UsageError: the module shows only this rank's part of a parameter.
    """
    for owner in own_modules(module):
        if (name := shown_part(owner)) is not None:
            raise messages.called_past_instance(name)


def _find_root(top: Runner) -> Root:
    """`find_root`, followed by the wrapper's own initialization of the root and of new instances."""
    top = summoned_around(top.modules[0]) or top
    instances = FullyShardedDataParallel.fsdp_modules(top.modules[0])
    new_instances = [instance for instance in instances if instance._runner().root is None]
    is_new = top.root is None
    root = find_root(top)
    for instance in new_instances:
        cast_buffers(instance)
    for module in top.modules if is_new else ():
        if isinstance(module, FullyShardedDataParallel):
            top.set(policy=policy_of(module._arguments.mixed_precision, module.module, root=True))
    return root
