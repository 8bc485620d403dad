"""`torch.distributed.checkpoint.state_dict` for every model of Fullshard: the same names, signatures and options.

PyTorch's functions know its own wrapper by its class, and `DTensor`s. These know `FullyShardedDataParallel` of
Fullshard and its flat layouts too; models without either go to PyTorch's functions as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as _torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from .api.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from .api.fsdp import FullyShardedDataParallel
from .api.wrapper_names import clean_name
from .api.wrapper_optimizer import _from_rank0
from .checkpoint.optimizer import _blank_states
from .checkpoint.parts import whole_of
from .errors import ConfigError
from .shard import FlatShard

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def _is_wrapped(model: nn.Module) -> bool:
    return any(isinstance(child, FullyShardedDataParallel) for child in model.modules())


def _is_flat(model: nn.Module) -> bool:
    return any(isinstance(parameter, FlatShard) for parameter in model.parameters())


def _checked(options: StateDictOptions | None, wrapped: bool) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.dsd_fqn_modifiers != StateDictOptions().dsd_fqn_modifiers and wrapped:
        raise ConfigError(
            "dsd_fqn_modifiers is for models that PyTorch's functions name; wrapped modules have one name"
        )
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ConfigError("full_state_dict must be True when broadcast_from_rank0 is True")
    return options


@contextmanager
def _settings(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    offload = options.cpu_offload
    if options.full_state_dict:
        given: Any = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
        )
    else:
        given = (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=offload),
            ShardedOptimStateDictConfig(offload_to_cpu=offload),
        )
    with FullyShardedDataParallel.state_dict_type(model, *given):
        yield


def _wholly(values: Any, options: StateDictOptions) -> Any:
    """Flat shards (in nested dicts) whole, as the options want them. Collective."""
    if isinstance(values, dict):
        made = {key: _wholly(value, options) for key, value in values.items()}
        return {k: v for k, v in made.items() if v is not None or values[k] is None}
    if not isinstance(values, torch.Tensor):
        return values
    whole = whole_of(values, values.device)
    return whole.cpu() if options.cpu_offload else whole.clone()


def _flat_result(result: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    made: dict[str, Any] = _wholly(result, options)
    return {} if options.cpu_offload and dist.get_rank() else made


def _frozen(model: nn.Module) -> set[str]:
    names = {clean_name(name) for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for instance in FullyShardedDataParallel.fsdp_modules(model):
        if instance._flat_param is not None and not instance._flat_param.requires_grad:
            at = next(clean_name(f"{path}.") for path, child in model.named_modules() if child is instance)
            prefix = "" if instance is model else at
            names |= {prefix + name for name in instance._flat_param._fqns}
    return names


def _prefixes(model: nn.Module, submodules: set[nn.Module]) -> list[str]:
    return [clean_name(f"{path}.") for path, child in model.named_modules() if child in submodules]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state under the unwrapped model's names. Collective.

    Args:
        model: with Fullshard's wrapper, sharded by `fully_shard`, or any other.
        submodules: only the values of these modules.
        options: `full_state_dict`: whole values (with `cpu_offload` on rank 0 only); else sharded ones.
            `ignore_frozen_params`, `keep_submodule_prefixes`: as in PyTorch.
    """
    options = _checked(options, _is_wrapped(model))
    if not _is_wrapped(model):
        if not (options.full_state_dict and _is_flat(model)):
            return _torch.get_model_state_dict(model, submodules=submodules, options=options)
        sharded = replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        return _flat_result(_torch.get_model_state_dict(model, submodules=submodules, options=sharded), options)
    with _settings(model, options):
        state = {clean_name(key): value for key, value in model.state_dict().items()}
    if options.full_state_dict and options.cpu_offload and FullyShardedDataParallel.fsdp_modules(model)[0].rank:
        return {}
    if options.ignore_frozen_params:
        dropped = _frozen(model)
        state = {key: value for key, value in state.items() if key not in dropped}
    if submodules:
        below = _prefixes(model, submodules)
        keep = options.keep_submodule_prefixes
        state = {k if keep else k[len(p) :]: v for p in below for k, v in state.items() if k.startswith(p)}
    return state


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load what `get_model_state_dict` gave, or any whole or sharded values under the same names. Collective.

    Args:
        model: as for `get_model_state_dict`.
        model_state_dict: with `broadcast_from_rank0`, that of rank 0 counts.
        options: `strict`, `broadcast_from_rank0`: as in PyTorch.

    Returns:
        The missing and the unexpected keys.

    Raises:
        CheckpointError: a shape that does not fit; nothing was loaded then.
    """
    options = _checked(options, _is_wrapped(model))
    if not _is_wrapped(model):
        return _torch.set_model_state_dict(model, model_state_dict, options=options)
    state: dict[str, Any] = dict(model_state_dict)
    if options.broadcast_from_rank0:
        axes = FullyShardedDataParallel.fsdp_modules(model)[0]._arguments.axes
        sent = _from_rank0({"state": {"": state}, "param_groups": []} if state else None, axes)
        state = sent["state"][""]
    return model.load_state_dict(state, strict=options.strict)


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped the state that its first step would, zeroed: what can be loaded into."""
    if optimizer.state:
        return
    tensors = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    blank = _blank_states(optimizer, tensors)
    for tensor in tensors:
        if blank[id(tensor)]:
            optimizer.state[tensor] = blank[id(tensor)]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The optimizers' state by the unwrapped model's parameter names. Collective.

    Args:
        model, submodules, options: as for `get_model_state_dict`; with `flatten_optimizer_state_dict` the result has
            one level of keys, "state.<name>.<key>" and "param_groups.<name>.<key>".
        optimizers: of the model's parameters; one that has not stepped is given blank state.
    """
    options, listed = _checked(options, _is_wrapped(model)), _listed(optimizers)
    if not _is_wrapped(model):
        if not (options.full_state_dict and _is_flat(model)):
            return _torch.get_optimizer_state_dict(model, listed, submodules=submodules, options=options)
        sharded = replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        made = _torch.get_optimizer_state_dict(model, listed, submodules=submodules, options=sharded)
        return _flat_result(made, options)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    below = _prefixes(model, submodules) if submodules else None
    with _settings(model, options):
        for optimizer in listed:
            _start(optimizer)
            one = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if not one:
                return {}
            merged["state"] |= one["state"]
            merged["param_groups"] += one["param_groups"]
    if below is not None:
        merged["state"] = {n: s for n, s in merged["state"].items() if n.startswith(tuple(below))}
        for group in merged["param_groups"]:
            group["params"] = [n for n in group["params"] if n.startswith(tuple(below))]
    return _flatten(merged) if options.flatten_optimizer_state_dict else merged


def _flatten(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, own in state["state"].items() for key, value in own.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _unflatten(flat: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The nested form of `flat`, with the groups and names of `like`."""
    state: dict[str, Any] = {}
    groups = []
    for group in like["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for name in group["params"]:
            own = {k[len(f"state.{name}.") :]: v for k, v in flat.items() if k.startswith(f"state.{name}.")}
            own = {key: value for key, value in own.items() if "." not in key}
            if own:
                state[name] = own
            settings |= {k: flat[f"param_groups.{name}.{k}"] for k in settings if f"param_groups.{name}.{k}" in flat}
        groups.append({**settings, "params": group["params"]})
    return {"state": state, "param_groups": groups}


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load what `get_optimizer_state_dict` gave (flattened or not), or other state by the same names. Collective.

    Args:
        model, optimizers: as for `get_optimizer_state_dict`.
        optim_state_dict: with `broadcast_from_rank0`, that of rank 0 counts.
        options: as for `set_model_state_dict`.

    Raises:
        CheckpointError: a shape or scalar that does not fit.
    """
    options, listed = _checked(options, _is_wrapped(model)), _listed(optimizers)
    if not _is_wrapped(model):
        _torch.set_optimizer_state_dict(model, listed, optim_state_dict, options=options)
        return
    state: Any = optim_state_dict
    if options.broadcast_from_rank0:
        axes = FullyShardedDataParallel.fsdp_modules(model)[0]._arguments.axes
        if state and "state" not in state:
            state = {"state": {"": state}, "param_groups": []}
        state = _from_rank0(state, axes)
        state = state["state"].get("", state)
    with _settings(model, replace(options, full_state_dict=False, broadcast_from_rank0=False)):
        for optimizer in listed:
            own = state
            if "state" not in state:
                own = _unflatten(state, FullyShardedDataParallel.optim_state_dict(model, optimizer))
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, own, load_directly=True)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`get_model_state_dict` and `get_optimizer_state_dict`. Collective."""
    listed = _listed(optimizers)
    made = get_model_state_dict(model, submodules=submodules, options=options)
    if not listed:
        return made, {}
    return made, get_optimizer_state_dict(model, listed, submodules=submodules, options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict`; returns the former's keys. Collective."""
    keys = set_model_state_dict(model, model_state_dict, options=options)
    listed = _listed(optimizers)
    if listed:
        set_optimizer_state_dict(model, listed, optim_state_dict, options=options)
    return keys
