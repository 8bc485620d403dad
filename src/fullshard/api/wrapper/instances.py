"""Instances of the wrapper: planned, checked together before anything changes, then built in order."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm import make_comm
from ...forms import ATTRIBUTE, FlatParameter, FlatParameterForm, Ignored, LocalForm, successor_of
from ...names import clean_name, plain_class
from ...policies import Check, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Unused
from ...runtime import PrefetchSettings, UnitSettings, is_unit, left_alone, runners_in, unit_of
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
from ..gradients import check_reduction
from ..wrapping import plan_wrapping, post_order
from . import messages
from .settings import BackwardPrefetch, MixedPrecision, ShardingStrategy
from .setup import Arguments, check_arguments, check_initialisable

FULL_SHARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass(frozen=True)
class Plan:
    """A planned instance.

    Attributes:
        module: the module that it will wrap.
        keywords: the constructor's arguments, by name, without those of the root alone; `comm` is a `Comm`.
        arguments: those that are checked, with defaults filled in.
        when, unused: the arguments `check` and `unused`.
    """

    module: nn.Module
    keywords: Mapping[str, Any]
    arguments: Arguments
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
            policy_of(arguments, self.module),
            "flat",
            form=FlatParameterForm if self.flat else LocalForm,
            home=home_of(offload, arguments.axes.device),
            keeps_compute_dtype=arguments.mixed_precision.keep_low_precision_grads,
            reduces_as_computed=True,
        )

    def unit_settings(self, policy: MixedPrecisionPolicy, prefetch: int) -> UnitSettings:
        """The settings with which its unit runs.

        Args:
            policy: dtypes of gathers, reductions and outputs.
            prefetch: how many units are gathered ahead in forward.
        """
        arguments = self.arguments
        backward = 0 if arguments.backward_prefetch is None else 1
        late = arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        return UnitSettings(
            self.keywords["comm"],
            policy,
            arguments.axes,
            None if arguments.strategy in FULL_SHARD else False,  # None: the root stays gathered for its backward
            reduce=ReduceSettings(reduction=self.keywords["reduction"]),
            prefetch=PrefetchSettings(prefetch, backward, late),
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

    def build(self, settings: BuildSettings) -> Unit:
        """Shard the parameters that no instance below has."""
        ignored = self.ignored()
        drafts = find_parameters([self.module], unit_of, ignored)
        self.check(drafts)
        shared = find_shared([self.module], unit_of, ignored)
        previous_owners = {id(draft.owner): draft.owner for draft in drafts if draft.owner is not None}
        holders = holders_of(previous_owners.values())
        unit = build_unit(drafts, settings)
        show_shared(shared)
        if self.flat:
            show_flat(unit, self.module)
            for owner in previous_owners.values():
                show_flat(owner, holders.get(id(owner)))
        return unit


def check_plans(plans: Sequence[Plan]) -> None:
    """Check all planned instances, so that an invalid one raises before any is built. Changes nothing.

    Raises:
        ConfigError, LayoutError: see `Plan.check`; a module on meta that nothing can initialise.
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


def plan_blocks(root: Plan, policy: Any, constructor: Callable[..., Any]) -> list[Plan]:
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
        full_precision = {"mixed_precision": _FullPrecision(output_dtype=mixed.param_dtype)}
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
        blocks.append(Plan(child, keywords, arguments))
    return blocks


def put_in_place(root: nn.Module, child: nn.Module, instance: nn.Module) -> None:
    """Replace `child` everywhere under `root` by `instance`, which wraps it."""
    for parent in list(root.modules()):
        for key, value in parent._modules.items():
            if value is child and parent is not instance:
                parent._modules[key] = instance


# Mixed precision.


@dataclass
class _FullPrecision(MixedPrecision):
    """The setting of modules exempt from mixed precision: inputs are cast up, outputs are cast back."""

    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = False
    output_dtype: torch.dtype | None = None


def mixed_precision_of(arguments: Arguments) -> MixedPrecision:
    """The mixed precision that users see: none for an exempt module."""
    mixed = arguments.mixed_precision
    return MixedPrecision() if isinstance(mixed, _FullPrecision) else mixed


def policy_of(arguments: Arguments, module: nn.Module, root: bool = False) -> MixedPrecisionPolicy:
    """The engine's policy for an instance around `module`.

    `cast_root_forward_inputs` decides for the root, `cast_forward_inputs` for others.
    """
    mixed = arguments.mixed_precision
    if isinstance(mixed, _FullPrecision):
        dtype = next((p.dtype for p in map(successor_of, module.parameters()) if p.is_floating_point()), torch.float32)
        return MixedPrecisionPolicy(dtype, None, mixed.output_dtype, True)
    cast = mixed.cast_root_forward_inputs if root else mixed.cast_forward_inputs
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, None, cast)


# One `FlatParameter` per instance.


def holders_of(units: Iterable[Unit]) -> dict[int, nn.Module]:
    """Unregister the units' `FlatParameter`s; returns id of a unit -> the module it was registered on."""
    holders = {}
    for unit in units:
        for bucket in unit.buckets:
            if isinstance(bucket.form, FlatParameterForm) and (holder := bucket.form.holder) is not None:
                holders[id(unit)] = holder
                holder._parameters.pop(ATTRIBUTE, None)
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
