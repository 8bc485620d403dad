"""`torch.distributed.checkpoint.state_dict`'s functions, for every model that Fullshard shards.

PyTorch's own know its own wrapper only: of ours they would return this rank's memory under the wrapped names. These
have the same names, arguments and results. For models of `fully_shard` with the rows layout, and for models that are
not sharded, they call PyTorch's; flat layouts and the wrapper are served here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from .api.wrapper import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    from_rank0,
)
from .errors import CheckpointError, ConfigError
from .mesh import MeshAxes, resolve_mesh
from .names import clean_name, clean_path
from .shard import FlatShard, RowShard

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state by the unwrapped model's names; sharded values, or whole ones. Collective.

    Args:
        model: sharded by either front-end, or not.
        submodules: return only what belongs to these.
        options: `full_state_dict` gives whole tensors; together with `cpu_offload`, on rank 0 only.
            `ignore_frozen_params` leaves frozen parameters out; `keep_submodule_prefixes=False` names those of
            `submodules` from there.

    Raises:
        CheckpointError: `model` is in the middle of a step.
    """
    options = options or StateDictOptions()
    _check(model, options)
    if _wrapped(model):
        with _types(model, options):
            state = dict(model.state_dict())
    elif _flat(model):
        plain = replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        state = _finished(dcp.get_model_state_dict(model, options=_unfiltered(plain)), options)
    else:
        state = dcp.get_model_state_dict(model, options=_unfiltered(options))
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        state = {name: value for name, value in state.items() if name not in frozen}
    return _of_submodules(model, state, submodules, options)


def _unfiltered(options: StateDictOptions) -> StateDictOptions:
    """`options` without filters: PyTorch's raise on some combinations of them, so they are applied here."""
    return replace(options, ignore_frozen_params=False, keep_submodule_prefixes=True)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The optimizers' state by parameter name; sharded values, or whole ones. Collective.

    An optimizer that has not stepped yet gets its first state, of zeros, so that a checkpoint can be loaded into the
    result.

    Args:
        model, submodules, options: as for `get_model_state_dict`. `flatten_optimizer_state_dict` gives one flat
            dictionary, `state.NAME.KEY` and `param_groups.NAME.KEY`.
        optimizers: one, or several of different parameters of `model`.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
    """
    options = options or StateDictOptions()
    _check(model, options)
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    if _wrapped(model):
        merged: dict[str, Any] = {"state": {}, "param_groups": []}
        with _types(model, options):
            for optimizer in given:
                _initialise(optimizer)
                one = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                if not one:  # another rank's
                    return {}
                merged["state"] |= one["state"]
                merged["param_groups"] += one["param_groups"]
        merged["state"] = _of_submodules(model, merged["state"], submodules, options)
        kept = set(merged["state"]) if submodules else None
        if kept is not None:
            for group in merged["param_groups"]:
                group["params"] = [name for name in group["params"] if name in kept]
        return _flattened(merged) if options.flatten_optimizer_state_dict else merged
    if _flat(model):
        plain = replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        state = dcp.get_optimizer_state_dict(model, given, submodules=submodules, options=plain)
        return _finished(state, options)
    return dcp.get_optimizer_state_dict(model, given, submodules=submodules, options=options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`get_model_state_dict` and `get_optimizer_state_dict` together."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, given, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load what `get_model_state_dict` gave, on any number of ranks. Collective.

    Args:
        model: sharded by either front-end, or not.
        model_state_dict: sharded or whole values.
        options: `strict` as of `load_state_dict`; `broadcast_from_rank0` (with `full_state_dict`): only rank 0's is
            used, and sent to the others tensor by tensor.

    Returns:
        Missing and unexpected keys, as `load_state_dict`.

    Raises:
        CheckpointError: shapes that do not fit; nothing was loaded then.
        ConfigError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    _check(model, options)
    if not (_wrapped(model) or any(isinstance(p, (FlatShard, RowShard)) for p in model.parameters())):
        return dcp.set_model_state_dict(model, model_state_dict, options=options)
    if options.broadcast_from_rank0:
        sent = from_rank0({"state": {"": dict(model_state_dict)}, "param_groups": []}, _axes(model))
        model_state_dict = sent["state"][""]
    return model.load_state_dict(model_state_dict, strict=options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load what `get_optimizer_state_dict` gave, on any number of ranks, wrapping and layout. Collective.

    Args:
        model, optimizers: as for `get_optimizer_state_dict`.
        optim_state_dict: sharded or whole values; flat if `flatten_optimizer_state_dict` says so.
        options: as for `set_model_state_dict`.

    Raises:
        CheckpointError: shapes or scalars that do not fit; nothing was loaded then.
        ConfigError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    _check(model, options)
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    if options.flatten_optimizer_state_dict and "state" not in optim_state_dict and optim_state_dict:
        optim_state_dict = _unflattened(optim_state_dict)
        options = replace(options, flatten_optimizer_state_dict=False)  # PyTorch's raises on whole flat ones
    if not (_wrapped(model) or _flat(model)):
        dcp.set_optimizer_state_dict(model, given, optim_state_dict=optim_state_dict, options=options)
        return
    if options.broadcast_from_rank0:
        optim_state_dict = from_rank0(optim_state_dict, _axes(model))
    if _wrapped(model):
        with _types(model, replace(options, cpu_offload=False)):
            loaded = [FullyShardedDataParallel.optim_state_dict_to_load(model, one, optim_state_dict) for one in given]
        for optimizer, state in zip(given, loaded, strict=True):
            optimizer.load_state_dict(state)
        return
    parameters = dict(model.named_parameters())
    cut = {
        name: {key: _cut(parameters[name], value) for key, value in own.items()}
        for name, own in optim_state_dict["state"].items()
    }
    whole = {**optim_state_dict, "state": cut}
    plain = StateDictOptions(strict=options.strict)
    dcp.set_optimizer_state_dict(model, given, optim_state_dict=whole, options=plain)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict` together; returns what the first does."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, given, optim_state_dict, options=options)
    return keys


def _wrapped(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _flat(model: nn.Module) -> bool:
    return any(isinstance(parameter, FlatShard) for parameter in model.parameters())


def _check(model: nn.Module, options: StateDictOptions) -> None:
    if _wrapped(model) and options.dsd_fqn_modifiers != StateDictOptions().dsd_fqn_modifiers:
        raise ConfigError(
            "dsd_fqn_modifiers has no meaning for models that Fullshard shards: their names do not change"
        )
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ConfigError("full_state_dict must be True when broadcast_from_rank0 is True")


def _axes(model: nn.Module) -> MeshAxes:
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return module._arguments.axes
    return resolve_mesh(None)


@contextmanager
def _types(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """The wrapper's settings for these options."""
    cpu = options.cpu_offload
    kind = StateDictType.FULL_STATE_DICT if options.full_state_dict else StateDictType.SHARDED_STATE_DICT
    # DTensors also where PyTorch's would give ShardedTensors: of one that is empty on some rank (a dim smaller than the
    # world) torch.distributed.checkpoint loses the key on that rank, and cannot load what it saved.
    configs: tuple[Any, Any] = (ShardedStateDictConfig(cpu, True), ShardedOptimStateDictConfig(cpu, True))
    if options.full_state_dict:
        configs = (FullStateDictConfig(cpu, cpu), FullOptimStateDictConfig(cpu, cpu))
    with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
        yield


