"""Optimizer state dicts of the wrapper: by parameter name, whole or sharded, and back into any wrapping."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ...checkpoint.functions import state_from_rank0
from ...checkpoint.names import Table, settle
from ...checkpoint.optimizer import load_state, named_state, state_to_load
from ...checkpoint.targets import targets_of
from ...checkpoint.values import Form
from ...errors import AssertedError
from . import messages
from .model_state import form_of, instances_of
from .settings import OptimStateKeyType, accept


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
            a FULL config with `rank0_only` gives nothing. Parameters that were never updated have no state; but
            sharded state of an optimizer that has not stepped yet is zeros, for a checkpoint to be loaded into.

        Raises:
            CheckpointError: the optimizer holds a tensor that is not the model's, or keeps state that is neither a
                scalar nor one value per element.
            DivergenceError: ranks' optimizers hold different parameters, or group them differently.
        """
        return _saved(model, optim, form_of(_first(model), optimizer=True), optim_state_dict)

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
            is_named_optimizer: keys of the result are the names that `model.named_parameters()` has, not numbers.
            load_directly: load it, too.
            group: as for `optim_state_dict`.

        Raises:
            CheckpointError: a shape or scalar that does not fit, or a part of a `FlatParameter` without state (a
                `ValueError` too); nothing was loaded then.
        """
        sent = form_of(_first(model), optimizer=True).rank0_only
        result = _to_load(model, optim.param_groups, optim_state_dict, is_named_optimizer, sent)
        if load_directly:
            load_state(optim, result)
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
        _warn("full_optim_state_dict", "optim_state_dict", optim_input)
        return _saved(model, optim, Form("whole", to_cpu=True, rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """As `optim_state_dict` with sharded values. Deprecated in PyTorch."""
        _warn("sharded_optim_state_dict", "optim_state_dict")
        return _saved(model, optim, Form("sharded", dtensor=_first(model)._arguments.mesh_given))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load` of whole values, which every rank has. Deprecated in PyTorch."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load` of sharded values. Deprecated in PyTorch."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(model, optim.param_groups, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """As `shard_full_optim_state_dict`, with values on rank 0 only, which sends them. Deprecated in PyTorch."""
        _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict, sent=True)

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
            AssertedError: `optim_state_key_type` is none.
        """
        kind = accept(optim_state_key_type, OptimStateKeyType, "optim_state_key_type", AssertedError)
        _warn_of_input(optim_input)
        targets = targets_of(Table(model), _groups(model, optim, optim_input))
        names = [row.name for target in targets for row in target.rows]
        to: dict[Any, Any] = dict(enumerate(names))
        if kind is OptimStateKeyType.PARAM_ID:
            to = {name: number for number, name in to.items()}
        groups = optim_state_dict.get("param_groups", [])
        for key in [*optim_state_dict["state"], *(p for g in groups for p in g["params"])]:
            if key not in to:
                raise messages.unknown_key(str(key), next(iter(to), "none at all"), len(to))
        rekeyed: dict[str, Any] = {"state": {to[key]: value for key, value in optim_state_dict["state"].items()}}
        if "param_groups" in optim_state_dict:
            order: Any = sorted if kind is OptimStateKeyType.PARAM_ID else list
            rekeyed["param_groups"] = [{**g, "params": order(to[key] for key in g["params"])} for g in groups]
        return rekeyed


def _warn(old: str, new: str, optim_input: Any = None) -> None:
    warnings.warn(messages.deprecated_method(old, new), FutureWarning, stacklevel=3)
    _warn_of_input(optim_input, 4)


def _warn_of_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(messages.deprecated_input(), FutureWarning, stacklevel=stacklevel)


def _first(model: nn.Module) -> Any:
    found = instances_of(model)
    if not found:
        raise messages.no_instance()
    return found[0]


def _groups(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> list[dict[str, Any]]:
    if optim is not None:
        return optim.param_groups
    given = list(optim_input if optim_input is not None else model.parameters())
    if given and isinstance(given[0], dict):
        return [{**group, "params": list(group["params"])} for group in given]
    return [{"params": given}]


def _saved(model: nn.Module, optim: Any, form: Form, given: dict[str, Any] | None = None) -> dict[str, Any]:
    first = _first(model)
    first._lazy_init()
    settle(model)
    # A sharded state is what checkpoints are loaded into, so before the first step it is zeros rather than nothing.
    zeros = form.kind == "sharded" and given is None
    if form.kind == "local":
        form = Form("sharded", form.dtensor, form.to_cpu)
    return named_state(Table(model), optim, form, zeros, given, form.wanted(first.rank))


def _to_load(
    model: nn.Module, groups: list[Any], saved: dict[str, Any] | None, named: bool = False, sent: bool = False
) -> dict[str, Any]:
    _first(model)._lazy_init()
    table = Table(model)
    return state_to_load(table, groups, state_from_rank0(saved, table) if sent else saved or {}, named)
