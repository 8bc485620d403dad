"""The functions users call: ours for optimizer state, and those of `torch.distributed.checkpoint.state_dict`.

PyTorch's functions only support its own wrapper: for ours they would return this rank's memory under wrapped names. The
functions here have the same names, arguments and results, and support every model that Fullshard shards. For other
models they call PyTorch's, imported here by reference because programs may replace them with ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torch_get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict as torch_set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torch_set_optimizer_state_dict

from ..errors import ArgumentTypeError, CheckpointError, ConfigError, check_module, invalid_argument
from ..optimizers import as_list, groups_of, parameters_of
from ..runtime import take_over_replaced
from ..text import clean_path
from . import optimizer_state, value_forms
from .fit import check_shape
from .group_settings import converted, settings_to_load
from .model import cut_whole_values, in_form, materialize
from .table import Table, has_full_tensor, settle
from .targets import Target, named_groups, settle_state, targets_of
from .value_forms import StateForm
from .whole import Wanted, saved_values

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, keyed by parameter name, as sharded tensors that `torch.distributed.checkpoint` saves.

    Args:
        model: the sharded model.
        optimizer: it updates parameters of the model, `optimizer_view`s, or both. For one that has not stepped yet the
            result is zeros of the right shapes, into which a checkpoint can be loaded; the optimizer is not changed.

    Returns:
        `{"state": {parameter: {key: tensor}}, "groups": {parameter: {setting: tensor}}}`. State of a parameter's shape
        is sharded as the parameter; scalars are plain tensors; numeric settings of its group are float64 tensors.

    Raises:
        CheckpointError: state of a view that is neither a scalar nor one value per element, a value that is no number,
            or a tensor that does not belong to the model.
    """
    table = _table_of_fully_shard(model)
    targets = targets_of(table, groups_of(optimizer))
    saved = optimizer_state.sharded_state(table, targets, optimizer)
    states = {row.name: saved.get(row.name, {}) for target in targets for row in target.rows}
    for name, state in states.items():
        state |= {key: _as_tensor(name, key, v) for key, v in state.items() if not isinstance(v, torch.Tensor)}
    settings: dict[str, dict[str, torch.Tensor]] = {}
    for group in named_groups(targets, optimizer.param_groups):
        numbers = {
            key: torch.as_tensor(v, dtype=torch.float64, device="cpu") for key, v in group.items() if _numeric(v)
        }
        settings |= {name: {key: number.clone() for key, number in numbers.items()} for name in group["params"]}
    return {"state": states, "groups": settings}


def _as_tensor(parameter: str, key: str, value: Any) -> torch.Tensor:
    """A number, or a list of numbers, as a tensor.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"optimizer_state_dict cannot return optimizer state {key!r} as a tensor.",
            parameter=parameter,
            expected="tensors, numbers, or lists of numbers",
            got=f"{value!r:.80}, a {type(value).__name__}",
            remedy="save it by fullshard.save(folder, model, optimizer), or return it from get_optimizer_state_dict",
            topic="optimizer-state",
        ) from error


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Make `state`, in the form of `optimizer_state_dict`, the optimizer's state.

    Everything is checked before anything changes.

    Args:
        model, optimizer: as for `optimizer_state_dict`; the number of ranks and the use of views may have changed.
        state: state of the same model; typically filled in place by `torch.distributed.checkpoint.load`. It has tensors
            in place of Python's numbers, which become numbers again where the optimizer has numbers now.

    Raises:
        CheckpointError: a parameter is missing; a tensor has a different shape than the optimizer's own state, which
            has the parameter's; the parameters of one view have different scalars (such as step counts), and it can
            have only one; or `state` has a different form.
    """
    error = optimizer_state.form_error(state)
    if isinstance(state, Mapping) and ("state" not in state or "param_groups" in state):
        remedy = "use set_optimizer_state_dict for what get_optimizer_state_dict returned"
        error = optimizer_state.wrong_form(state, "a dict of 'state' and 'groups', as of optimizer_state_dict", remedy)
    if error is not None:
        raise error
    table = _table_of_fully_shard(model)
    targets = targets_of(table, groups_of(optimizer))
    loaded = optimizer_state.cut_states(table, targets, state["state"], needs_all=True, optimizer=optimizer)
    groups = [
        {**{key: value.tolist() for key, value in settings.items()}, "params": [name]}
        for name, settings in state.get("groups", {}).items()
    ]
    settings_by_group = settings_to_load(targets, optimizer.param_groups, groups)
    settle_state(optimizer)
    states = [(t, _as_before(t, optimizer.state.get(t.tensor, {}), loaded.get(t.index, {}))) for t in targets]
    numbers = [
        {key: value for key, value in settings.items() if _numeric(group.get(key))}
        for group, settings in zip(optimizer.param_groups, settings_by_group, strict=True)
    ]
    optimizer_state.assign_state(optimizer, states, numbers)


