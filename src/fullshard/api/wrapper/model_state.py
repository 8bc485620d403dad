"""Model state dicts of the wrapper: what users set, and the methods that ask the checkpoint core for it."""

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

CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def instances_of(module: nn.Module) -> list[Any]:
    """All wrapper instances in `module`, itself included."""
    return [child for child in module.modules() if isinstance(child, StateDictMethods)]


def default_settings(kind: StateDictType) -> StateDictSettings:
    """The settings of a kind of state dict when none are given."""
    model, optim = CONFIGS[kind]
    return StateDictSettings(kind, model(), optim())


class StateDictMethods:
    """The part of `FullyShardedDataParallel` that is about its model's state dict."""

    _fullshard_settings: StateDictSettings | None

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what state dicts of all instances in `module` hold, from now on.

        Args:
            module: an instance, or a module that contains some.
            state_dict_type: see `StateDictType`.
            state_dict_config: of the type's own class; None: its defaults.
            optim_state_dict_config: likewise, for optimizer state.

        Returns:
            The settings before.

        Raises:
            CheckpointError: a config of another type's class, or `module` contains no instance.
        """
        kind = accept(state_dict_type, StateDictType, "state_dict_type")
        new = default_settings(kind)
        for name, given in (
            ("state_dict_config", state_dict_config),
            ("optim_state_dict_config", optim_state_dict_config),
        ):
            if given is not None:
                expected = type(getattr(new, name))
                if type(given).__name__ != expected.__name__:
                    raise messages.config_of_another_type(name, expected.__name__, type(given).__name__, kind.name)
                setattr(new, name, accept(given, expected, name))
        before = StateDictMethods.get_state_dict_type(module)
        for instance in instances_of(module):
            instance._fullshard_settings = StateDictSettings(kind, new.state_dict_config, new.optim_state_dict_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of all instances in `module`.

        Raises:
            CheckpointError: they differ, or there are none.
        """
        found: StateDictSettings | None = None
        for instance in instances_of(module):
            one = instance._fullshard_settings or default_settings(StateDictType.FULL_STATE_DICT)
            if found is not None and one != found:
                raise messages.different_types()
            found = one
        if found is None:
            raise messages.no_instance_to_ask()
        return found

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context in which state dicts of all instances in `module` hold this; see `set_state_dict_type`."""
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            StateDictMethods.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    # Saving.

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The model's state under the unwrapped module's names; what values are, `set_state_dict_type` says.

        Collective for FULL and SHARDED. Whole values are made one instance at a time, so that at most one instance
        is held besides the result.

        Raises:
            PhaseError: called inside forward or backward.
        """
        if args:  # nn.Module's deprecated positional form
            given = [*args, *(destination, prefix, keep_vars)[len(args) :]]
            destination, prefix, keep_vars = given
        instance: Any = self
        plain = super().state_dict  # type: ignore[misc]
        if is_summoned(instance):
            result = plain(destination=destination, prefix=prefix, keep_vars=keep_vars)
            core.strip(result, prefix)
            return result
        root = instance._lazy_init()
        if root.pass_top is not None or root.in_backward:
            raise messages.saved_within_a_pass()

        def save() -> Any:
            return plain(destination=destination, prefix=prefix, keep_vars=keep_vars)

        dtypes = instance._buffers_cast.originals_by_name(instance)
        return core.save_instance(instance._runner(), save, prefix, form_of(instance), dtypes, instance.rank)

    # Loading.

    @staticmethod
    def _before_load(instance: Any, state_dict: Any, prefix: str, _meta: Any, strict: bool, *lists: Any) -> None:
        """Load pre-hook: names as the wrapped module knows them, and values as this rank holds them."""
        missing = lists[0]
        if is_summoned(instance):
            raise messages.loaded_while_summoned()
        core.load_instance(instance, instance._runner(), state_dict, prefix, missing)

    @staticmethod
    def _after_load(instance: Any, incompatible: Any) -> None:
        """Load post-hook: missing and unexpected keys under the names of the unwrapped module."""
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            cleaned = [clean_name(key) for key in keys if not key.endswith(f".{ATTRIBUTE}")]
            keys[:] = list(dict.fromkeys(cleaned))


def form_of(instance: Any, optimizer: bool = False) -> Form:
    """What the instance's settings say of its model's or optimizer's state; DTensors if it has a device mesh."""
    found: StateDictSettings = instance._fullshard_settings or default_settings(StateDictType.FULL_STATE_DICT)
    if instance._arguments.mesh_given:
        for one in (found.state_dict_config, found.optim_state_dict_config):
            if hasattr(one, "_use_dtensor"):
                one._use_dtensor = True
    config: Any = found.optim_state_dict_config if optimizer else found.state_dict_config
    return Form(
        _KINDS[found.state_dict_type],
        dtensor=getattr(config, "_use_dtensor", False),
        to_cpu=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )


_KINDS: dict[StateDictType, Any] = {
    StateDictType.FULL_STATE_DICT: "whole",
    StateDictType.SHARDED_STATE_DICT: "sharded",
    StateDictType.LOCAL_STATE_DICT: "local",
}
