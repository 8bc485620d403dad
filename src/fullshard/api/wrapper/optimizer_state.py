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
from .model_state import first_instance, form_of
from .settings import OptimStateKeyType, accept


class OptimizerStateMethods:
    """The mixin with `FullyShardedDataParallel`'s methods for optimizer state."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by the unwrapped model's parameter names, as `set_state_dict_type` says.

        Collective. `optim_state_dict_to_load` loads it into any wrapping, strategy and number of ranks.

        Args:
            model: an instance, or a module that contains instances.
            optim: an optimizer of `model`'s parameters.
            optim_state_dict: the state to convert, in the form of `optim.state_dict()`; None: the optimizer's own.
            group: accepted for PyTorch's signature; each instance's own process group is used.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`; with `rank0_only` in a FULL
            config, an empty dict on all ranks but 0. Parameters that were never updated have no state; but sharded
            state of an optimizer that has not stepped yet is zeros, for a checkpoint to be loaded into.

        Raises:
            CheckpointError: the optimizer has a tensor that is not a parameter of the model, or state that is neither
                a scalar nor a value per element.
            DivergenceError: the optimizers of different ranks have different parameters, or group them differently.
        """
        return _saved(model, optim, form_of(first_instance(model), optimizer=True), optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert state from any wrapping and number of ranks to the form that `optim.load_state_dict` takes.

        Collective. With `rank0_only` in a FULL config, rank 0's state is used on every rank.

        Args:
            model, optim: as for `optim_state_dict`.
            optim_state_dict: the result of `optim_state_dict`, whole or sharded.
            is_named_optimizer: True: keys of the result are the names of `model.named_parameters()`; False: numbers.
            load_directly: load the result into `optim` too.
            group: as for `optim_state_dict`.

        Raises:
            CheckpointError: a shape or scalar does not fit, or a part of a `FlatParameter` has no state (a
                `ValueError` too); nothing was loaded then.
        """
        sent = form_of(first_instance(model), optimizer=True).rank0_only
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
        return _saved(model, optim, Form("sharded", dtensor=first_instance(model)._arguments.mesh_given))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load`, from whole values on every rank. Deprecated in PyTorch."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """As `optim_state_dict_to_load`, from sharded values. Deprecated in PyTorch."""
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
        """As `shard_full_optim_state_dict`, from values on rank 0, which sends them. Deprecated in PyTorch."""
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
        """Convert the keys of optimizer state from parameter names to numbers, or the reverse.

        Args:
            optim_state_dict: the state, with the other type of keys.
            optim_state_key_type: the type of keys of the result.
            model: the model, wrapped or not; its parameters are numbered as if it were not.
            optim_input: the parameters or groups that the optimizer was built from, instead of `optim`. Deprecated.
            optim: an optimizer of `model`'s parameters; None: all of them in a single group.

        Raises:
            CheckpointError: the model or the optimizer does not have a key.
            AssertedError: invalid `optim_state_key_type`.
        """
        kind = accept(optim_state_key_type, OptimStateKeyType, "optim_state_key_type", AssertedError)
        _warn_of_input(optim_input)
        targets = targets_of(Table(model), _groups(model, optim, optim_input))
        names = [row.name for target in targets for row in target.rows]
        by_number = kind is OptimStateKeyType.PARAM_ID
        new_keys: dict[Any, Any] = {name: i for i, name in enumerate(names)} if by_number else dict(enumerate(names))
        groups = optim_state_dict.get("param_groups", [])
        for key in [*optim_state_dict["state"], *(p for g in groups for p in g["params"])]:
            if key not in new_keys:
                raise messages.unknown_key(str(key), next(iter(new_keys), "none at all"), len(new_keys))
        rekeyed: dict[str, Any] = {"state": {new_keys[key]: value for key, value in optim_state_dict["state"].items()}}
        if "param_groups" in optim_state_dict:
            order: Any = sorted if by_number else list
            rekeyed["param_groups"] = [{**g, "params": order(new_keys[key] for key in g["params"])} for g in groups]
        return rekeyed


def _warn(old: str, new: str, optim_input: Any = None) -> None:
    warnings.warn(messages.deprecated_method(old, new), FutureWarning, stacklevel=3)
    _warn_of_input(optim_input, 4)


def _warn_of_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(messages.deprecated_input(), FutureWarning, stacklevel=stacklevel)


def _groups(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> list[dict[str, Any]]:
    if optim is not None:
        return optim.param_groups
    entries = list(optim_input if optim_input is not None else model.parameters())
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": list(group["params"])} for group in entries]
    return [{"params": entries}]


def _saved(model: nn.Module, optim: Any, form: Form, state: dict[str, Any] | None = None) -> dict[str, Any]:
    first = first_instance(model)
    first._lazy_init()
    settle(model)
    # Checkpoints are loaded into sharded state, so before the first step it is zeros rather than empty.
    zeros = form.kind == "sharded" and state is None
    if form.kind == "local":
        form = Form("sharded", form.dtensor, form.to_cpu)
    return named_state(Table(model), optim, form, zeros, state, form.wanted(first.rank))


def _to_load(
    model: nn.Module, groups: list[Any], saved: dict[str, Any] | None, named: bool = False, sent: bool = False
) -> dict[str, Any]:
    first_instance(model)._lazy_init()
    table = Table(model)
    return state_to_load(table, groups, state_from_rank0(saved, table) if sent else saved or {}, named)
