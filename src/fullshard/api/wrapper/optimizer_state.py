"""Optimizer state dicts of the wrapper: by parameter name, whole or sharded, and back into any wrapping."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.optimizer_parts import Entry, collect, cut_state
from ...checkpoint.parts import joined_whole, split_part
from ...errors import CheckpointError
from ...mesh import Axis, MeshAxes
from ...names import clean_name
from ...shard import Bucket, Member
from .model_state import instances_of, settings_of
from .names import names_in, names_of_members, prefixes_in
from .settings import OptimStateKeyType, StateDictType, accept


class OptimizerStateMethods:
    """The part of `FullyShardedDataParallel` that is about optimizer state."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by the unwrapped model's parameter names, as `set_state_dict_type` says.

        Collective. Loads into any wrapping, strategy and number of ranks by `optim_state_dict_to_load`.

        Args:
            model: an instance, or a module that contains some.
            optim: of `model`'s parameters.
            optim_state_dict: state in the form of `optim.state_dict()` to take in place of the optimizer's own.
            group: accepted for PyTorch's signature; each instance's own process group is used.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`; an empty dict on ranks that
            a FULL config with `rank0_only` gives nothing. Parameters that were never updated have no state.

        Raises:
            CheckpointError: the optimizer holds a tensor that is not the model's, or keeps state that is neither a
                scalar nor one value per element.
        """
        settings = settings_of(_first(model))
        config: Any = settings.optim_state_dict_config
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        rank0_only = full and config.rank0_only
        use_dtensor = getattr(config, "_use_dtensor", False)
        return _collect(model, optim, full, rank0_only, config.offload_to_cpu, use_dtensor, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict`, of any wrapping and number of ranks, in the form that `optim.load_state_dict` takes.

        Collective. If a FULL config with `rank0_only` is set, rank 0's is used on every rank.

        Args:
            model, optim: as for `optim_state_dict`.
            optim_state_dict: what `optim_state_dict` gave, whole or sharded.
            is_named_optimizer: keys of the result are parameter names rather than numbers.
            load_directly: load it, too.
            group: as for `optim_state_dict`.

        Raises:
            CheckpointError: a shape or scalar that does not fit; nothing was loaded then.
        """
        settings = settings_of(_first(model))
        config: Any = settings.optim_state_dict_config
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT and config.rank0_only:
            optim_state_dict = from_rank0(optim_state_dict, _first(model)._arguments.axes)
        result = _to_load(model, optim, optim_state_dict, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(result)
        return result

    # The older methods.

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """As `optim_state_dict` with whole values in host memory, on rank 0 only by default. Deprecated in PyTorch."""
        _warn("full_optim_state_dict", "optim_state_dict")
        return _collect(model, optim, True, rank0_only, True, False, None)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """As `optim_state_dict` with sharded values. Deprecated in PyTorch."""
        _warn("sharded_optim_state_dict", "optim_state_dict")
        use_dtensor = _first(model)._arguments.mesh_given
        return _collect(model, optim, False, False, False, use_dtensor, None)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load` of whole values, which every rank has. Deprecated in PyTorch."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load` of sharded values. Deprecated in PyTorch."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """As `shard_full_optim_state_dict`, with values on rank 0 only, which sends them. Deprecated in PyTorch."""
        _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        whole = from_rank0(full_optim_state_dict, _first(model)._arguments.axes)
        return _to_load(model, _groups(model, optim, optim_input), whole)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Exchange parameter names for numbers, or the reverse: between wrapped and unwrapped optimizers.

        Args:
            optim_state_dict: with the other kind of keys.
            optim_state_key_type: the keys wanted.
            model: unwrapped (or wrapped: then its parameters are numbered as if it were not).
            optim_input: what the optimizer was built from, in place of `optim`. Deprecated.
            optim: of `model`'s parameters; None: all of them in one group.

        Raises:
            CheckpointError: a key that the model or the optimizer does not have.
        """
        kind = accept(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
        names = [name for entry in _entries(model, _groups(model, optim, optim_input)) for name in entry.names]
        to: dict[Any, Any] = dict(enumerate(names))
        if kind is OptimStateKeyType.PARAM_ID:
            to = {name: number for number, name in to.items()}
        for key in [*optim_state_dict["state"], *(p for g in optim_state_dict["param_groups"] for p in g["params"])]:
            if key not in to:
                raise CheckpointError("The optimizer state has a key that the optimizer does not.", parameter=str(key))
        return {
            "state": {to[key]: value for key, value in optim_state_dict["state"].items()},
            "param_groups": [
                {**group, "params": sorted(to[key] for key in group["params"])}
                if kind is OptimStateKeyType.PARAM_ID
                else {**group, "params": [to[key] for key in group["params"]]}
                for group in optim_state_dict["param_groups"]
            ],
        }


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``.",
        FutureWarning,
        stacklevel=3,
    )