def _frozen(model: nn.Module) -> set[str]:
    """Names of parameters that do not require a gradient."""
    found = {clean_name(name) for name, p in model.named_parameters() if not p.requires_grad}
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            prefix = clean_name(f"{path}." if path else "")
            for member in module._runner().unit.members:
                if not member.sharded.requires_grad:
                    found.add(prefix + member.slot.name)
    return found


def _of_submodules(
    model: nn.Module, state: dict[str, Any], submodules: set[nn.Module] | None, options: StateDictOptions
) -> dict[str, Any]:
    """The entries under `submodules`, renamed if so asked."""
    if not submodules:
        return state
    wanted = {id(module) for module in submodules}
    found = {}
    for path, module in model.named_modules():
        if id(module) in wanted:
            prefix = f"{clean_path(path)}."
            for name, value in state.items():
                if name.startswith(prefix):
                    found[name if options.keep_submodule_prefixes else name[len(prefix) :]] = value
    return found


def _finished(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Values of flat layouts whole, or on the host, if so asked. The same collectives on every rank."""
    if not (options.full_state_dict or options.cpu_offload):
        return state

    def finish(value: Any) -> Any:
        if options.full_state_dict and hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and options.cpu_offload:
            value = value.cpu()
        return value.detach() if isinstance(value, torch.Tensor) else value

    result = _mapped(finish, state)
    if options.full_state_dict and options.cpu_offload and dist.get_rank() != 0:
        return {}
    return result


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(fn, item) for key, item in value.items()}
    return [_mapped(fn, item) for item in value] if isinstance(value, list) else fn(value)


def _cut(parameter: Any, value: Any) -> Any:
    """State of a parameter's shape in the form of the parameter."""
    if not isinstance(parameter, FlatShard) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, FlatShard) and value._run.same_as(parameter._run):
        return value
    whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
    if tuple(whole.shape) != tuple(parameter.shape):
        raise CheckpointError(
            "Optimizer state has another shape than its parameter.",
            parameter=parameter._run.name,
            expected=tuple(parameter.shape),
            got=tuple(whole.shape),
        )
    return FlatShard(parameter._run.cut(whole.detach()).clone(), parameter._run)


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has no state make its first, which changes no parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    try:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def _flattened(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, own in state["state"].items() for key, value in own.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _unflattened(flat: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `_flattened`; parameters of equal settings form a group."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for full, value in flat.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else settings).setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for name, own in settings.items():
        for group in groups:
            if {k: v for k, v in group.items() if k != "params"} == own:
                group["params"].append(name)
                break
        else:
            groups.append({**own, "params": [name]})
    return {"state": state, "param_groups": groups}
