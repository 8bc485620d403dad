"""Instances of the wrapper: their arguments are checked, then all are planned together, initialised and built."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm import make_comm
from ...errors import ArgumentTypeError, check_switch, invalid_argument
from ...forms import FlatParameter, FlatParameterForm, Ignored, LocalForm, successor_of
from ...mesh import MeshAxes, axes_of_groups, refuse_misread, resolve_mesh, unsharded_axes
from ...policies import Check, CPUOffloadPolicy, OffloadPolicy, Unused
from ...runtime import PrefetchSettings, UnitSettings, is_unit, left_alone, own_modules, runners_in, unit_of
from ...shard import (
    Bucket,
    BuildSettings,
    FlatView,
    Found,
    ReduceSettings,
    Rehearsal,
    Unit,
    build_unit,
    check_parameters,
    find_parameters,
    find_shared,
    home_of,
    plan_unit,
    show_shared,
)
from ...text import clean_name, plain_class
from ..gradient_settings import check_reduction
from ..wrapping import plan_wrapping, post_order, refuse_scripted
from . import messages
from .configs import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, accept
from .precision import FullPrecision, policy_of

FULL_SHARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class ConstructorArguments:
    """The constructor's arguments, checked and with defaults filled in.

    Attributes:
        axes: the mesh axes over which parameters are split and replicated.
        strategy: the strategy in force (NO_SHARD on a single rank).
        mesh_given: whether `device_mesh` was passed: sharded state dicts then hold DTensors.
        cpu_offload, backward_prefetch, mixed_precision: the arguments of these names.
        ignored: ids of the parameters to leave alone.
        ignored_modules: the modules to leave alone.
        notes: the texts of warnings to issue.
    """

    axes: MeshAxes
    strategy: ShardingStrategy
    mesh_given: bool
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    ignored: set[int]
    ignored_modules: set[nn.Module]
    notes: tuple[str, ...] = ()


def check_arguments(module: Any, keywords: Mapping[str, Any]) -> ConstructorArguments:
    """Check the constructor's arguments and fill in defaults. Changes nothing.

    Args:
        module: the module.
        keywords: the other arguments, by name.

    Raises:
        ConfigError: invalid or conflicting arguments.
    """
    if not isinstance(module, nn.Module):
        raise messages.not_a_module(type(module).__name__)
    refuse_scripted(module)
    for name in ("sync_module_states", "use_orig_params"):
        check_switch(f"FullyShardedDataParallel({name}=)", keywords[name])
    chosen, notes = ShardingStrategy.FULL_SHARD, list[str]()
    if keywords["sharding_strategy"] is not None:
        chosen = accept(keywords["sharding_strategy"], ShardingStrategy, "sharding_strategy")
    device_mesh, process_group = keywords["device_mesh"], keywords["process_group"]
    if device_mesh is not None and process_group is not None:
        raise messages.group_and_mesh()
    device = _device(keywords["device_id"])
    hybrid = chosen in HYBRID
    if device_mesh is not None:
        refuse_misread(device_mesh)
        axes = resolve_mesh(device_mesh, device)
        if hybrid != (axes.replicate is not None):
            raise messages.mesh_of_another_strategy(chosen.name, hybrid, tuple(device_mesh.shape))
    else:
        axes = axes_of_groups(process_group, hybrid, device)
    if chosen is ShardingStrategy.NO_SHARD:
        axes = unsharded_axes(axes)
    elif axes.shard.size == 1 and not hybrid:
        notes.append(messages.switches_to_no_shard(chosen))
        chosen, axes = ShardingStrategy.NO_SHARD, unsharded_axes(axes)
    prefetch, offload, mixed = (keywords[name] for name in ("backward_prefetch", "cpu_offload", "mixed_precision"))
    if prefetch is not None:
        prefetch = accept(prefetch, BackwardPrefetch, "backward_prefetch")
    modules, ignored = _ignored(keywords["ignored_modules"], keywords["ignored_states"])
    if module in modules:
        notes.append(messages.root_is_ignored())
    return ConstructorArguments(
        axes,
        chosen,
        device_mesh is not None,
        CPUOffload() if offload is None else accept(offload, CPUOffload, "cpu_offload"),
        prefetch,
        MixedPrecision() if mixed is None else accept(mixed, MixedPrecision, "mixed_precision"),
        ignored,
        modules,
        tuple(notes),
    )


def _device(device_id: Any) -> torch.device | None:
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    if isinstance(device_id, int) and not isinstance(device_id, bool) and device_id >= 0:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise messages.no_accelerator(device_id)
        return torch.device(accelerator.type, device_id)
    if isinstance(device_id, str):
        with suppress(RuntimeError):  # torch's error for an invalid name
            return torch.device(device_id)
    expected = "an accelerator's index, a torch.device, or the name of one"
    raise invalid_argument("FullyShardedDataParallel(device_id=)", device_id, expected)


def _ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> tuple[set[nn.Module], set[int]]:
    if modules is not None and states is not None:
        raise messages.ignored_twice()
    argument = f"FullyShardedDataParallel({'ignored_states' if modules is None else 'ignored_modules'}=)"
    expected = "a list or set of " + ("parameters, or of modules, not both" if modules is None else "modules")
    remedy = "pass the objects themselves, as in [model.head]"
    states = modules if modules is not None else () if states is None else states
    if not isinstance(states, Iterable) or isinstance(states, (str, torch.Tensor)):
        raise invalid_argument(argument, states, expected, remedy, ArgumentTypeError)
    items = list(states)
    kinds = {isinstance(item, nn.Parameter) for item in items}
    invalid = [item for item in items if not isinstance(item, (nn.Module, nn.Parameter))]
    if invalid or len(kinds) > 1 or (modules is not None and True in kinds):
        raise invalid_argument(argument, invalid[0] if invalid else items, expected, remedy)
    chosen = {item for item in items if isinstance(item, nn.Module)}
    for item in chosen:
        if is_unit(item):
            raise messages.ignored_instance(type(item).__name__)
    ignored = {child for item in chosen for child in own_modules(item)}  # instances below them stay sharded
    ids = {id(parameter) for child in ignored for parameter in child.parameters(recurse=False)}
    ids |= {id(item) for item in items if isinstance(item, nn.Parameter)}
    return ignored, ids


# Planned instances.


@dataclass(frozen=True)
class PlannedInstance:
    """A planned instance.

    Attributes:
        module: the module that it will wrap.
        keywords: the constructor's arguments, by name, without those of the root alone; `comm` is a `Comm`.
        arguments: those that are checked, with defaults filled in.
        when, unused: the arguments `check` and `unused`.
    """

    module: nn.Module
    keywords: Mapping[str, Any]
    arguments: ConstructorArguments
    when: Check = "first"
    unused: Unused = "error"

    @property
    def flat(self) -> bool:
        """Whether it shows a single `FlatParameter`."""
        return not self.keywords["use_orig_params"]

    def build_settings(self) -> BuildSettings:
        """The settings with which its unit is built."""
        arguments = self.arguments
        offload = CPUOffloadPolicy() if arguments.cpu_offload.offload_params else OffloadPolicy()
        return BuildSettings(
            arguments.axes,
            self.keywords["comm"],
            policy_of(arguments.mixed_precision, self.module),
            "flat",
            form=FlatParameterForm if self.flat else LocalForm,
            home=home_of(offload, arguments.axes.device),
            keeps_compute_dtype=arguments.mixed_precision.keep_low_precision_grads,
            reduces_as_computed=True,
        )

    def unit_settings(self) -> UnitSettings:
        """The settings with which its unit runs."""
        arguments = self.arguments
        forward = 1 if self.keywords["limit_all_gathers"] else 2  # units gathered ahead
        backward = 0 if arguments.backward_prefetch is None else 1
        late = arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        return UnitSettings(
            self.keywords["comm"],
            policy_of(arguments.mixed_precision, self.module),
            arguments.axes,
            None if arguments.strategy in FULL_SHARD else False,  # None: the root stays gathered for its backward
            reduce=ReduceSettings(reduction=self.keywords["reduction"]),
            prefetch=PrefetchSettings(forward, backward, late),
            ignored=Ignored.under([self.module], self.ignored(), arguments.ignored_modules),
            check=self.when,
            unused=self.unused,
        )

    def ignored(self) -> set[int]:
        """Ids of the parameters to leave alone: this instance's, and those that units below leave alone."""
        return self.arguments.ignored | left_alone(runners_in(self.module))

    def check(self, drafts: Sequence[Found]) -> None:
        """Raise if these parameters cannot form a unit. Strips the wrapper's prefixes from their names.

        Raises:
            ConfigError, LayoutError: names the parameter.
        """
        check_reduction(self.keywords["reduction"], self.keywords["comm"])
        for draft in drafts:
            draft.name = clean_name(draft.name)
        check_parameters(drafts, self.arguments.axes, "flat", wrapper=True)
        if self.flat:
            check_uniform(drafts)

    def build(self) -> Unit:
        """Shard the parameters that no instance below has."""
        ignored = self.ignored()
        drafts = find_parameters([self.module], unit_of, ignored)
        self.check(drafts)
        shared = find_shared([self.module], unit_of, ignored)
        previous_owners = {id(draft.owner): draft.owner for draft in drafts if draft.owner is not None}
        holders = holders_of(previous_owners.values())
        unit = build_unit(drafts, self.build_settings())
        show_shared(shared)
        if self.flat:
            show_flat(unit, self.module)
            for owner in previous_owners.values():
                show_flat(owner, holders.get(id(owner)))
        return unit


