"""The functions users call: ours for optimizer state, and those of `torch.distributed.checkpoint.state_dict`.

PyTorch's own know its own wrapper only: of ours they would return this rank's memory under the wrapped names. Those
here have the same names, arguments and results, for every model that Fullshard shards; of others, PyTorch's are called:
those that were there when this was imported, as programs may put ours in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

from ..errors import CheckpointError, ConfigError
from ..names import clean_path, plain_name
from ..runtime import take_over_replaced
from . import values
from .held import Held, held_by, settle_state
from .model import cut_whole_values, in_form, materialize
from .names import Table, settle
from .optimizer import blank_states, collect, cut_states, load_state, named_state, state_to_load
from .settings import named_groups, put, settings_to_load
from .values import Form
from .whole import Wanted, wholes

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, keyed by parameter name, as sharded tensors that `torch.distributed.checkpoint` saves.

    Args:
        model: the sharded model.
        optimizer: of its parameters, of its `optimizer_view`s, or both. One that has not stepped yet gives state of
            the right shapes filled with zeros, into which a checkpoint can be loaded; it is not changed.

    Returns:
        `{"state": {parameter: {key: tensor}}, "groups": {parameter: {setting: tensor}}}`. State of a parameter's shape
        is sharded as the parameter; scalars are plain tensors; numeric settings of its group are float64 tensors.

    Raises:
        CheckpointError: state of a view that is neither a scalar nor one value per element, or a foreign tensor.
    """
    table = _of_fully_shard(model)
    held = held_by(table, optimizer.param_groups)
    state = collect(table, held, optimizer, Form("sharded"), "where missing", agree=False)
    result = {row.name: state.get(row.name, {}) for one in held for row in one.rows}
    for own in result.values():
        own.update({key: torch.tensor(v, device="cpu") for key, v in own.items() if not isinstance(v, torch.Tensor)})
    settings: dict[str, dict[str, torch.Tensor]] = {}
    for group in named_groups(held, optimizer.param_groups):
        numbers = {
            key: torch.as_tensor(v, dtype=torch.float64, device="cpu") for key, v in group.items() if _numeric(v)
        }
        settings |= {name: {key: number.clone() for key, number in numbers.items()} for name in group["params"]}
    return {"state": result, "groups": settings}


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Make `state`, in the form of `optimizer_state_dict`, the optimizer's state.

    Everything is checked before anything changes.

    Args:
        model, optimizer: as for `optimizer_state_dict`, on any number of ranks and with views or without.
        state: of the same model; typically filled in place by `torch.distributed.checkpoint.load`.

    Raises:
        CheckpointError: a parameter is missing, a shape differs, or the parameters of one view have different scalars
            (such as step counts), which one tensor cannot hold.
    """
    table = _of_fully_shard(model)
    held = held_by(table, optimizer.param_groups)
    loaded = cut_states(table, held, state["state"], needs_all=True)
    saved = [
        {**{key: value.tolist() for key, value in own.items()}, "params": _parameters(name, held)}
        for name, own in state.get("groups", {}).items()
    ]
    settings = settings_to_load(held, optimizer.param_groups, saved)
    settle_state(optimizer)
    for one in held:
        optimizer.state.pop(one.tensor, None)
        if one.index in loaded:
            optimizer.state[one.tensor] = loaded[one.index]
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        put(group, {key: value for key, value in own.items() if _numeric(group.get(key))})


def _parameters(name: str, held: Sequence[Held]) -> list[str]:
    """Those whose settings stand under a name: its own; under a group's number, as they stood once, the group's."""
    return [row.name for one in held if str(one.group) == name for row in one.rows] if name.isdecimal() else [name]


def _of_fully_shard(model: nn.Module) -> Table:
    take_over_replaced(model)
    table = Table(model, lambda name: name)
    wrapped = next((row for row in table.parameters if row.member is not None and not row.says_whole), None)
    if wrapped is not None:
        raise CheckpointError(
            "The model is wrapped by FullyShardedDataParallel, whose parameters do not say how they are split.",
            parameter=wrapped.name,
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
    table = _table(model, options)
    form = _form(options)
    # PyTorch's raise on some combinations of filters, so they are applied here.
    plain = replace(options, ignore_frozen_params=False, keep_submodule_prefixes=True)
    if not table.sharded:
        state = torch_get_model_state_dict(model, options=plain)
    elif table.wrapped:
        with in_form(form):
            state = dict(model.state_dict())
    else:
        plain = replace(plain, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
        state = _finished(table, torch_get_model_state_dict(model, options=plain), form)
    if options.ignore_frozen_params:
        frozen = {name for row in table.parameters if not row.parameter.requires_grad for name in row.names}
        state = {name: value for name, value in state.items() if name not in frozen}
    return {new: state[name] for name, new in _chosen(model, state, submodules, options).items()}


def _finished(table: Table, state: dict[str, Any], form: Form) -> dict[str, Any]:
    """Values of `fully_shard`'s parameters in `form`; a batch is whole at a time besides the result. Collective."""
    wanted = form.wanted(dist.get_rank())
    result: dict[str, Any] = {}
    managed = {name for row in table.parameters if row.member is not None for name in row.names}
    rows = [row for row in table.parameters if row.member is not None and form.kind == "whole"]
    for row, (_, whole) in zip(rows, wholes(Wanted(row.name, row) for row in rows), strict=True):
        assert row.bucket is not None and row.member is not None
        value = values.saved_form(row.bucket, row.member, whole, form, wanted)
        result |= {name: value for name in row.names if name in state}
        del whole
    for name, value in state.items():
        if name not in result and isinstance(value, torch.Tensor) and not (name in managed and form.kind == "whole"):
            value = values.whole_of(value, table.axes.device) if form.kind == "whole" else value
            result[name] = value.cpu() if form.to_cpu else value
    return {name: result.get(name, value) for name, value in state.items()} if wanted else {}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The optimizers' state by parameter name; sharded values, or whole ones. Collective.

    Of an optimizer that has not stepped yet it is what a first step makes, filled with zeros, so that a checkpoint can
    be loaded into the result.

    Args:
        model, submodules, options: as for `get_model_state_dict`. `flatten_optimizer_state_dict` gives one flat
            dictionary, `state.NAME.KEY` and `param_groups.NAME.KEY`.
        optimizers: one, or several of different parameters of `model`.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
        DivergenceError: ranks' optimizers hold different parameters.
    """
    options = options or StateDictOptions()
    settle(model)
    table, given = _table(model, options), _listed(optimizers)
    if not table.sharded:
        return torch_get_optimizer_state_dict(model, given, submodules=submodules, options=options)
    form = _form(options)
    wanted = form.wanted(values.first_rank(table.axes) if table.wrapped else dist.get_rank())
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in given:
        one = named_state(table, optimizer, form, "unless stepped", wanted=wanted)
        if wanted:
            merged["state"] |= one["state"]
            merged["param_groups"] += one["param_groups"]
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
    given = _listed(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, given, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load what `get_model_state_dict` gave, on any number of ranks. Collective.

    Parameters and buffers on the meta device for which there are values get memory first, in the model's dtype; all
    parameters of a unit that require a gradient lie in one buffer, and so do the frozen ones: there must be values for
    all of them or for none.

    Args:
        model: sharded by either front-end, or not; or a part of such a model.
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
    table = _table(model, options)
    if not table.sharded:
        return torch_set_model_state_dict(model, model_state_dict, options=options)
    state = dict(model_state_dict)
    if options.broadcast_from_rank0:
        state = values.from_rank0(state, table.axes)
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
    """Load what `get_optimizer_state_dict` gave, on any number of ranks, wrapping and layout. Collective.

    Args:
        model, optimizers: as for `get_optimizer_state_dict`.
        optim_state_dict: sharded or whole values; flat if `flatten_optimizer_state_dict` says so.
        options: as for `set_model_state_dict`. `strict`: parameters that require a gradient must have state, as
            PyTorch has it.

    Raises:
        CheckpointError: shapes or scalars that do not fit, or state that is missing; nothing was loaded then.
        ConfigError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    settle(model)
    table, given = _table(model, options), _listed(optimizers)
    saved = optim_state_dict
    if options.flatten_optimizer_state_dict and "state" not in saved and saved:
        saved = _unflattened(saved)
        options = replace(options, flatten_optimizer_state_dict=False)  # PyTorch's raises on whole flat ones
    if not table.sharded:
        torch_set_optimizer_state_dict(model, given, optim_state_dict=saved, options=options)
        return
    if options.broadcast_from_rank0:
        saved = state_from_rank0(saved, table)
    loaded = [
        state_to_load(table, optimizer.param_groups, saved, needs_all=options.strict and _lacks(saved, optimizer))
        for optimizer in given
    ]
    for optimizer, state in zip(given, loaded, strict=True):
        load_state(optimizer, state)


