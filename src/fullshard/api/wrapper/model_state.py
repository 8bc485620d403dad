"""Model state dicts of the wrapper: the user's settings, and methods that call the checkpoint core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...checkpoint import model as core
from ...checkpoint.values import Form
from ...forms import ATTRIBUTE
from ...names import clean_name
from . import messages
from .settings import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    accept,
)
from .summon import is_summoned

_KINDS: dict[StateDictType, tuple[Any, type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: ("whole", FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: ("local", LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: ("sharded", ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
"""By type: `Form.kind`, and the classes of the settings."""


def instances_of(module: nn.Module) -> list[Any]:
    """All wrapper instances in `module`, itself included."""
    return [child for child in module.modules() if isinstance(child, StateDictMethods)]


def first_instance(module: nn.Module) -> Any:
    """The outermost wrapper instance in `module`, or the first of several.

    Raises:
        CheckpointError: there is none.
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
    """The mixin with `FullyShardedDataParallel`'s methods for its model's state dict."""

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

        dtypes = instance._buffers_cast.originals_by_name(instance)
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


def form_of(instance: Any, optimizer: bool = False) -> Form:
    """The form of the model's or optimizer's state that the instance's settings choose; DTensors with a device mesh."""
    settings: StateDictSettings = instance._fullshard_settings
    if instance._arguments.mesh_given:
        for sharded_config in (settings.state_dict_config, settings.optim_state_dict_config):
            if hasattr(sharded_config, "_use_dtensor"):
                sharded_config._use_dtensor = True
    config: Any = settings.optim_state_dict_config if optimizer else settings.state_dict_config
    return Form(
        _KINDS[settings.state_dict_type][0],
        dtensor=getattr(config, "_use_dtensor", False),
        to_cpu=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )
