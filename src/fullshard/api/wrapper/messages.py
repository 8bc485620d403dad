"""The wording of the wrapper's errors and warnings, in the order of the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    NotSupportedError,
    PhaseError,
    ReplacementError,
    UsageError,
    message,
)

# fsdp.py


def forward_without_parameters() -> UsageError:
    """The error for a forward within `summon_full_params` on a rank that shows no parameters."""
    return UsageError(
        "forward() was called inside summon_full_params() of the same model",
        expected="a rank that shows whole parameters",
        got="rank0_only=True, on a rank other than 0",
        topic="summoned-parameters",
    )


def wraps_nothing() -> PhaseError:
    """The error for an instance whose module is not yet registered."""
    return PhaseError("the instance has no module yet")


def hook_below_root() -> UsageError:
    """The error for `register_comm_hook` below the root."""
    return UsageError("register_comm_hook can only be called on a root instance.")


def called_past_instance(name: str) -> UsageError:
    """The error for a call of the wrapped module that bypasses its instance."""
    return UsageError(
        "The module inside a FullyShardedDataParallel instance was called directly, which gathers nothing: "
        "it would compute with only this rank's parts of its parameters.",
        parameter=name,
        expected="a call of the instance: model(x)",
        got="a call of the wrapped module: model.module(x)",
        remedy="call the instance; to generate or evaluate with the plain module, do it inside "
        "FullyShardedDataParallel.summon_full_params(model) under torch.no_grad()",
        topic="used-while-freed",
    )


# instances.py


def not_a_module(kind: str) -> ConfigError:
    """The error for a value that is not a module."""
    return ConfigError(f"FullyShardedDataParallel takes an nn.Module, got {kind}")


def group_and_mesh() -> ConfigError:
    """The error for `process_group` together with `device_mesh`."""
    return ConfigError("process_group and device_mesh are mutually exclusive: pass one of them")


def mesh_of_another_strategy(strategy: str, hybrid: bool, shape: tuple[int, ...]) -> ConfigError:
    """The error for a mesh that the strategy cannot use."""
    return ConfigError(
        f"{strategy} cannot use this device_mesh.",
        expected="a 2-D mesh (replicate, shard)" if hybrid else "a 1-D mesh",
        got=f"shape {shape}",
        remedy="use 2-D meshes with HYBRID_SHARD, 1-D meshes with the other strategies",
    )


def switches_to_no_shard(strategy: object) -> str:
    """The warning for a strategy that becomes NO_SHARD on a single rank."""
    return message(f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.")


def root_is_ignored() -> str:
    """The warning for wrapping a module that is itself ignored."""
    return message("the module passed to FullyShardedDataParallel is itself among the ignored modules")


def no_accelerator(device_id: int) -> ConfigError:
    """The error for the index of an accelerator on a machine without accelerators."""
    return ConfigError(
        f"device_id={device_id} names an accelerator, and this machine has none.",
        remedy='omit device_id, or pass torch.device("cpu")',
    )


def ignored_twice() -> ConfigError:
    """The error for `ignored_modules` together with `ignored_states`."""
    return ConfigError("ignored_modules and ignored_states are mutually exclusive: ignored_states takes modules too")


def ignored_instance(kind: str) -> ConfigError:
    """The error for an instance among the ignored modules."""
    return ConfigError(
        "ignored modules must not be FullyShardedDataParallel instances",
        got=f"a {kind} that is already sharded",
        remedy="ignore a module or shard it: remove the instance from ignored_modules, or do not wrap it",
    )


def copied_from_host(device: object) -> str:
    """The warning for a module on the CPU whose shards are elsewhere."""
    return message(
        f"The module passed to FullyShardedDataParallel is on the CPU and its shards on {device}: its "
        "values are copied there, which is slower than initializing them there. Pass device_id to choose "
        "the compute device, and build the module on that device, or on meta."
    )


def no_reset_parameters(kind: str) -> ConfigError:
    """The error for a module on meta that nothing can initialise."""
    return ConfigError(
        f"{kind} is on the meta device and has no reset_parameters().",
        remedy="pass param_init_fn=, or add reset_parameters() to the class",
        topic="weights-on-meta",
    )


def left_on_meta(kind: str) -> ConfigError:
    """The error for a module that `param_init_fn` left on meta."""
    return ConfigError(f"param_init_fn left {kind} on the meta device", topic="weights-on-meta")


def wrapped_already(name: str, kind: str) -> ConfigError:
    """The error for `auto_wrap_policy` with a model that contains instances."""
    return ConfigError(
        "auto_wrap_policy was passed for a model that is already wrapped, in whole or in part.",
        got=f"{name or 'the module itself'}, a {kind}",
        remedy="wrap by policy or by hand, not both",
        topic="sharded-already",
    )


def without_mixed_precision(exempt: Iterable[str]) -> str:
    """The warning for classes that are exempt from mixed precision."""
    return message(f"Modules of type {', '.join(sorted(exempt))} become separate instances, without mixed precision.")


def unknown_block_arguments(kind: str, unknown: Sequence[str]) -> ArgumentTypeError:
    """The error for arguments of a `CustomPolicy` for a block that instances do not have."""
    return ArgumentTypeError(
        f"auto_wrap_policy has arguments for a {kind} that FullyShardedDataParallel does not take.",
        got=", ".join(unknown),
    )


def not_uniform(trait: str, parameter: str, expected: object, like: str, got: object) -> ConfigError:
    """The error for a `FlatParameter` of parameters that differ in `trait`."""
    return ConfigError(
        f"Must flatten tensors with uniform {trait} when use_orig_params=False.",
        parameter=parameter,
        expected=f"{expected}, as {like}",
        got=got,
        remedy="set use_orig_params=True, or wrap these modules separately",
        topic="mixed-dtypes" if trait == "dtype" else None,
    )


# markers.py


def root_not_settable() -> UsageError:
    """The error for setting `_is_root` on an instance that is not a root."""
    return UsageError("_is_root cannot be set: the instance whose forward is called from outside is the root")


# configs.py


def unknown_field(kind: str, name: str) -> ConfigError:
    """The error for a field that settings do not have."""
    return ConfigError(f"{kind} has no field {name!r}")


# state_dicts.py


def config_of_another_type(name: str, expected: str, got: str, kind: str) -> CheckpointError:
    """The error for a config that does not belong to the `StateDictType`."""
    return CheckpointError(f"Expected {name} of type {expected} but got {got}: {kind} needs {expected}")


def no_instance() -> CheckpointError:
    """The error for a model without instances."""
    return CheckpointError("this model contains no FullyShardedDataParallel instance", topic="no-units")


def different_types() -> CheckpointError:
    """The error for instances with different state dict types."""
    return CheckpointError("instances in this module have different state dict types; set one for all")


def saved_within_a_pass() -> PhaseError:
    """The error for `state_dict` within a forward or backward."""
    return PhaseError(
        "state_dict() was called inside forward or backward; call it between steps", topic="called-in-a-step"
    )


def loaded_while_summoned() -> PhaseError:
    """The error for `load_state_dict` inside `summon_full_params`."""
    return PhaseError(
        "load_state_dict() was called inside summon_full_params(); call it outside", topic="summoned-parameters"
    )


def unknown_key(key: str, example: object, count: int) -> CheckpointError:
    """The error for a key of optimizer state that the optimizer does not have."""
    return CheckpointError(
        "The optimizer state has a key that the optimizer does not.",
        parameter=key,
        expected=f"keys such as {example!r} ({count} in all)",
        remedy="pass the model and the optimizer that the state belongs to",
    )


def deprecated_method(old: str, new: str) -> str:
    """The warning for a method that PyTorch deprecated."""
    return message(
        f"``FullyShardedDataParallel.{old}`` is being deprecated and is replaced by ``FullyShardedDataParallel.{new}``."
    )


def deprecated_input() -> str:
    """The warning for `optim_input`."""
    return message("The `optim_input` argument is deprecated: pass the optimizer itself, as `optim`.")


# summon.py


def writes_back_from_one_rank() -> NotSupportedError:
    """The error for `writeback` together with `rank0_only`."""
    return NotSupportedError(
        "writeback=True and rank0_only=True is not supported: the other ranks have nothing to write back.",
        remedy="set writeback=False, or rank0_only=False",
        topic="summoned-parameters",
    )


def summoned_twice(rank: int, unit: str) -> UsageError:
    """The error for nested `summon_full_params` of the same instance."""
    return UsageError(
        "Cannot manually unshard parameters when already unsharding parameters",
        rank=rank,
        expected="an instance that is not inside summon_full_params",
        got=f"{unit} inside summon_full_params",
        remedy="leave the context before entering it again",
        topic="summoned-parameters",
    )


def summoned_within_a_pass(rank: int, unit: str, forward: bool) -> UsageError:
    """The error for `summon_full_params` within a forward, or a backward."""
    return UsageError(
        "Cannot manually unshard parameters during forward/backward",
        rank=rank,
        expected="a call between steps",
        got=f"{unit} during its model's {'forward' if forward else 'backward'}",
        remedy="call summon_full_params before the forward, or after the backward",
        topic="called-in-a-step",
    )


def backward_through_whole() -> UsageError:
    """The error for a backward through parameters that `summon_full_params` showed."""
    return UsageError(
        "backward() reached whole parameters of summon_full_params(), which are not trained",
        remedy="call the model outside of summon_full_params() to train it",
        topic="summoned-parameters",
    )


def flat_parameter_changed(parameters: Iterable[str]) -> UsageError:
    """The error for a `FlatParameter` that was changed while a whole copy of its values was shown."""
    return UsageError(
        "A FlatParameter was changed inside summon_full_params, which shows a copy of its values: "
        "writes to the copy are dropped, and the FlatParameter has its new values.",
        parameter=", ".join(parameters),
        remedy="step the optimizer outside of summon_full_params; or call it with writeback=False",
        topic="summoned-parameters",
    )


def replaced_by_another_shape(parameter: str, expected: object, got: object) -> ReplacementError:
    """The error for a parameter that was replaced inside `summon_full_params`."""
    return ReplacementError(
        "A parameter was replaced inside summon_full_params by one of a different shape; the replacement was dropped.",
        parameter=parameter,
        expected=expected,
        got=got,
        topic="parameter-replaced",
    )
