"""What `FullyShardedDataParallel`'s constructor does before it shards: arguments, meta modules, broadcasts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentTypeError, ConfigError, message
from ...forms import successor_of
from ...mesh import MeshAxes, axes_of_groups, refuse_misread, resolve_mesh, unsharded_axes
from ...runtime import is_unit, own_modules
from .settings import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, accept

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class Arguments:
    """The constructor's arguments, checked and with defaults filled in.

    Attributes:
        axes: what is split and replicated over which ranks.
        strategy: after NO_SHARD took the place of others on one rank.
        mesh_given: whether a `device_mesh` was given: sharded state dicts are then DTensors.
        ignored: ids of parameters to leave alone.
        ignored_modules: and the modules whose parameters they are.
        notes: what to warn of.
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


def check_arguments(
    module: Any,
    process_group: Any,
    sharding_strategy: Any,
    cpu_offload: Any,
    backward_prefetch: Any,
    mixed_precision: Any,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[Any] | None,
    device_id: Any,
    device_mesh: DeviceMesh | None,
) -> Arguments:
    """The constructor's arguments, checked. Changes nothing.

    Raises:
        ConfigError: one of them, or two together, cannot work.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"FullyShardedDataParallel takes an nn.Module, got {type(module).__name__}", code="C055")
    chosen, notes = ShardingStrategy.FULL_SHARD, list[str]()
    if sharding_strategy is not None:
        chosen = accept(sharding_strategy, ShardingStrategy, "sharding_strategy")
    if device_mesh is not None and process_group is not None:
        raise ConfigError("process_group and device_mesh say the same twice: give one of them", code="C056")
    device = _device(device_id)
    hybrid = chosen in HYBRID
    if device_mesh is not None:
        refuse_misread(device_mesh)
        axes = resolve_mesh(device_mesh, device)
        if hybrid != (axes.replicate is not None):
            raise ConfigError(
                f"{chosen.name} and the device_mesh do not fit together.",
                expected="a 2-D mesh (replicate, shard)" if hybrid else "a 1-D mesh",
                got=f"shape {tuple(device_mesh.shape)}",
                remedy="2-D meshes go with HYBRID_SHARD, 1-D meshes with the other strategies",
                code="C057",
            )
    else:
        axes = axes_of_groups(process_group, hybrid, device)
    if chosen is ShardingStrategy.NO_SHARD:
        axes = unsharded_axes(axes)
    elif axes.shard.size == 1 and not hybrid:
        notes.append(
            message(f"FSDP is switching to use `NO_SHARD` instead of {chosen} since the world size is 1.", code="W005")
        )
        chosen, axes = ShardingStrategy.NO_SHARD, unsharded_axes(axes)
    prefetch = None
    if backward_prefetch is not None:
        prefetch = accept(backward_prefetch, BackwardPrefetch, "backward_prefetch")
    modules, ignored = _ignored(ignored_modules, ignored_states)
    if module in modules:
        notes.append(
            message("the module given to FullyShardedDataParallel is itself among the ignored ones", code="W006")
        )
    return Arguments(
        axes,
        chosen,
        device_mesh is not None,
        CPUOffload() if cpu_offload is None else accept(cpu_offload, CPUOffload, "cpu_offload"),
        prefetch,
        MixedPrecision() if mixed_precision is None else accept(mixed_precision, MixedPrecision, "mixed_precision"),
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
            raise ConfigError(
                f"device_id={device_id} names an accelerator, and this machine has none.",
                remedy='leave device_id out, or give torch.device("cpu")',
                code="C058",
            )
        return torch.device(accelerator.type, device_id)
    if isinstance(device_id, str):
        with suppress(RuntimeError):  # what torch raises for names that are none
            return torch.device(device_id)
    raise ConfigError(
        "device_id names no device.",
        expected="an index of an accelerator, a torch.device, or its name",
        got=repr(device_id),
        code="C059",
    )


def _ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> tuple[set[nn.Module], set[int]]:
    if modules is not None and states is not None:
        raise ConfigError(
            "ignored_modules and ignored_states exclude each other: ignored_states takes modules too", code="C060"
        )
    states = modules if modules is not None else states or ()
    if not isinstance(states, Iterable):
        raise ArgumentTypeError(
            f"the ignored modules or states must be given as a list or set, got {states!r}", code="C061"
        )
    given = list(states)
    kinds = {isinstance(item, nn.Parameter) for item in given}
    wrong = [item for item in given if not isinstance(item, (nn.Module, nn.Parameter))]
    if wrong or len(kinds) > 1 or (modules is not None and True in kinds):
        what = "modules" if modules is not None else "parameters, or modules, not both"
        raise ConfigError(
            f"the ignored states must be {what}; got {[type(item).__name__ for item in given]}", code="C062"
        )
    chosen = {item for item in given if isinstance(item, nn.Module)}
    for item in chosen:
        if is_unit(item):
            raise ConfigError(
                "ignored modules must not be FullyShardedDataParallel instances",
                got=f"a {type(item).__name__} that is sharded already",
                remedy="ignore a module or shard it: leave the instance out of ignored_modules, or do not wrap it",
                code="C063",
            )
    alone = {child for item in chosen for child in own_modules(item)}  # instances below them go on
    ids = {id(parameter) for child in alone for parameter in child.parameters(recurse=False)}
    ids |= {id(item) for item in given if isinstance(item, nn.Parameter)}
    return alone, ids


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
                    message(
                        f"The module given to FullyShardedDataParallel is on the CPU and its shards on {device}: its "
                        "values are copied there, which is slower than making them there. Give device_id to say where "
                        "the instance computes, and build the module on that device, or on meta.",
                        code="W007",
                    ),
                    stacklevel=4,
                )
                return


def check_initialisable(
    module: nn.Module,
    init: Callable[[nn.Module], None] | None,
    ignored: set[nn.Module],
    apart: Iterable[nn.Module] = (),
) -> None:
    """Make sure that `materialise` has a way for every module. Changes nothing.

    Args:
        apart: modules that are instances' of their own by then.

    Raises:
        ConfigError: a module on meta has neither, or `init` is no function.
    """
    if init is not None and not callable(init):
        raise ConfigError(f"param_init_fn must be callable, got {init!r}", code="C064")
    for owner in own_modules(module, apart) if init is None else ():
        if owner not in ignored and _on_meta(owner) and not callable(getattr(owner, "reset_parameters", None)):
            raise ConfigError(
                f"{type(owner).__name__} is on the meta device and has no reset_parameters().",
                remedy="give param_init_fn=, or add reset_parameters() to the class",
                code="C065",
            )


def materialise(
    module: nn.Module, init: Callable[[nn.Module], None] | None, device: torch.device, ignored: set[nn.Module]
) -> None:
    """Give every module on meta under `module` values: by `init`, or by its `reset_parameters`.

    Raises:
        ConfigError: a module is on meta still.
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
            raise ConfigError(f"param_init_fn left {type(owner).__name__} on the meta device", code="C066")


def _on_meta(owner: nn.Module) -> bool:
    tensors = [*owner._parameters.values(), *owner._buffers.values()]
    return any(tensor is not None and successor_of(tensor).is_meta for tensor in tensors)
