"""Instances of the wrapper: planned, checked all together before anything changes, then made one after the other."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm import Comm, make_comm
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
_CHECKED = tuple(inspect.signature(check_arguments).parameters)[1:]


@dataclass(frozen=True)
class Plan:
    """An instance to be.

    Attributes:
        module: what it wraps.
        arguments: the constructor's, checked.
        comm: collectives.
        flat: whether it shows one `FlatParameter`.
        init: `param_init_fn`.
        reduction: of its gradients.
        when: ranks compare what they run.
        unused: what becomes of units that only some ranks run.
    """

    module: nn.Module
    arguments: Arguments
    comm: Comm
    flat: bool
    init: Callable[[nn.Module], None] | None
    reduction: str
    when: Check = "first"
    unused: Unused = "error"

    def build_settings(self) -> BuildSettings:
        """How its unit is built."""
        arguments = self.arguments
        offload = CPUOffloadPolicy() if arguments.cpu_offload.offload_params else OffloadPolicy()
        return BuildSettings(
            arguments.axes,
            self.comm,
            policy_of(arguments, self.module),
            "flat",
            form=FlatParameterForm if self.flat else LocalForm,
            home=home_of(offload, arguments.axes.device),
            keeps_compute_dtype=arguments.mixed_precision.keep_low_precision_grads,
            reduces_as_computed=True,
        )

    def unit_settings(self, policy: MixedPrecisionPolicy, prefetch: int) -> UnitSettings:
        """How its unit runs.

        Args:
            prefetch: how many units are gathered ahead in forward.
        """
        arguments = self.arguments
        backward = 0 if arguments.backward_prefetch is None else 1
        late = arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        return UnitSettings(
            self.comm,
            policy,
            arguments.axes,
            arguments.strategy in FULL_SHARD,
            reduce=ReduceSettings(reduction=self.reduction),
            prefetch=PrefetchSettings(prefetch, backward, late),
            ignored=Ignored.under([self.module], self.ignored(), arguments.ignored_modules),
            check=self.when,
            unused=self.unused,
        )

    def ignored(self) -> set[int]:
        """Ids of the parameters to leave alone: those given, and those that units below were told to leave alone."""
        return self.arguments.ignored | left_alone(runners_in(self.module))

    def check(self, found: Sequence[Found]) -> None:
        """Refuse parameters that a unit cannot be made of. Changes nothing.

        Raises:
            ConfigError, LayoutError: names the parameter.
        """
        check_reduction(self.reduction, self.comm)
        for item in found:
            item.name = clean_name(item.name)
        check_parameters(found, self.arguments.axes, "flat", wrapper=True)
        if self.flat:
            check_uniform(found)

    def build(self, settings: BuildSettings) -> Unit:
        """Shard what no instance below has taken."""
        ignored = self.ignored()
        found = find_parameters([self.module], unit_of, ignored)
        self.check(found)
        shared = find_shared([self.module], unit_of, ignored)
        changed = {id(item.owner): item.owner for item in found if item.owner is not None}
        holders = holders_of(changed.values())
        unit = build_unit(found, settings)
        show_shared(shared)
        if self.flat:
            show_flat(unit, self.module)
            for one in changed.values():
                show_flat(one, holders.get(id(one)))
        return unit


def check_plans(plans: Sequence[Plan]) -> None:
    """Refuse whatever making these instances, one after the other, would refuse. Changes nothing.

    Raises:
        ConfigError, LayoutError: see `Plan.check`; a module on meta that nothing can initialise.
    """
    rehearsal = Rehearsal(unit_of)
    made: list[nn.Module] = []
    for plan in plans:
        found = rehearsal.add([plan.module], plan.ignored())
        plan.check(found)
        plan_unit(found, plan.build_settings())
        check_initialisable(plan.module, plan.init, plan.arguments.ignored_modules, made)
        made.append(plan.module)


# Instances in the place of submodules.


def plan_blocks(
    root: Plan, policy: Any, common: dict[str, Any], constructor: Callable[..., Any]
) -> list[tuple[Plan, dict[str, Any]]]:
    """The submodules of the root's module that become instances first, innermost first, and their arguments.

    Args:
        policy: `auto_wrap_policy`.
        common: the root's arguments, which a policy may replace for a block.
        constructor: that takes them.

    Raises:
        ConfigError: the module is, or contains, an instance already; arguments that cannot work.
    """
    module = root.module
    for name, child in module.named_modules():
        if is_unit(child):
            raise messages.wrapped_already(name, plain_class(child).__name__)
    ignored = root.arguments.ignored_modules
    planned = plan_wrapping(module, policy, ignored)
    answers = {id(child): own for _, child, own in planned}
    mixed = root.arguments.mixed_precision
    casts = any(dtype is not None for dtype in (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype))
    if casts and mixed._module_classes_to_ignore:
        untouched, exempt = tuple(mixed._module_classes_to_ignore), set()
        for child in module.modules():
            if isinstance(child, untouched) and child is not module and child not in ignored:
                answers[id(child)] = {**answers.get(id(child), {}), "mixed_precision": _full_precision(mixed)}
                exempt.add(type(child).__name__)
        if exempt:
            warnings.warn(messages.without_mixed_precision(exempt), stacklevel=4)
    known = inspect.signature(constructor).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    blocks = []
    for child in post_order(module):
        if id(child) not in answers:
            continue
        unknown = sorted(name for name in answers[id(child)] if name not in known and not takes_any)
        if unknown:
            raise messages.unknown_block_arguments(type(child).__name__, unknown)
        blocks.append(_block(child, {**common, **answers[id(child)]}))
    return blocks


def _block(child: nn.Module, keywords: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    arguments = check_arguments(child, **{name: keywords.get(name) for name in _CHECKED})
    flat = not keywords["use_orig_params"]
    comm = make_comm(keywords["comm"])
    return Plan(child, arguments, comm, flat, keywords["param_init_fn"], keywords["reduction"]), keywords


def put_in_place(root: nn.Module, child: nn.Module, instance: nn.Module) -> None:
    """Put `instance`, which wraps `child`, wherever `child` is under `root`."""
    for parent in list(root.modules()):
        for key, value in parent._modules.items():
            if value is child and parent is not instance:
                parent._modules[key] = instance


# Mixed precision.


class _FullPrecision(MixedPrecision):
    """Of modules that mixed precision must not touch: inputs cast up, outputs cast back."""

    output_dtype: torch.dtype | None = None


def mixed_precision_of(arguments: Arguments) -> MixedPrecision:
    """As users see it: an exempted module has none."""
    mixed = arguments.mixed_precision
    return MixedPrecision() if isinstance(mixed, _FullPrecision) else mixed


def _full_precision(mixed: MixedPrecision) -> MixedPrecision:
    made = _FullPrecision(cast_forward_inputs=True, cast_root_forward_inputs=False)
    object.__setattr__(made, "output_dtype", mixed.param_dtype)
    return made


def policy_of(arguments: Arguments, module: nn.Module, root: bool = False) -> MixedPrecisionPolicy:
    """The engine's policy for an instance around `module`.

    `cast_root_forward_inputs` decides for the root, `cast_forward_inputs` for others.
    """
    mixed = arguments.mixed_precision
    if isinstance(mixed, _FullPrecision):
        own = next((p.dtype for p in map(successor_of, module.parameters()) if p.is_floating_point()), torch.float32)
        return MixedPrecisionPolicy(own, None, mixed.output_dtype, True)
    cast = mixed.cast_root_forward_inputs if root else mixed.cast_forward_inputs
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, None, cast)


# One `FlatParameter` per instance.


def holders_of(units: Iterable[Unit]) -> dict[int, nn.Module]:
    """By id of a unit, the module that its `FlatParameter` is registered on."""
    found = {}
    for unit in units:
        for bucket in unit.buckets:
            if isinstance(bucket.form, FlatParameterForm) and (holder := bucket.form.holder) is not None:
                found[id(unit)] = holder
                holder._parameters.pop(ATTRIBUTE, None)
    return found


def show_flat(unit: Unit, holder: nn.Module | None) -> None:
    """Show the unit's buckets as `FlatParameter`s on `holder`."""
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        if isinstance(bucket.form, FlatParameterForm) and holder is not None:
            bucket.form.register(bucket.members, bucket.shard, holder)
            gradients.delivery.views = [FlatView(bucket.form, len(bucket.members))]
    unit.drop_plans()


def check_uniform(found: Sequence[Found]) -> None:
    """One `FlatParameter` has one dtype and one `requires_grad`.

    Raises:
        ConfigError: names the first parameter that differs.
    """
    for what, value in (("dtype", lambda p: p.dtype), ("requires_grad", lambda p: p.requires_grad)):
        first = found[0] if found else None
        for item in found:
            if first is not None and value(item.parameter) != value(first.parameter):
                raise messages.not_uniform(what, item.name, value(first.parameter), first.name, value(item.parameter))


def flat_of(bucket: Bucket) -> nn.Parameter:
    """A bucket's `FlatParameter`; where users see the original parameters, one over the same memory."""
    flat: nn.Parameter | None = bucket.flat_parameter
    if flat is not None:
        return flat
    trains = any(member.sharded.requires_grad for member in bucket.members)
    return FlatParameter(bucket.shard.detach(), bucket.layout, bucket.axes.shard.rank, trains)
