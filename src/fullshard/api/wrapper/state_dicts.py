"""State dicts of the wrapper, of its model and of optimizers: the user's settings, and calls of the checkpoint core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint import model as core
from ...checkpoint.functions import state_from_rank0
from ...checkpoint.optimizer_state import form_error, load_state, named_state, state_to_load
from ...checkpoint.table import Table, settle
from ...checkpoint.targets import targets_of
from ...checkpoint.value_forms import StateForm
from ...errors import AssertedError, check_module, check_switch
from ...forms import ATTRIBUTE
from ...optimizers import groups_of
from ...text import clean_name
from . import messages
from .configs import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    accept,
)
from .precision import original_dtypes
from .summon import is_summoned

_KINDS: dict[StateDictType, tuple[Any, type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: ("whole", FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: ("local", LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: ("sharded", ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
"""By type: `StateForm.kind`, and the classes of the settings."""


def instances_of(module: nn.Module) -> list[Any]:
    """All wrapper instances in `module`, itself included.

    Raises:
        ConfigError: it is not a module.
    """
    check_module("This method of FullyShardedDataParallel", module)
    return [child for child in module.modules() if isinstance(child, StateDictMethods)]


def first_instance(module: nn.Module) -> Any:
    """The outermost wrapper instance in `module`, or the first of several.

    Raises:
        CheckpointError: there is no instance.
    """
    instance = next(iter(instances_of(module)), None)
    if instance is None:
        raise messages.no_instance()
    return instance


def default_settings(kind: StateDictType) -> StateDictSettings:
    """The default settings of a kind of state dict."""
    _, model, optim = _KINDS[kind]
    return StateDictSettings(kind, model(), optim())


class StateDictMethods:
    """The mixin with `FullyShardedDataParallel`'s methods for its model's state dict and optimizer state."""

    _fullshard_settings: StateDictSettings

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of the state dicts of all instances in `module`, from now on.

        Args:
            module: an instance, or a module that contains instances.
            state_dict_type: see `StateDictType`.
            state_dict_config: a config of the class that belongs to the type; None: its defaults.
            optim_state_dict_config: likewise, for optimizer state.

        Returns:
            The previous settings.

        Raises:
            CheckpointError: a config of a different type's class, or `module` contains no instance.
        """
        kind = accept(state_dict_type, StateDictType, "state_dict_type")
        new = default_settings(kind)
        for name, config in (
            ("state_dict_config", state_dict_config),
            ("optim_state_dict_config", optim_state_dict_config),
        ):
            if config is not None:
                expected = type(getattr(new, name))
                if type(config).__name__ != expected.__name__:
                    raise messages.config_of_another_type(name, expected.__name__, type(config).__name__, kind.name)
                setattr(new, name, accept(config, expected, name))
        previous = StateDictMethods.get_state_dict_type(module)
        for instance in instances_of(module):
            instance._fullshard_settings = StateDictSettings(kind, new.state_dict_config, new.optim_state_dict_config)
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of all instances in `module`.

        Raises:
            CheckpointError: they differ, or there are none.
        """
        settings: StateDictSettings = first_instance(module)._fullshard_settings
        if any(instance._fullshard_settings != settings for instance in instances_of(module)):
            raise messages.different_types()
        return settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Context in which state dicts of all instances in `module` have this type; see `set_state_dict_type`."""
        previous = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            StateDictMethods.set_state_dict_type(
                module, previous.state_dict_type, previous.state_dict_config, previous.optim_state_dict_config
            )

    # Saving.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The model's state under the unwrapped module's names, with values as `set_state_dict_type` chose.

        Collective for FULL and SHARDED. Whole values are assembled instance by instance, so that at most one instance
        is gathered at a time.

        Raises:
            PhaseError: called inside forward or backward.
        """
        if args:  # nn.Module's deprecated positional form
            values = [*args, *(destination, prefix, keep_vars)[len(args) :]]
            destination, prefix, keep_vars = values
        instance: Any = self
        plain = super().state_dict  # type: ignore[misc]
        if is_summoned(instance):
            result = plain(destination=destination, prefix=prefix, keep_vars=keep_vars)
            core.strip(result, prefix)
            return result
        instance._lazy_init()
        if instance._runner().is_running:
            raise messages.saved_within_a_pass()

        def save() -> Any:
            return plain(destination=destination, prefix=prefix, keep_vars=keep_vars)

        dtypes = original_dtypes(instance)
        return core.save_instance(instance._runner(), save, prefix, form_of(instance), dtypes, instance.rank)

    # Loading.

    @staticmethod
    def _before_load(instance: Any, state_dict: Any, prefix: str, _meta: Any, strict: bool, *lists: Any) -> None:
        """Load pre-hook: translate names to those of the wrapped module, and values to this rank's parts."""
        missing = lists[0]
        if is_summoned(instance):
            raise messages.loaded_while_summoned()
        core.load_instance(instance, instance._runner(), state_dict, prefix, missing)

    @staticmethod
    def _after_load(instance: Any, incompatible: Any) -> None:
        """Load post-hook: report missing and unexpected keys under the names of the unwrapped module."""
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            cleaned = [clean_name(key) for key in keys if not key.endswith(f".{ATTRIBUTE}")]
            keys[:] = list(dict.fromkeys(cleaned))

    # Optimizer state.

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
        check_switch("optim_state_dict_to_load(is_named_optimizer=)", is_named_optimizer)
        check_switch("optim_state_dict_to_load(load_directly=)", load_directly)
        sent = form_of(first_instance(model), optimizer=True).rank0_only
        result = _to_load(model, groups_of(optim), optim_state_dict, is_named_optimizer, sent, optim)
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
        """Like `optim_state_dict`, with whole values in host memory, by default on rank 0. Deprecated in PyTorch."""
        _warn("full_optim_state_dict", "optim_state_dict", optim_input)
        return _saved(model, optim, StateForm("whole", to_cpu=True, rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """Like `optim_state_dict`, with sharded values. Deprecated in PyTorch."""
        _warn("sharded_optim_state_dict", "optim_state_dict")
        return _saved(model, optim, StateForm("sharded", dtensor=first_instance(model)._arguments.mesh_given))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Like `optim_state_dict_to_load`, from whole values on every rank. Deprecated in PyTorch."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict, optim=optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Like `optim_state_dict_to_load`, from sharded values. Deprecated in PyTorch."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(model, groups_of(optim), sharded_optim_state_dict, optim=optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Like `shard_full_optim_state_dict`, from values on rank 0, which sends them. Deprecated in PyTorch."""
        _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _to_load(model, _groups(model, optim, optim_input), full_optim_state_dict, sent=True, optim=optim)

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
        if (error := form_error(optim_state_dict)) is not None:
            raise error
        check_module("rekey_optim_state_dict", model)
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


def form_of(instance: Any, optimizer: bool = False) -> StateForm:
    """The form of the model's or optimizer's state that the instance's settings choose; DTensors with a device mesh."""
    settings: StateDictSettings = instance._fullshard_settings
    if instance._arguments.mesh_given:
        for sharded_config in (settings.state_dict_config, settings.optim_state_dict_config):
            if hasattr(sharded_config, "_use_dtensor"):
                sharded_config._use_dtensor = True
    config: Any = settings.optim_state_dict_config if optimizer else settings.state_dict_config
    return StateForm(
        _KINDS[settings.state_dict_type][0],
        dtensor=getattr(config, "_use_dtensor", False),
        to_cpu=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )


def _warn(old: str, new: str, optim_input: Any = None) -> None:
    warnings.warn(messages.deprecated_method(old, new), FutureWarning, stacklevel=3)
    _warn_of_input(optim_input, 4)


def _warn_of_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(messages.deprecated_input(), FutureWarning, stacklevel=stacklevel)


def _groups(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> list[dict[str, Any]]:
    if optim is not None:
        return groups_of(optim)
    entries = list(optim_input if optim_input is not None else model.parameters())
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": list(group["params"])} for group in entries]
    return [{"params": entries}]


def _saved(model: nn.Module, optim: Any, form: StateForm, state: dict[str, Any] | None = None) -> dict[str, Any]:
    first = first_instance(model)
    first._lazy_init()
    settle(model)
    # Checkpoints are loaded into sharded state, so before the first step it is zeros rather than empty.
    zeros = form.kind == "sharded" and state is None
    if form.kind == "local":
        form = StateForm("sharded", form.dtensor, form.to_cpu)
    return named_state(Table(model), optim, form, zeros, state, form.wanted(first.rank))


def _to_load(
    model: nn.Module,
    groups: list[Any],
    saved: dict[str, Any] | None,
    named: bool = False,
    sent: bool = False,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    first_instance(model)._lazy_init()
    table = Table(model)
    state = state_from_rank0(saved, table) if sent else saved or {}
    return state_to_load(table, groups, state, named, optimizer=optim)
