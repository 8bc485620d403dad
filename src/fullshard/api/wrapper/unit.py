"""One instance's unit: built from what no instance below has taken, and run as the wrapper's settings say."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...comm import Comm
from ...names import clean_name
from ...policies import CPUOffloadPolicy, OffloadPolicy
from ...runtime import RUNNER_KEY, PrefetchSettings, Root, Runner, UnitSettings, find_root, move_buffers, unit_of
from ...shard import (
    Bucket,
    BuildSettings,
    FlatParameter,
    FlatParameterForm,
    LocalForm,
    build_unit,
    check_parameters,
    find_parameters,
    home_of,
)
from .model_state import instances_of
from .settings import BackwardPrefetch
from .setup import FULL_SHARD, check_uniform, holders_of, policy_of, show_flat


def make_unit(instance: Any, module: nn.Module, comm: Comm, prefetch: int) -> None:
    """Shard what no instance below has taken, and have a runner run it."""
    arguments = instance._arguments
    axes, strategy, mixed = arguments.axes, arguments.strategy, arguments.mixed_precision
    found = find_parameters([module], unit_of, arguments.ignored)
    for item in found:
        item.name = clean_name(item.name)
    check_parameters(found, axes, "flat", wrapper=True)
    flat = not instance.use_orig_params
    if flat:
        check_uniform(found)
    policy = policy_of(arguments, module)
    offload = CPUOffloadPolicy() if arguments.cpu_offload.offload_params else OffloadPolicy()
    settings = BuildSettings(
        axes,
        comm,
        policy,
        "flat",
        form=FlatParameterForm if flat else LocalForm,
        home=home_of(offload, axes.device),
        keeps_compute_dtype=mixed.keep_low_precision_grads,
    )
    changed = {id(item.owner): item.owner for item in found if item.owner is not None}
    holders = holders_of(changed.values())
    unit = build_unit(found, settings)
    if flat:
        show_flat(unit, module)
        for one in changed.values():
            show_flat(one, holders.get(id(one)))
    backward = 0 if arguments.backward_prefetch is None else 1
    late = arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    own = UnitSettings(
        comm,
        policy,
        strategy in FULL_SHARD,
        prefetch=PrefetchSettings(prefetch, backward, late),
        ignored=frozenset(arguments.ignored),
    )
    instance.__dict__[RUNNER_KEY] = Runner(unit, [instance], own, _find_root)
    move_buffers(module, axes.device)


def _find_root(top: Runner) -> Root:
    """As `fully_shard`'s, with what the wrapper's root does once."""
    root = find_root(top)
    for module in top.modules:
        for instance in instances_of(module):
            instance._buffers_cast.cast(instance)
        top.set(policy=policy_of(module._arguments, module.module, root=True))  # type: ignore[arg-type]
    return root


def flat_of(bucket: Bucket) -> nn.Parameter:
    """A bucket's `FlatParameter`; where users see the original parameters, one over the same memory."""
    flat: nn.Parameter | None = bucket.flat_parameter
    if flat is not None:
        return flat
    trains = any(member.sharded.requires_grad for member in bucket.members)
    return FlatParameter(bucket.shard.detach(), bucket.layout, bucket.axes.shard.rank, trains)
