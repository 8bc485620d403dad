"""The wording of errors and warnings of `fully_shard` and the methods of units, in the order of the code."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ArgumentTypeError, AssertedError, ConfigError, PhaseError, message

# arguments.py


def no_modules() -> ConfigError:
    """The error for an empty list of modules."""
    return ConfigError(
        "fully_shard was called with an empty list of modules.",
        expected="a module, or a list of at least one",
        got="an empty list",
        remedy="pass the modules that form the unit, or omit the call if there are none",
    )


def not_a_module(kind: str) -> ArgumentTypeError:
    """The error for a value that is not a module."""
    return ArgumentTypeError(
        f"fully_shard takes an nn.Module or a list of modules, got {kind}",
        remedy="pass the module itself, not its parameters or its name",
    )


def no_forward(kind: str) -> ConfigError:
    """The error for a container that cannot be called."""
    return ConfigError(
        f"{kind} defines no forward, so it cannot be a unit: nothing would trigger the gather of its parameters.",
        remedy="apply fully_shard to each module in it, or to the list of them to form a single unit",
    )


def applied_twice(kind: str) -> AssertedError:
    """The error for a module that is a unit already."""
    return AssertedError(
        f"fully_shard was already applied to this {kind}.",
        remedy="apply it once to each module, innermost first",
        topic="sharded-already",
    )


def ignored_not_parameters(got: str) -> ArgumentTypeError:
    """The error if `ignored_params` is not a set, or contains anything but Parameters."""
    return ArgumentTypeError(
        "ignored_params must hold Parameters.",
        expected="a set of Parameter objects, such as {model.head.weight}",
        got=got,
        remedy="look up names: {p for name, p in model.named_parameters() if name in names}",
    )


# fully_shard.py


def policy_for_a_list() -> ConfigError:
    """The error for `auto_wrap_policy` with several modules."""
    return ConfigError("auto_wrap_policy needs a single module, not a list")


def unknown_block_arguments(name: str, kind: str, allowed: Sequence[str], unknown: Sequence[str]) -> ConfigError:
    """The error for arguments of a `CustomPolicy` for a block that units do not have."""
    return ConfigError(
        f"auto_wrap_policy has arguments for {name!r} ({kind}) that cannot be set per unit.",
        expected=f"any of {', '.join(allowed)}",
        got=", ".join(unknown),
    )


def parameters_taken(kind: str, parameter: str) -> ConfigError:
    """The error for a module whose parameters the unit around it already owns."""
    return ConfigError(
        f"fully_shard was applied to a {kind} after the module around it, which already owns "
        "its parameters: the inner call would change nothing.",
        parameter=parameter,
        expected="inner modules first, the model last",
        got="the model first",
        remedy="apply fully_shard bottom-up, to blocks first and to the model last; or once, with auto_wrap_policy=",
        topic="sharded-already",
    )


def mesh_dims_without_mesh(mesh: object, dims: object) -> ConfigError:
    """The error for `dp_mesh_dims` without a mesh, or of a different class."""
    return ConfigError(
        "dp_mesh_dims names the dims of mesh= that are data-parallel.",
        expected="mesh=, a DeviceMesh with dim names, and dp_mesh_dims=DataParallelMeshDims(...)",
        got=f"mesh={mesh!r}, dp_mesh_dims={dims!r}",
    )


def reshard_of_one() -> str:
    """The warning for `reshard_after_forward=1`."""
    return message(
        "reshard_after_forward=1 (int) keeps whole units until their backward, as False (bool) does; "
        "True (bool) frees them after forward."
    )


# module.py


def unit_lost(kind: str) -> PhaseError:
    """The error for a module whose unit is gone."""
    return PhaseError(f"{kind} has lost its unit; apply fully_shard again", topic="copied-or-pickled")


def finalization_within_iteration() -> PhaseError:
    """The error for `set_manual_backward_finalization` after a backward has begun."""
    return PhaseError(
        "set_manual_backward_finalization() cannot change within an iteration whose backward has begun.",
        remedy="call it before the first forward, or after finalize_backward()",
    )


def no_manual_finalization() -> PhaseError:
    """The error for `finalize_backward` without `set_manual_backward_finalization(True)`."""
    return PhaseError(
        "finalize_backward() needs manual finalization.",
        expected="set_manual_backward_finalization(True) before the forward",
    )


def invalid_collective(what: str, comm: object) -> ConfigError:
    """The error for a custom collective that is not callable or has no `allocate`."""
    return ConfigError(
        f"A custom {what} must be callable and have a method allocate(size, *, dtype, device).", got=repr(comm)
    )


def collective_beside_group_memory() -> ConfigError:
    """The error for a unit with both a custom collective and memory from the process group."""
    return ConfigError(
        "memory from the process group and custom collectives are mutually exclusive",
        remedy="omit either: a custom collective allocates its own memory; to use one after "
        "set_allocate_memory_from_process_group_for_comm(True), call that with False first",
    )


def not_units(what: str, kind: str) -> ConfigError:
    """The error for modules that are not units."""
    return ConfigError(f"Only units can {what}.", expected="modules that fully_shard was applied to", got=kind)


def not_a_root(kind: str, unit: str) -> ConfigError:
    """The error for `share_comm_ctx` of a unit that is not a root."""
    return ConfigError(
        "share_comm_ctx takes roots, whose forward is called from outside.",
        got=f"{kind}, unit {unit!r} of a different root",
        remedy="pass only the root modules: the units below them are included",
    )


def no_such_method(name: str, method_name: str) -> ConfigError:
    """The error for registering a method that the module does not have."""
    return ConfigError(f"{name} has no method {method_name!r} to register as a forward")
