"""What `FullyShardedDataParallel`'s constructor does before it shards: arguments, meta modules, broadcasts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm import Comm
from ...errors import ArgumentTypeError, ConfigError
from ...mesh import MeshAxes, axes_of_groups, resolve_mesh, unsharded_axes
from ...policies import MixedPrecisionPolicy
from ...runtime import is_unit
from ...shard import ATTRIBUTE, FlatParameterForm, FlatView, Unit, owner_of, successor_of
from ..wrapping import _post_order, plan_wrapping
from .settings import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, accept

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
FULL_SHARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass
class Arguments:
    """The constructor's arguments, checked and with defaults filled in.

    Attributes:
        axes: what is split and replicated over which ranks.
        strategy: after NO_SHARD took the place of others on one rank.
        mesh_given: whether a `device_mesh` was given: sharded state dicts are then DTensors.
        ignored: ids of parameters to leave alone.
        ignored_modules: and the modules whose parameters they are.
    """

    axes: MeshAxes
    strategy: ShardingStrategy
    mesh_given: bool
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    ignored: set[int]
    ignored_modules: set[nn.Module]


def check_arguments(
    module: Any,
    groups: Any,
    strategy: Any,
    cpu_offload: Any,
    backward_prefetch: Any,
    mixed_precision: Any,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
    device_id: Any,
    device_mesh: DeviceMesh | None,
) -> Arguments:
    """The arguments, checked.

    Raises:
        ConfigError: one of them, or two together, cannot work.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"FullyShardedDataParallel takes an nn.Module, got {type(module).__name__}")
    chosen = ShardingStrategy.FULL_SHARD
    if strategy is not None:
        chosen = accept(strategy, ShardingStrategy, "sharding_strategy")
    if device_mesh is not None and groups is not None:
        raise ConfigError("process_group and device_mesh say the same twice: give one of them")
    device = _device(device_id)
    hybrid = chosen in HYBRID
    if device_mesh is not None:
        axes = resolve_mesh(device_mesh)
        if hybrid != (axes.replicate is not None):
            raise ConfigError(
                f"{chosen.name} and the device_mesh do not fit together.",
                expected="a 2-D mesh (replicate, shard)" if hybrid else "a 1-D mesh",
                got=f"shape {tuple(device_mesh.shape)}",
                remedy="2-D meshes go with HYBRID_SHARD, 1-D meshes with the other strategies",
            )
    else:
        axes = axes_of_groups(groups, hybrid, device)
    if chosen is ShardingStrategy.NO_SHARD:
        axes = unsharded_axes(axes)
    elif axes.shard.size == 1 and not hybrid:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {chosen} since the world size is 1.", stacklevel=4
        )
        chosen, axes = ShardingStrategy.NO_SHARD, unsharded_axes(axes)
    prefetch = None
    if backward_prefetch is not None:
        prefetch = accept(backward_prefetch, BackwardPrefetch, "backward_prefetch")
    modules, ignored = _ignored(module, ignored_modules, ignored_states)
    return Arguments(
        axes,
        chosen,
        device_mesh is not None,
        CPUOffload() if cpu_offload is None else accept(cpu_offload, CPUOffload, "cpu_offload"),
        prefetch,
        MixedPrecision() if mixed_precision is None else accept(mixed_precision, MixedPrecision, "mixed_precision"),
        ignored,
        modules,
    )


def _device(device_id: Any) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise ConfigError(
                f"device_id={device_id} names an accelerator, and this machine has none.",
                remedy='leave device_id out, or give torch.device("cpu")',
            )
        return torch.device(accelerator.type, device_id)
    if not isinstance(device_id, torch.device):
        raise ConfigError(f"device_id must be an int or a torch.device, got {device_id!r}")
    return device_id


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[int]]:
    if modules is not None and states is not None:
        raise ConfigError("ignored_modules and ignored_states exclude each other: ignored_states takes modules too")
    states = modules if modules is not None else states or ()
    if not isinstance(states, Iterable):
        raise ArgumentTypeError(f"the ignored modules or states must be given as a list or set, got {states!r}")
    given = list(states)
    kinds = {isinstance(item, nn.Parameter) for item in given}
    wrong = [item for item in given if not isinstance(item, (nn.Module, nn.Parameter))]
    if wrong or len(kinds) > 1 or (modules is not None and True in kinds):
        what = "modules" if modules is not None else "parameters, or modules, not both"
        raise ConfigError(f"the ignored states must be {what}; got {[type(item).__name__ for item in given]}")
    chosen = {item for item in given if isinstance(item, nn.Module)}
    for item in chosen:
        if item is module:
            warnings.warn("the module given to FullyShardedDataParallel is itself among the ignored ones", stacklevel=5)
        if any(is_unit(child) for child in item.modules()):
            raise ConfigError("ignored modules must not hold FullyShardedDataParallel instances")
    ids = {id(parameter) for item in chosen for parameter in item.parameters()}
    ids |= {id(item) for item in given if isinstance(item, nn.Parameter)}
    return {child for item in chosen for child in item.modules()}, ids


# Wrapping of submodules.