def _first(model: nn.Module) -> Any:
    found = instances_of(model)
    if not found:
        raise CheckpointError("this model contains no FullyShardedDataParallel instance")
    return found[0]


class _Groups:
    """Parameter groups where no optimizer is at hand."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def _groups(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> Any:
    if optim is not None:
        return optim
    given = list(optim_input if optim_input is not None else model.parameters())
    if given and isinstance(given[0], dict):
        return _Groups([{**group, "params": list(group["params"])} for group in given])
    return _Groups([{"params": given}])


def _entries(model: nn.Module, optim: Any) -> list[Entry]:
    """The optimizer's tensors in order, matched with the model's parameters.

    Raises:
        CheckpointError: a tensor that is neither a parameter of the model nor a `FlatParameter` of it.
    """
    known: dict[int, Entry] = {}
    prefixes = prefixes_in(model)
    for path, instance in model.named_modules():
        if instance not in instances_of(model):
            continue
        prefix = clean_name(f"{path}." if path else "")
        comm = instance._runner().comm
        for bucket, member, own in names_of_members(instance):
            name = (names_in(prefixes, member) or [prefix + own[0]])[0]
            if bucket.flat_parameter is not None:
                entry = known.setdefault(
                    id(bucket.flat_parameter), Entry(bucket.flat_parameter, [], bucket, [], comm, flat=True)
                )
                entry.names.append(name)
                entry.members.append(member)
            else:
                known[id(member.sharded)] = Entry(member.sharded, [name], bucket, [member], comm)
    for name, parameter in model.named_parameters():
        known.setdefault(id(parameter), Entry(parameter, [clean_name(name)]))
    found: list[Entry] = []
    for g, group in enumerate(optim.param_groups):
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise CheckpointError(
                    "The optimizer holds a tensor that is not the model's.",
                    got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}",
                    remedy="build it from model.parameters() after wrapping",
                )
            entry = known[id(tensor)]
            entry.group, entry.index = g, len(found)
            found.append(entry)
    return found


def _collect(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    full: bool,
    rank0_only: bool,
    to_cpu: bool,
    use_dtensor: bool,
    given: dict[str, Any] | None,
) -> dict[str, Any]:
    first = _first(model)
    first._lazy_init()
    for instance in instances_of(model):
        instance._runner().reshard()
        instance._runner().unit.refresh()
    entries = _entries(model, optim)
    by_number = given["state"] if given is not None else None

    def state_of(entry: Entry) -> dict[str, Any]:
        if by_number is None:
            return optim.state.get(entry.tensor) or {}
        return by_number.get(entry.index) or by_number.get(entry.names[0]) or {}

    def finish(view: torch.Tensor, place: tuple[Bucket, Member] | None) -> Any:
        if full or place is None:
            whole = view.detach() if place is None else joined_whole(*place, view.detach())
            made = whole.cpu() if to_cpu else whole
            return made.clone() if made.data_ptr() == view.data_ptr() else made
        return split_part(*place, view.detach(), use_dtensor, to_cpu)

    wanted = not rank0_only or first.rank == 0
    state = collect(entries, state_of, finish, first._arguments.axes, wanted)
    if not wanted:
        return {}
    source = given["param_groups"] if given is not None else optim.param_groups
    groups = []
    for g, group in enumerate(source):
        settings = {key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")}
        names = [name for entry in entries if entry.group == g for name in entry.names]
        groups.append({**settings, "params": names})
    return {"state": state, "param_groups": groups}


def _to_load(model: nn.Module, optim: Any, saved: dict[str, Any], named: bool = False) -> dict[str, Any]:
    first = _first(model)
    first._lazy_init()
    entries = _entries(model, optim)
    saved = _under_first_names(model, saved)
    device = first._arguments.axes.device
    state = {}
    for entry in entries:
        own = cut_state(entry, saved["state"], device)
        if own:
            state[entry.names[0] if named else entry.index] = own
    saved_groups = {name: group for group in saved.get("param_groups", []) for name in group["params"]}
    groups = []
    for g, group in enumerate(optim.param_groups):
        own_entries = [entry for entry in entries if entry.group == g]
        names = [name for entry in own_entries for name in entry.names]
        known: Iterable[dict[str, Any]] = (saved_groups[name] for name in names if name in saved_groups)
        settings = {**group, **next(iter(known), {})}
        settings.pop("param_names", None)
        keys = [entry.names[0] if named else entry.index for entry in own_entries]
        groups.append({**settings, "params": keys})
    return {"state": state, "param_groups": groups}


def _under_first_names(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` with the state of shared parameters under the first of their names, whichever it was saved under."""
    prefixes = prefixes_in(model)
    renamed: dict[str, str] = {}
    for instance in instances_of(model):
        for member in instance._runner().unit.members:
            names = names_in(prefixes, member)
            renamed |= {name: names[0] for name in names[1:] if name in saved["state"]}
    renamed = {name: first for name, first in renamed.items() if first not in saved["state"]}
    if not renamed:
        return saved
    groups = [
        {**group, "params": [renamed.get(name, name) for name in group["params"]]}
        for group in saved.get("param_groups", [])
    ]
    state = {renamed.get(name, name): own for name, own in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def from_rank0(saved: dict[str, Any] | None, axes: MeshAxes) -> dict[str, Any]:
    """Rank 0's state dict on every rank, sent tensor by tensor: to the first rank of every replica, and from there.

    Raises:
        CheckpointError: rank 0 has none; on every rank.
    """
    result = saved
    if axes.replicate is not None and axes.shard.rank == 0:
        result = _broadcast(result, axes.replicate, axes.device)
    result = _broadcast(result, axes.shard, axes.device)
    if result is None:
        raise CheckpointError("rank 0 has no optimizer state dict to send to the others")
    return result


def _broadcast(saved: dict[str, Any] | None, axis: Axis, device: torch.device) -> dict[str, Any] | None:
    if axis.size == 1:
        return saved or None
    plan: list[Any] = [None]
    if axis.rank == 0 and saved:
        state = {
            name: {k: ("tensor", v.dtype, tuple(v.shape)) if _sendable(v) else ("value", v) for k, v in own.items()}
            for name, own in saved["state"].items()
        }
        plan = [{"state": state, "param_groups": saved["param_groups"]}]
    dist.broadcast_object_list(plan, group_src=0, group=axis.group)
    if plan[0] is None:
        return None
    result: dict[str, Any] = {"state": {}, "param_groups": plan[0]["param_groups"]}
    for name, own in plan[0]["state"].items():
        result["state"][name] = {}
        for key, (kind, *detail) in own.items():
            if kind == "value":
                result["state"][name][key] = detail[0]
                continue
            dtype, shape = detail
            sent = torch.empty(shape, dtype=dtype, device=device)
            if axis.rank == 0 and saved is not None:
                sent.copy_(saved["state"][name][key])
            dist.broadcast(sent, group_src=0, group=axis.group)
            result["state"][name][key] = sent.cpu()
    return result


def _sendable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
