"""The steps of `FullyShardedDataParallel`'s constructor before sharding: check arguments, initialise meta modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import invalid_argument
from ...forms import successor_of
from ...mesh import MeshAxes, axes_of_groups, refuse_misread, resolve_mesh, unsharded_axes
from ...runtime import is_unit, own_modules
from . import messages
from .settings import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, accept

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class Arguments:
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


def check_arguments(module: Any, keywords: Mapping[str, Any]) -> Arguments:
    """Check the constructor's arguments and fill in defaults. Changes nothing.

    Args:
        module: the module.
        keywords: the other arguments, by name.

    Raises:
        ConfigError: invalid or conflicting arguments.
    """
    if not isinstance(module, nn.Module):
        raise messages.not_a_module(type(module).__name__)
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
    return Arguments(
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
    states = modules if modules is not None else states or ()
    if not isinstance(states, Iterable):
        raise messages.ignored_not_iterable(states)
    items = list(states)
    kinds = {isinstance(item, nn.Parameter) for item in items}
    invalid = [item for item in items if not isinstance(item, (nn.Module, nn.Parameter))]
    if invalid or len(kinds) > 1 or (modules is not None and True in kinds):
        expected = "modules" if modules is not None else "parameters, or modules, not both"
        raise messages.ignored_of_wrong_type(expected, [type(item).__name__ for item in items])
    chosen = {item for item in items if isinstance(item, nn.Module)}
    for item in chosen:
        if is_unit(item):
            raise messages.ignored_instance(type(item).__name__)
    ignored = {child for item in chosen for child in own_modules(item)}  # instances below them stay sharded
    ids = {id(parameter) for child in ignored for parameter in child.parameters(recurse=False)}
    ids |= {id(item) for item in items if isinstance(item, nn.Parameter)}
    return ignored, ids


# Initial values: modules on the host, and on meta.


def warn_of_host(module: nn.Module, arguments: Arguments) -> None:
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