def _lacks(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters without state in `saved` may lack it: not if nothing has state, and a step makes none."""
    if saved.get("state"):
        return True
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return any(blank_states(optimizer, tensors).values())


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """`set_model_state_dict` and `set_optimizer_state_dict` together; returns what the first does."""
    given = _listed(optimizers)
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, given, optim_state_dict, options=options)
    return keys


def state_from_rank0(saved: dict[str, Any] | None, table: Table) -> dict[str, Any]:
    """Rank 0's optimizer state dict on every rank, its tensors sent when they are used. Collective.

    Raises:
        CheckpointError: rank 0 has none; on every rank.
    """
    result: dict[str, Any] = values.from_rank0(saved or {}, table.axes)
    if not result:
        raise CheckpointError(
            "rank 0 has no optimizer state dict to send to the others",
            rank=0,
            got="an empty one",
            remedy="load the file on rank 0 before the call, or leave out broadcast_from_rank0",
        )
    return result


def _table(model: nn.Module, options: StateDictOptions) -> Table:
    take_over_replaced(model)
    table = Table(model)
    around = [member for unit, runner in table.units if runner is None for member in unit.members]
    part = next((member for member in around if not values.says_whole(member)), None)
    if part is not None:
        raise CheckpointError(
            "A module inside a FullyShardedDataParallel was given, which alone knows how its parameters are split.",
            parameter=part.name,
            remedy="give the FullyShardedDataParallel, and pick what is wanted by submodules= or by its name",
        )
    if not table.wrapped:  # names as PyTorch's functions have them
        table = Table(model, plain_name)
    elif options.dsd_fqn_modifiers != StateDictOptions().dsd_fqn_modifiers:
        raise ConfigError(
            "dsd_fqn_modifiers has no meaning for models that Fullshard shards: their names do not change"
        )
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ConfigError("full_state_dict must be True when broadcast_from_rank0 is True")
    return table


def _form(options: StateDictOptions) -> Form:
    # DTensors also where PyTorch's would give ShardedTensors: of one that is empty on some rank (a dim smaller than the
    # world) torch.distributed.checkpoint loses the key on that rank, and cannot load what it saved.
    whole, cpu = options.full_state_dict, options.cpu_offload
    return Form("whole" if whole else "sharded", dtensor=True, to_cpu=cpu, rank0_only=whole and cpu)


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _chosen(
    model: nn.Module, names: Iterable[str], submodules: set[nn.Module] | None, options: StateDictOptions
) -> dict[str, str]:
    """The names under `submodules`, by what they are called in the result."""
    if not submodules:
        return {name: name for name in names}
    wanted = {id(module) for module in submodules}
    prefixes = [f"{clean_path(path)}." for path, module in model.named_modules() if id(module) in wanted]
    found = {}
    for name in names:
        for prefix in prefixes:
            if name.startswith(prefix):
                found[name] = name if options.keep_submodule_prefixes else name[len(prefix) :]
    return found


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
