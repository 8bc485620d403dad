"""Model state dicts of the wrapper: whole, sharded or local values, always under the unwrapped module's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint.parts import cut_for, joined_whole, split_part, whole_of
from ...checkpoint.sharded_tensor import is_sharded_tensor, slices_sharded_tensor
from ...errors import CheckpointError, PhaseError
from ...names import WRAPPED, clean_name
from ...runtime import Runner
from ...shard import ATTRIBUTE, Bucket, FlatParameterForm, Member
from .names import check_shapes, names_of_members
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


class _Mark(torch.Tensor):
    """Stands for a parameter while `nn.Module.state_dict` runs; found again in the result by what it is."""

    member: Member

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0]  # detach() and the like: still the same mark


class StateDictMethods:
    """The part of `FullyShardedDataParallel` that is about its model's state dict."""

    _settings: StateDictSettings | None

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
                    raise CheckpointError(
                        f"Expected {name} of type {expected.__name__} but got {type(given).__name__}: "
                        f"it goes with {kind.name}"
                    )
                setattr(new, name, accept(given, expected, name))
        before = StateDictMethods.get_state_dict_type(module)
        for instance in instances_of(module):
            instance._settings = StateDictSettings(kind, new.state_dict_config, new.optim_state_dict_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of all instances in `module`.

        Raises:
            CheckpointError: they differ, or there are none.
        """
        found: StateDictSettings | None = None
        for instance in instances_of(module):
            one = instance._settings or default_settings(StateDictType.FULL_STATE_DICT)
            if found is not None and one != found:
                raise CheckpointError("instances in this module have different state dict types; set one for all")
            found = one
        if found is None:
            raise CheckpointError("this module contains no FullyShardedDataParallel instance")
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
            _strip(result, prefix)
            return result
        root = instance._lazy_init()
        if root.pass_top is not None or root.in_backward:
            raise PhaseError("state_dict() was called inside forward or backward; call it between steps")
        runner: Runner = instance._runner()
        runner.reshard()
        runner.unit.refresh()
        with _marked(runner):
            result = plain(destination=destination, prefix=prefix, keep_vars=keep_vars)
        _fill(instance, runner, result, prefix)
        _strip(result, prefix)
        return result

    # Loading.

    @staticmethod
    def _before_load(instance: Any, state_dict: Any, prefix: str, _meta: Any, strict: bool, *lists: Any) -> None:
        """Load pre-hook: names as the wrapped module knows them, and values as this rank holds them."""
        missing = lists[0]
        if is_summoned(instance):
            raise PhaseError("load_state_dict() was called inside summon_full_params(); call it outside")
        runner: Runner = instance._runner()
        runner.reshard()
        runner.unit.refresh()
        for inner_path, inner in _named_instances(instance):
            unmanaged = check_shapes(inner, state_dict, prefix + inner_path)
            for key in unmanaged if inner is instance else ():
                value = state_dict.get(prefix + key)
                if is_sharded_tensor(value) or hasattr(value, "full_tensor"):  # saved where an instance managed it
                    state_dict[prefix + key] = whole_of(value, instance.compute_device)
        inside = f"{prefix}{WRAPPED}."
        values = {key[len(prefix) :]: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        _load_unit(instance, runner, values, prefix, missing)
        for key, value in values.items():
            state_dict[inside + key] = value

    @staticmethod
    def _after_load(instance: Any, incompatible: Any) -> None:
        """Load post-hook: missing and unexpected keys under the names of the unwrapped module."""
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            cleaned = [clean_name(key) for key in keys if not key.endswith(f".{ATTRIBUTE}")]
            keys[:] = list(dict.fromkeys(cleaned))


def settings_of(instance: Any) -> StateDictSettings:
    """The instance's settings; DTensors where it was made with a device mesh."""
    found: StateDictSettings = instance._settings or default_settings(StateDictType.FULL_STATE_DICT)
    if instance._arguments.mesh_given:
        for config in (found.state_dict_config, found.optim_state_dict_config):
            if hasattr(config, "_use_dtensor"):
                config._use_dtensor = True
    return found


@contextmanager
def _marked(runner: Runner) -> Iterator[None]:
    """Marks in the places of the unit's parameters, so that they come out in order and under their names."""
    marks: dict[int, _Mark] = {}
    try:
        for bucket in runner.unit.buckets:
            if isinstance(bucket.form, FlatParameterForm):
                bucket.form.unregister()
            for member in bucket.members:
                mark = marks[id(member)] = torch.Tensor._make_subclass(_Mark, torch.empty(0))
                mark.member = member
                for place in member.places:
                    place.registry[place.name] = mark
        yield
    finally:
        for bucket in runner.unit.buckets:
            for member in bucket.members:
                for place in member.places:
                    if place.outside:
                        place.registry.pop(place.name, None)
                    else:
                        place.registry[place.name] = member.sharded
            if isinstance(bucket.form, FlatParameterForm):
                bucket.form.register_again()


def _fill(instance: Any, runner: Runner, result: Any, prefix: str) -> None:
    """Put values where the marks are; drop everything on ranks that are to get nothing."""
    settings = settings_of(instance)
    kind, config = settings.state_dict_type, settings.state_dict_config
    keys: dict[int, list[str]] = {}
    for key, value in result.items():
        if isinstance(value, _Mark):
            keys.setdefault(id(value.member), []).append(key)
    wanted = not (kind is StateDictType.FULL_STATE_DICT and config.rank0_only and instance.rank != 0)  # type: ignore[attr-defined]
    for index, bucket in enumerate(runner.unit.buckets):
        if kind is StateDictType.LOCAL_STATE_DICT:
            _fill_local(bucket, result, keys, prefix, index)
            continue
        if bucket.layout.world > 1:
            whole = bucket.gather_whole(runner.settings.comm, bucket.shard)
        else:
            whole = bucket.shard
        if not wanted:
            continue
        for member, view in zip(bucket.members, bucket.whole_views(whole), strict=True):
            value = _value(view.detach(), bucket, member, kind, config)
            for key in keys.get(id(member), ()):
                result[key] = value
        del whole
    _finish_others(instance, result, prefix, config.offload_to_cpu, wanted)


def _finish_others(instance: Any, result: Any, prefix: str, to_cpu: bool, wanted: bool) -> None:
    """Buffers in their own dtype, everything where it is wanted."""
    originals = instance._buffers_cast.originals_by_name(instance)
    for key in [key for key in result if key.startswith(prefix)]:
        if not wanted:
            del result[key]
            continue
        value = result[key]
        dtype = originals.get(key[len(prefix) :])
        if isinstance(value, torch.Tensor) and dtype is not None:
            value = value.to(dtype)
        if to_cpu and isinstance(value, torch.Tensor) and value.device.type != "cpu":
            value = value.cpu()
        result[key] = value


def _value(view: torch.Tensor, bucket: Bucket, member: Member, kind: StateDictType, config: Any) -> Any:
    if kind is not StateDictType.FULL_STATE_DICT:
        return split_part(bucket, member, view, config._use_dtensor, config.offload_to_cpu)
    whole = joined_whole(bucket, member, view)
    made = whole.cpu() if config.offload_to_cpu else whole
    return made.clone() if made.data_ptr() == view.data_ptr() else made


def _fill_local(bucket: Bucket, result: Any, keys: dict[int, list[str]], prefix: str, index: int) -> None:
    if bucket.layout.world == 1:
        raise CheckpointError(
            "LOCAL_STATE_DICT can only be used when parameters are flattened and sharded: not with NO_SHARD"
        )
    for member in bucket.members:
        for key in keys.get(id(member), ()):
            del result[key]
    name = ATTRIBUTE if index == 0 else f"{ATTRIBUTE}_{index}"
    result[f"{prefix}{name}"] = slices_sharded_tensor(bucket.shard.detach(), bucket.axes.shard)


def _strip(result: Any, prefix: str) -> None:
    """Take `_fsdp_wrapped_module.` out of the names below `prefix`; the order stays, for they are the last ones."""
    inside = f"{prefix}{WRAPPED}."
    for key in [key for key in result if key.startswith(prefix)]:
        value = result.pop(key)
        result[prefix + key[len(inside) :] if key.startswith(inside) else key] = value
    metadata = getattr(result, "_metadata", None)
    if metadata is not None:
        for key in list(metadata):
            if f"{key}.".startswith(inside):
                metadata[(prefix + clean_name(f"{key}."[len(inside) :])).rstrip(".")] = metadata.pop(key)


# Loading.


def _named_instances(instance: Any) -> Iterator[tuple[str, Any]]:
    for path, child in instance.named_modules():
        if isinstance(child, StateDictMethods):
            cleaned = clean_name(f"{path}." if path else "")
            yield cleaned, child


def _load_unit(instance: Any, runner: Runner, values: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """Replace whole values of the instance's own parameters by what this rank holds."""
    by_bucket: dict[int, list[tuple[Member, list[str]]]] = {}
    for bucket, member, names in names_of_members(instance):
        by_bucket.setdefault(id(bucket), []).append((member, names))
    for index, bucket in enumerate(runner.unit.buckets):
        members = by_bucket.get(id(bucket), [])
        local = bucket.shard.detach().clone()
        name = ATTRIBUTE if index == 0 else f"{ATTRIBUTE}_{index}"
        sliced = name in values
        if sliced:
            _take_slice(values.pop(name), local, prefix + name)
        for member, names in members:
            present = [n for n in names if n in values]
            given = [values.pop(n) for n in present]
            if given and not sliced:
                part = cut_for(bucket, member, whole_of(given[-1], bucket.axes.device))
                if part.numel():
                    bucket.part(local, member).copy_(part)
            if bucket.flat_parameter is None and (given or sliced):
                own = bucket.shown(bucket.part(local, member), member)
                values.update(dict.fromkeys(names if sliced else present, own))
            elif bucket.flat_parameter is not None and not sliced:
                missing.extend(prefix + n for n in names if n not in present)
        if bucket.flat_parameter is not None:
            with torch.no_grad():  # here, for a checkpoint wrapper around the module would rename the key
                bucket.shard.copy_(local)


def _take_slice(given: Any, local: torch.Tensor, name: str) -> None:
    slices = given.local_shards() if is_sharded_tensor(given) else [given]
    tensor = slices[0].tensor if slices and hasattr(slices[0], "tensor") else given
    if tuple(tensor.shape) != tuple(local.shape):
        raise CheckpointError(
            "A LOCAL state dict fits only the same model, wrapped the same way, on as many ranks.",
            parameter=name,
            expected=f"a slice of shape {tuple(local.shape)}",
            got=f"shape {tuple(tensor.shape)}",
            remedy="save FULL or SHARDED state dicts to load on other ranks",
        )
    local.copy_(tensor.detach())