def _as_before(target: Target, previous: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Convert tensors of the state back to Python numbers where it had Python numbers before.

    Raises:
        CheckpointError: a tensor had the parameter's shape before, and has a different one now.
    """
    for key, value in loaded.items():
        shape = getattr(previous.get(key), "shape", None)
        if shape == target.tensor.shape and isinstance(value, torch.Tensor):
            check_shape(f"{target.rows[0].name}.{key}", shape, value.shape)
    numbers = {key for key, value in previous.items() if isinstance(value, (bool, int, float))}
    return {
        key: converted(previous[key], value) if key in numbers and not value_forms.is_array(value) else value
        for key, value in loaded.items()
    }


def _table_of_fully_shard(model: nn.Module) -> Table:
    check_module("This function", model)
    take_over_replaced(model)
    table = Table(model, lambda name: name)
    if table.wrapped is not None:
        raise CheckpointError(
            "The model is wrapped by FullyShardedDataParallel, whose parameters do not show how they are sharded.",
            parameter=table.wrapped.name,
            remedy="use FullyShardedDataParallel.optim_state_dict(model, optimizer), and optim_state_dict_to_load",
            topic="optimizer-state",
        )
    return table


def _numeric(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(_numeric(v) for v in value)
    return isinstance(value, (int, float, bool)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state by the unwrapped model's names, with sharded or whole values. Collective.

    Args:
        model: sharded by either front-end, or not sharded.
        submodules: return only the state of these.
        options: `full_state_dict` gives whole tensors, with `cpu_offload` on rank 0 only. `ignore_frozen_params` omits
            frozen parameters. `keep_submodule_prefixes=False` gives names relative to `submodules`.

    Raises:
        CheckpointError: `model` is in the middle of a step.
    """
    options = options or StateDictOptions()
    table = _table(model, options)
    form = _form(options)
    # PyTorch raises on some combinations of filters, so they are applied here.
    torch_options = replace(options, ignore_frozen_params=False, keep_submodule_prefixes=True)
    if not table.sharded:
        state = torch_get_model_state_dict(model, options=torch_options)
    elif table.wrapped is not None:
        with in_form(form):
            state = dict(model.state_dict())
    else:
        torch_options = replace(torch_options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        state = _in_form(table, torch_get_model_state_dict(model, options=torch_options), form)
    if options.ignore_frozen_params:
        frozen = {name for row in table.parameters if not row.parameter.requires_grad for name in row.names}
        state = {name: value for name, value in state.items() if name not in frozen}
    return {new: state[name] for name, new in _chosen(model, state, submodules, options).items()}


def _in_form(table: Table, state: dict[str, Any], form: StateForm) -> dict[str, Any]:
    """The state of a model of `fully_shard` in `form`, of which one batch at a time is whole. Collective."""
    wanted = form.wanted(dist.get_rank())
    result: dict[str, Any] = {}
    rows = [row for row in table.parameters if row.member is not None and form.kind == "whole"]
    saved = saved_values((Wanted(row.name, row) for row in rows), form, wanted)
    for row, value in zip(rows, saved, strict=True):
        result |= {name: value for name in row.names if name in state}
    for name, value in state.items():
        if name not in result and isinstance(value, torch.Tensor):
            value = value_forms.whole_of(value, table.axes.device) if form.kind == "whole" else value
            result[name] = value.cpu() if form.to_cpu else value
    return {name: result.get(name, value) for name, value in state.items()} if wanted else {}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The optimizers' state by parameter name, with sharded or whole values. Collective.

    For an optimizer that has not stepped yet, the result is the state that a first step would create, filled with
    zeros, so that a checkpoint can be loaded into it.

    Args:
        model, submodules, options: as for `get_model_state_dict`. `flatten_optimizer_state_dict` gives one flat
            dictionary, `state.NAME.KEY` and `param_groups.NAME.KEY`.
        optimizers: an optimizer, or several for different parameters of `model`.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
        DivergenceError: ranks' optimizers have different parameters.
    """
    options = options or StateDictOptions()
    settle(model)
    table, listed = _table(model, options), as_list(optimizers)
    if not table.sharded:
        return torch_get_optimizer_state_dict(model, listed, submodules=submodules, options=options)
    form, axes, rank = _form(options), table.axes, dist.get_rank()
    if table.wrapped is not None:  # the instance may be on some of all ranks only
        rank = axes.shard.rank if axes.shard.size > 1 or axes.replicate is None else axes.replicate.rank
    wanted = form.wanted(rank)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in listed:
        state = optimizer_state.named_state(table, optimizer, form, zeros=True, wanted=wanted)
        if wanted:
            merged["state"] |= state["state"]
            merged["param_groups"] += state["param_groups"]
    if not wanted:
        return {}
    if submodules:
        names = _chosen(model, [row.name for row in table.parameters], submodules, options)
        merged["state"] = {new: merged["state"][name] for name, new in names.items() if name in merged["state"]}
        for group in merged["param_groups"]:
            group["params"] = [names[name] for name in group["params"] if name in names]
    return _flattened(merged) if options.flatten_optimizer_state_dict else merged


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`get_model_state_dict` and `get_optimizer_state_dict` together."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a result of `get_model_state_dict`, on any number of ranks. Collective.

    Parameters and buffers on the meta device that have values get memory first, in the model's dtype. All parameters of
    a unit that require a gradient share one buffer, and so do the frozen ones: all of them must have values, or none.

    Args:
        model: sharded by either front-end, or not sharded; or a part of such a model.
        model_state_dict: sharded or whole values.
        options: `strict` as for `load_state_dict`, but one of the names of a tied parameter is enough.
            `broadcast_from_rank0` (with `full_state_dict`) uses only rank 0's values, which are sent to the other ranks
            tensor by tensor.

    Returns:
        Missing and unexpected keys, as from `load_state_dict`.

    Raises:
        CheckpointError: shapes that do not fit, or `broadcast_from_rank0` where no mesh of the model has all its ranks;
            nothing was loaded.
        ConfigError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    table = _table(model, options)
    if not isinstance(model_state_dict, Mapping):
        raise invalid_argument("The model's state dict", model_state_dict, "a dict", kind=ArgumentTypeError)
    if not table.sharded:
        return torch_set_model_state_dict(model, model_state_dict, options=options)
    state = dict(model_state_dict)
    if options.broadcast_from_rank0:
        state = value_forms.from_rank0(state, table.spanning_axes)
    for row in table.parameters:  # tied parameters: files of Hugging Face have one of the names
        saved = next((state[name] for name in row.names if name in state), None)
        state.update({name: saved for name in row.names if saved is not None and name not in state})
    cut_whole_values(table, state)
    materialize(table, state, options.strict)
    return model.load_state_dict(state, strict=options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a result of `get_optimizer_state_dict`, with any number of ranks, wrapping and layout. Collective.

    Args:
        model, optimizers: as for `get_optimizer_state_dict`.
        optim_state_dict: sharded or whole values; flat with `flatten_optimizer_state_dict`.
        options: as for `set_model_state_dict`. With `strict`, parameters that require a gradient must have state, as in
            PyTorch.

    Raises:
        CheckpointError: shapes or scalars that do not fit, or state that is missing; nothing was loaded.
        ConfigError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    settle(model)
    table, listed = _table(model, options), as_list(optimizers)
    saved = optim_state_dict
    if options.flatten_optimizer_state_dict and "state" not in saved and saved:
        saved = _unflattened(saved)
        options = replace(options, flatten_optimizer_state_dict=False)  # PyTorch raises on flat dicts of whole values
    if not table.sharded:
        torch_set_optimizer_state_dict(model, listed, optim_state_dict=saved, options=options)
        return
    if options.broadcast_from_rank0:
        saved = state_from_rank0(saved, table)
    loaded = []
    for optimizer in listed:
        needs_all = options.strict and _needs_state(saved, optimizer)
        groups = groups_of(optimizer)
        loaded.append(optimizer_state.state_to_load(table, groups, saved, needs_all=needs_all, optimizer=optimizer))
    for optimizer, state in zip(listed, loaded, strict=True):
        optimizer_state.load_state(optimizer, state)


def _needs_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parameters must have state in `saved`: unless nothing has state there, and a step creates none."""
    tensors = parameters_of([optimizer])
    if optimizer_state.form_error(saved) is not None:
        return True  # `state_to_load` raises
    return bool(saved["state"]) or any(optimizer_state.blank_states(optimizer, tensors))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict` together; returns the result of the former."""
    listed = as_list(optimizers)
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, listed, optim_state_dict, options=options)
    return keys


def state_from_rank0(saved: dict[str, Any] | None, table: Table) -> dict[str, Any]:
    """Rank 0's optimizer state dict on every rank, whose tensors are sent when they are used. Collective.

    Raises:
        CheckpointError: rank 0 has no state dict, on every rank; or no mesh of the model has all its ranks.
    """
    result: dict[str, Any] = value_forms.from_rank0(saved or {}, table.spanning_axes)
    if not result:
        raise CheckpointError(
            "rank 0 has no optimizer state dict to send to the others",
            rank=0,
            got="an empty state dict",
            remedy="load the file on rank 0 before the call, or omit broadcast_from_rank0",
        )
    return result


def _table(model: nn.Module, options: StateDictOptions) -> Table:
    check_module("This function", model)
    if not isinstance(options, StateDictOptions):
        raise invalid_argument("options", options, "a fullshard.state_dict.StateDictOptions", kind=ArgumentTypeError)
    take_over_replaced(model)
    table = Table(model, None)
    around = [member for unit, runner in table.units if runner is None for member in unit.members]
    part = next((member for member in around if not has_full_tensor(member)), None)
    if part is not None:
        raise CheckpointError(
            "The module is inside a FullyShardedDataParallel instance, which alone knows how parameters are sharded.",
            parameter=part.name,
            remedy="pass the FullyShardedDataParallel instance, and select by submodules= or by name",
        )
    if table.wrapped is not None and options.dsd_fqn_modifiers != StateDictOptions().dsd_fqn_modifiers:
        raise ConfigError(
            "dsd_fqn_modifiers is not supported for models that Fullshard shards: their names do not change"
        )
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ConfigError("full_state_dict must be True when broadcast_from_rank0 is True")
    return table


def _form(options: StateDictOptions) -> StateForm:
    # DTensors even where PyTorch gives ShardedTensors: if one of those is empty on some rank (a dim smaller than the
    # world), torch.distributed.checkpoint drops its key on that rank, and cannot load the checkpoint that it saved.
    whole, cpu = options.full_state_dict, options.cpu_offload
    return StateForm("whole" if whole else "sharded", dtensor=True, to_cpu=cpu, rank0_only=whole and cpu)


def _chosen(
    model: nn.Module, names: Iterable[str], submodules: set[nn.Module] | None, options: StateDictOptions
) -> dict[str, str]:
    """The names under `submodules`, each with its name in the result."""
    if not submodules:
        return {name: name for name in names}
    for module in submodules if isinstance(submodules, Iterable) else [submodules]:
        check_module("Each of submodules=", module)
    wanted = {id(module) for module in submodules}
    prefixes = [f"{clean_path(path)}." for path, module in model.named_modules() if id(module) in wanted]
    chosen = {}
    for name in names:
        for prefix in prefixes:
            if name.startswith(prefix):
                chosen[name] = name if options.keep_submodule_prefixes else name[len(prefix) :]
    return chosen


def _flattened(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, entries in state["state"].items() for key, value in entries.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _unflattened(flat: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `_flattened`; parameters with equal settings form a group."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for full, value in flat.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else settings).setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for name, entries in settings.items():
        for group in groups:
            if {k: v for k, v in group.items() if k != "params"} == entries:
                group["params"].append(name)
                break
        else:
            groups.append({**entries, "params": [name]})
    return {"state": state, "param_groups": groups}