def wrap_submodules(
    module: nn.Module, policy: Any, arguments: Arguments, make: Callable[[nn.Module, dict[str, Any]], nn.Module]
) -> None:
    """Put instances in the place of the submodules that `policy` chooses, innermost first.

    Args:
        make: from a module and the arguments that replace the root's, an instance.

    Raises:
        ConfigError: `module` is, or contains, an instance already.
    """
    for name, child in module.named_modules():
        if is_unit(child):
            raise ConfigError(
                "auto_wrap_policy was given for a model that is wrapped already, in whole or in part.",
                got=f"{name or 'the module itself'}, a {type(child).__name__}",
                remedy="wrap by the policy or by hand, not both",
            )
    planned = plan_wrapping(module, policy, arguments.ignored_modules)
    answers = {id(child): own for _, child, own in planned}
    mixed = arguments.mixed_precision
    casts = any(dtype is not None for dtype in (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype))
    if casts and mixed._module_classes_to_ignore:
        untouched, exempt = tuple(mixed._module_classes_to_ignore), set()
        for child in module.modules():
            if isinstance(child, untouched) and child is not module and child not in arguments.ignored_modules:
                answers[id(child)] = {**answers.get(id(child), {}), "mixed_precision": _full_precision(mixed)}
                exempt.add(type(child).__name__)
        if exempt:
            warnings.warn(
                f"Modules of type {', '.join(sorted(exempt))} become instances of their own, without mixed precision.",
                stacklevel=4,
            )
    order = [child for child in _post_order(module) if id(child) in answers]
    for child in order:
        wrapped = make(child, answers[id(child)])
        for parent in list(module.modules()):
            for key, value in parent._modules.items():
                if value is child and parent is not wrapped:
                    parent._modules[key] = wrapped


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


# Values: from the host, from meta, and from rank 0.


def warn_of_host(module: nn.Module, arguments: Arguments) -> None:
    """Warn if the module was made on the CPU though it is to compute elsewhere."""
    device = arguments.axes.device
    if device.type == "cpu":
        return
    for owner in own_modules(module):
        for parameter in owner._parameters.values():
            if parameter is not None and id(parameter) not in arguments.ignored and parameter.device.type == "cpu":
                warnings.warn(
                    f"The module given to FullyShardedDataParallel is on the CPU and its shards on {device}: its "
                    "values are copied there, which is slower than making them there. Give device_id to say where the "
                    "instance computes, and build the module on that device, or on meta.",
                    stacklevel=4,
                )
                return


def own_modules(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it that are not below another instance."""
    found, waiting, seen = [], [module], {id(module)}
    while waiting:
        owner = waiting.pop(0)
        found.append(owner)
        for child in owner.children():
            if not is_unit(child) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def materialise(
    module: nn.Module, init: Callable[[nn.Module], None] | None, device: torch.device, ignored: set[nn.Module]
) -> None:
    """Give every module on meta under `module` values: by `init`, or by its `reset_parameters`.

    Raises:
        ConfigError: a module has neither, or is on meta still.
    """
    if init is not None and not callable(init):
        raise ConfigError(f"param_init_fn must be callable, got {init!r}")
    for owner in own_modules(module):
        if owner in ignored or not _on_meta(owner):
            continue
        if init is not None:
            init(owner)
        else:
            reset = getattr(owner, "reset_parameters", None)
            if not callable(reset):
                raise ConfigError(
                    f"{type(owner).__name__} is on the meta device and has no reset_parameters().",
                    remedy="give param_init_fn=, or add reset_parameters() to the class",
                )
            owner.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        if _on_meta(owner):
            raise ConfigError(f"param_init_fn left {type(owner).__name__} on the meta device")


def _on_meta(owner: nn.Module) -> bool:
    tensors = [*owner._parameters.values(), *owner._buffers.values()]
    return any(tensor is not None and successor_of(tensor).is_meta for tensor in tensors)


def broadcast_states(module: nn.Module, axes: MeshAxes, comm: Comm, ignored: set[int]) -> None:
    """Make parameters and buffers of `module` (those not below other instances) rank 0's on all ranks."""
    for owner in own_modules(module):
        for tensor in [*owner._parameters.values(), *owner._buffers.values()]:
            if tensor is None or id(tensor) in ignored or owner_of(successor_of(tensor)) is not None:
                continue  # those of an instance below were made equal when it was wrapped
            if not tensor.numel():
                continue
            with torch.no_grad():
                sent = tensor.detach().to(axes.device).contiguous()
                for axis in (axes.shard, axes.replicate):
                    if axis is not None:
                        comm.broadcast(axis, sent, 0).wait()
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


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
            gradients.delivery.views = [FlatView(bucket)]
    unit.places_changed()


def check_uniform(found: list[Any]) -> None:
    """One `FlatParameter` has one dtype and one `requires_grad`.

    Raises:
        ConfigError: names the first parameter that differs.
    """
    for what, value in (("dtype", lambda p: p.dtype), ("requires_grad", lambda p: p.requires_grad)):
        first = found[0] if found else None
        for item in found:
            if first is not None and value(item.parameter) != value(first.parameter):
                raise ConfigError(
                    f"Must flatten tensors with uniform {what} when use_orig_params=False.",
                    parameter=item.name,
                    expected=f"{value(first.parameter)}, as {first.name}",
                    got=value(item.parameter),
                    remedy="set use_orig_params=True, or wrap these modules separately",
                )