def check_plans(plans: Sequence[PlannedInstance]) -> None:
    """Check all planned instances, so that an invalid one raises before any is built. Changes nothing.

    Raises:
        ConfigError, LayoutError: see `PlannedInstance.check`; a module on meta that nothing can initialise.
    """
    rehearsal = Rehearsal(unit_of)
    wrapped: list[nn.Module] = []
    for plan in plans:
        drafts = rehearsal.add([plan.module], plan.ignored())
        plan.check(drafts)
        plan_unit(drafts, plan.build_settings())
        check_initialisable(plan.module, plan.keywords["param_init_fn"], plan.arguments.ignored_modules, wrapped)
        wrapped.append(plan.module)


# Instances that replace submodules.


def without_iterators(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """These arguments, with lists in place of iterators, which only the first reader could read."""
    return {name: list(value) if isinstance(value, Iterator) else value for name, value in keywords.items()}


def plan_blocks(root: PlannedInstance, policy: Any, constructor: Callable[..., Any]) -> list[PlannedInstance]:
    """Plan the instances of submodules of the root's module, innermost first.

    Args:
        root: the plan of the whole model's instance, whose arguments a policy may override for a block.
        policy: `auto_wrap_policy`.
        constructor: the callable that takes these arguments.

    Raises:
        ConfigError: the module is, or contains, an instance already; invalid or conflicting arguments.
    """
    module = root.module
    for name, child in module.named_modules():
        if is_unit(child):
            raise messages.wrapped_already(name, plain_class(child).__name__)
    ignored = root.arguments.ignored_modules
    planned = plan_wrapping(module, policy, ignored)
    overrides = {id(child): arguments for _, child, arguments in planned}
    mixed = root.arguments.mixed_precision
    casts = any(dtype is not None for dtype in (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype))
    if casts and mixed._module_classes_to_ignore:
        untouched, exempt = tuple(mixed._module_classes_to_ignore), set()
        full_precision = {"mixed_precision": FullPrecision(output_dtype=mixed.param_dtype)}
        for child in module.modules():
            if isinstance(child, untouched) and child is not module and child not in ignored:
                overrides[id(child)] = overrides.get(id(child), {}) | full_precision
                exempt.add(type(child).__name__)
        if exempt:
            warnings.warn(messages.without_mixed_precision(exempt), stacklevel=4)
    parameters = inspect.signature(constructor).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    blocks = []
    for child in post_order(module):
        if id(child) not in overrides:
            continue
        unknown = sorted(name for name in overrides[id(child)] if name not in parameters and not takes_any)
        if unknown:
            raise messages.unknown_block_arguments(type(child).__name__, unknown)
        keywords = without_iterators({**root.keywords, **overrides[id(child)]})
        arguments = check_arguments(child, keywords)
        keywords["comm"] = make_comm(keywords["comm"])
        blocks.append(PlannedInstance(child, keywords, arguments))
    return blocks


def put_in_place(root: nn.Module, child: nn.Module, instance: nn.Module) -> None:
    """Replace `child` everywhere under `root` by `instance`, which wraps it."""
    for parent in list(root.modules()):
        for key, value in parent._modules.items():
            if value is child and parent is not instance:
                parent._modules[key] = instance


# One `FlatParameter` per instance.


def holders_of(units: Iterable[Unit]) -> dict[int, nn.Module]:
    """Unregister the units' `FlatParameter`s; returns id of a unit -> the module it was registered on."""
    holders = {}
    for unit in units:
        for bucket in unit.buckets:
            if isinstance(bucket.form, FlatParameterForm) and (holder := bucket.form.holder) is not None:
                holders[id(unit)] = holder
                bucket.form.unregister()
    return holders


def show_flat(unit: Unit, holder: nn.Module | None) -> None:
    """Show the unit's buckets as `FlatParameter`s on `holder`."""
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        if isinstance(bucket.form, FlatParameterForm) and holder is not None:
            bucket.form.register(bucket.members, bucket.shard, holder)
            gradients.delivery.views = [FlatView(bucket.form, len(bucket.members))]
    unit.drop_plans()


def check_uniform(drafts: Sequence[Found]) -> None:
    """Raise unless all parameters have the dtype and `requires_grad` of the first, as a `FlatParameter` needs.

    Raises:
        ConfigError: names the first parameter that differs.
    """
    for trait in ("dtype", "requires_grad"):
        values = [getattr(draft.parameter, trait) for draft in drafts]
        for draft, value in zip(drafts, values, strict=True):
            if value != values[0]:
                raise messages.not_uniform(trait, draft.name, values[0], drafts[0].name, value)


def flat_of(bucket: Bucket) -> nn.Parameter:
    """A bucket's `FlatParameter`; with `use_orig_params=True`, a new one over the same memory."""
    flat: nn.Parameter | None = bucket.flat_parameter
    if flat is not None:
        return flat
    trains = any(member.sharded.requires_grad for member in bucket.members)
    return FlatParameter(bucket.shard.detach(), bucket.layout, bucket.axes.shard.rank, trains)


# Initial values: modules on the host, and on meta.


def warn_of_host(module: nn.Module, arguments: ConstructorArguments) -> None:
    """Warn if the module is on the CPU although it will compute on an accelerator."""
    device = arguments.axes.device
    if device.type == "cpu":
        return
    for owner in own_modules(module):
        for parameter in owner._parameters.values():
            if parameter is None or id(parameter) in arguments.ignored or successor_of(parameter) is not parameter:
                continue  # the last is tied to a parameter of an instance below, which has it now
            if parameter.device.type == "cpu":
                warnings.warn(messages.copied_from_host(device), stacklevel=4)
                return


def check_initialisable(
    module: nn.Module,
    init: Callable[[nn.Module], None] | None,
    ignored: set[nn.Module],
    wrapped: Iterable[nn.Module] = (),
) -> None:
    """Check that `materialise` can initialise every module. Changes nothing.

    Args:
        module, init, ignored: as of `materialise`.
        wrapped: modules that will be wrapped in separate instances by then.

    Raises:
        ConfigError: a module on meta has no `reset_parameters` and there is no `init`, or `init` is not callable.
    """
    if init is not None and not callable(init):
        raise invalid_argument("param_init_fn", init, "a function of a module, or None")
    for owner in own_modules(module, wrapped) if init is None else ():
        if owner not in ignored and _on_meta(owner) and not callable(getattr(owner, "reset_parameters", None)):
            raise messages.no_reset_parameters(type(owner).__name__)


def materialise(
    module: nn.Module, init: Callable[[nn.Module], None] | None, device: torch.device, ignored: set[nn.Module]
) -> None:
    """Initialise every module on meta under `module`, by `init` or its own `reset_parameters`.

    Raises:
        ConfigError: a module is still on meta.
    """
    for owner in own_modules(module, ignored):
        if owner in ignored or not _on_meta(owner):
            continue
        if init is not None:
            init(owner)
        else:
            owner.to_empty(device=device, recurse=False)
            with torch.no_grad():
                owner.reset_parameters()  # type: ignore[operator]
        if _on_meta(owner):
            raise messages.left_on_meta(type(owner).__name__)


def _on_meta(owner: nn.Module) -> bool:
    tensors = [*owner._parameters.values(), *owner._buffers.values()]
    return any(tensor is not None and successor_of(tensor).is_meta for tensor in tensors)
