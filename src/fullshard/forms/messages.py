"""The wording of this package's errors and warnings, in the order of the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, DivergenceError, PhaseError, ReplacementError, message

# flat_shard.py


def pickled(parameter: str) -> PhaseError:
    """The error for pickling a flat shard."""
    return PhaseError(
        f"FlatShard {parameter!r} contains a part of a parameter and a process group, and cannot be pickled.",
        remedy="use fullshard.save(folder, model) or torch.distributed.checkpoint, on all ranks; or call "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) on all ranks and torch.save "
        "its result",
        topic="copied-or-pickled",
    )


def several_rectangles(parameter: str, rank: int, count: int, shape: Sequence[int]) -> CheckpointError:
    """The error for a run of which a safetensors file would keep only a part."""
    return CheckpointError(
        "Hugging Face's storage writer stores a single tensor per name and rank, but this rank's run of elements "
        "consists of several rectangles: all but the last would be lost.",
        parameter=parameter,
        rank=rank,
        expected="at most one rectangle of elements",
        got=f"{count} rectangles of a parameter of shape {shape}",
        remedy='save whole tensors (get_model_state_dict with full_state_dict=True), or use layout="rows" or '
        '"owner"; DCP\'s own FileSystemWriter writes all layouts',
    )


def not_computed_flat(func: Any, parameter: str | None, why: str | None) -> PhaseError:
    """The error for an operation that runs of elements do not support; `why` gives details, if any."""
    return PhaseError(
        f"{func} is not supported on a flat shard, of which each rank has a run of elements"
        + (f": {why}." if why else "."),
        parameter=parameter,
        expected="an element-wise operation, a reduction over all elements (sum, mean, norm, max, min, var, std, all, "
        "any), or a random fill",
        remedy="in an optimizer's step: fullshard.OwnerOptimizer(model.parameters(), ...), which steps whole tensors; "
        "if the unit is freed and this is its forward: call it through the unit's forward or "
        "register_fsdp_forward_method; "
        'otherwise use full_tensor(), or layout="rows" for DTensors',
        topic="used-while-freed",
    )


def reduced_in_trace(parameter: str) -> PhaseError:
    """The error for a reduction over all elements of a flat shard in a compiled function."""
    return PhaseError(
        "A reduction over the elements of all ranks of a flat shard cannot be compiled: the graph would contain this "
        "rank's alone.",
        parameter=parameter,
        remedy='call it outside of torch.compile (@torch.compiler.disable), or use layout="rows"',
    )


# placeholders.py


def replaced_in_sharding(parameter: str, called: str) -> ConfigError:
    """The error for using a Parameter object from before the model was sharded."""
    return ConfigError(
        "This Parameter object was replaced by its sharded form in fully_shard, and no longer has values.",
        parameter=parameter,
        got=f"{called} on the object from before fully_shard",
        remedy="build optimizers after fully_shard, from model.parameters(); share a weight only between "
        "modules of the same unit",
        topic="optimizer-built-early",
    )


def hidden_now(called: str, parameter: str | None) -> PhaseError:
    """The error for using a parameter while its instance is not gathered."""
    return PhaseError(
        f"{called} was used on a parameter whose instance is not gathered.",
        parameter=parameter,
        expected="use inside the forward of its FullyShardedDataParallel instance",
        got="use outside of that forward",
        remedy="read and write whole parameters inside FullyShardedDataParallel.summon_full_params(model)",
        topic="used-while-freed",
    )


# row_shard.py


def copied_into_whole(name: str | None) -> PhaseError:
    """The error for copying a sharded tensor into a plain tensor; `load_state_dict` quotes it for each parameter."""
    return PhaseError(
        f"{name or 'This tensor'} is sharded and the target is not: load whole values, from "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) or full_parameters(model).",
        topic="copied-or-pickled",
    )


def saved_by_torch() -> str:
    """The warning for `torch.save` of a sharded state dict."""
    return message(
        "torch.save writes only this rank's part of a sharded state dict: neither a plain model nor a different number "
        "of ranks can load it.",
        remedy="use fullshard.save(folder, model) on all ranks; or call get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) on all ranks and torch.save its result on a single rank. "
        "Shown once",
        topic="copied-or-pickled",
    )


def used_while_freed(called: Any, parameter: str) -> PhaseError:
    """The error for computing with a sharded parameter as if it were whole."""
    penalty = ""
    if called == "backward":
        penalty = "add penalty.full_tensor() to the loss where it has a penalty on the parameters; otherwise "
    moved = ""
    if ".parametrizations." in f".{parameter}":
        moved = "; if the parametrization was registered on a sharded module, register it before sharding"
    return PhaseError(
        f"{called} was called with a plain tensor and a sharded parameter whose unit is not gathered.",
        parameter=parameter,
        expected="a call through the unit's forward, which gathers the parameter first",
        got="a call from outside the unit's forward",
        remedy=f"{penalty}call the module, block(x), not block.forward(x), which bypasses the gather; if another "
        "method uses this weight, name it with register_fsdp_forward_method(module, 'method'), or wrap the call in "
        "module.unshard() ... module.reshard(); to combine such tensors on purpose make both DTensors, or use "
        f"full_tensor(){moved}",
        topic="used-while-freed",
    )


def read_by_constructor(parameter: str | None) -> PhaseError:
    """The error for `torch.tensor` of values that ranks have in parts; it runs where nothing can be communicated."""
    return PhaseError(
        "torch.tensor() cannot read a value computed from a sharded parameter.",
        parameter=parameter,
        expected="a number, or a plain tensor",
        got="a DTensor, of which each rank has a part",
        remedy="torch.stack(values), or torch.tensor([value.item() for value in values]), on every rank",
    )


def data_of_another_shape(name: str, kind: str, shape: Sequence[int], value: Any) -> ConfigError:
    """The error for a `.data` that was set to something other than the shard."""
    return ConfigError(
        "A sharded parameter's .data was set to a tensor that is not its shard.",
        parameter=name,
        expected=f"{kind} of shape {shape}, split the same way",
        got=kind_and_shape(value),
        remedy="assign a result of this parameter (p.data = p.data * 2), or load whole tensors by load_state_dict",
        topic="parameter-replaced",
    )


def data_on_meta(name: str, device: str, new_device: str) -> ConfigError:
    """The error for a `.data` that would move a parameter to or from the meta device."""
    return ConfigError(
        "Setting .data cannot move a sharded parameter to or from the meta device.",
        parameter=name,
        expected="both on the meta device, or neither, as for any tensor",
        got=f"{device}, set to a tensor on {new_device}",
        remedy="model.to_empty(device=...), then initialize or load; or assign a new Parameter to the module",
        topic="weights-on-meta",
    )


# form.py


def tied_after_sharding(parameter: str, rank: int, other: str) -> ConfigError:
    """The error for a sharded parameter that was replaced by a different parameter of its unit."""
    return ConfigError(
        "A sharded parameter was tied to a different parameter of its unit after sharding.",
        parameter=parameter,
        rank=rank,
        expected="weights that are tied before the model is sharded",
        got=f"{other} in its place",
        remedy="tie them first (module.weight = other.weight), then shard the model",
        topic="tied-weights",
    )


def partly_on_meta(parameters: Iterable[str]) -> ConfigError:
    """The error for a unit with values for only some of its parameters."""
    return ConfigError(
        "Some parameters of a unit are on the meta device and others are not.",
        parameter=", ".join(parameters),
        remedy="materialise the whole unit: model.to_empty(device=...), then initialise every module",
        topic="weights-on-meta",
    )


def several_dtypes(named: Sequence[tuple[str, str]], rank: int) -> ConfigError:
    """The error for a cast of only some of a bucket's parameters; the dtype of each is the same on every rank.

    Args:
        named: each parameter's name and dtype.
        rank: this rank.
    """
    names: dict[str, list[str]] = {}
    for name, dtype in named:
        names.setdefault(dtype, []).append(name)
    return ConfigError(
        "Some parameters of a unit, which lie in one buffer, were cast to a different dtype, and others were not.",
        parameter=", ".join([name for name, dtype in named if dtype != named[0][1]]),
        rank=rank,
        expected="one dtype",
        got="; ".join(f"{dtype}: {', '.join(group)}" for dtype, group in names.items()),
        remedy="cast the whole unit; or cast part of it before the model is sharded, or make that part a separate unit",
        topic="mixed-dtypes",
    )


def replaced_by_another(parameter: str, rank: int, expected: str, replacement: Any) -> ReplacementError:
    """The error for a replacement of a sharded parameter that cannot be adopted."""
    remedy = (
        "change values in place (copy_, load_state_dict without assign=True, or inside summon_full_params), or assign "
        "a Parameter that is split the same way"
    )
    if isinstance(replacement, torch.Tensor) and not isinstance(replacement, nn.Parameter):  # while a call runs
        remedy = (
            "torch.func.functional_call is not supported on a sharded model, because units gather their own "
            f"parameters: apply it to an unsharded copy; else {remedy}"
        )
    return ReplacementError(
        "A sharded parameter was replaced by something that is not its shard.",
        parameter=parameter,
        rank=rank,
        expected=expected,
        got=kind_and_shape(replacement),
        remedy=remedy,
        topic="parameter-replaced",
    )


def kind_and_shape(value: Any) -> str:
    """A value's class and shape, for errors."""
    return f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"


# split.py


def split_on_data_parallel_dim(parameter: str, dim: str, placement: Any) -> ConfigError:
    """The error for a DTensor that is already split on a dim of the mesh over which it would be sharded."""
    return ConfigError(
        "A parameter is already split on a data-parallel dim of the mesh.",
        parameter=parameter,
        expected=f"Replicate() on {dim!r}",
        got=placement,
        remedy="distribute it with Replicate() on the dims that dp_mesh_dims names",
        topic="mesh-dims",
    )


def placement_not_sharded_further(parameter: str, placement: Any) -> ConfigError:
    """The error for a placement that is neither Shard nor Replicate."""
    return ConfigError(
        "A tensor-parallel parameter has a placement that cannot be sharded further.",
        parameter=parameter,
        expected="Shard or Replicate",
        got=placement,
        remedy="redistribute it first",
    )


# subclass.py


def without_rows(kind: str, parameter: str, dim: Any, shape: Sequence[int]) -> ConfigError:
    """The error for a parameter of a tensor subclass without rows."""
    return ConfigError(
        f"A parameter of class {kind} cannot be split into rows.",
        parameter=parameter,
        expected="a first dim, to split",
        got=f"shape {shape}, split on dim {dim}",
        remedy="pass it in ignored_params",
    )


def not_cut_into_chunks(kind: str, parameter: str, error: Exception) -> ConfigError:
    """The error for a parameter of a tensor subclass that lacks an operation."""
    return ConfigError(
        f"A parameter of class {kind} cannot be cut into chunks: an operation on it failed.",
        parameter=parameter,
        expected="detach, split (torch.chunk), slice, clone and, from another device, to",
        got=f"{type(error).__name__}: {error}",
        remedy="implement them in the class's __torch_dispatch__, or pass it in ignored_params",
    )


def sends_uneven_rows(
    parameter: str, rank: int, most: int, counts: Sequence[int], columns: Sequence[Sequence[int]]
) -> DivergenceError:
    """The error for tensors from `fsdp_pre_all_gather` that cannot be gathered."""
    return DivergenceError(
        "fsdp_pre_all_gather returned tensors that cannot be gathered: rows do not divide evenly over the ranks.",
        parameter=parameter,
        rank=rank,
        expected=f"at most {most} tensors, with as many rows as on the first rank; fewer only where the rows end",
        got=f"numbers of tensors {counts}, numbers of rows {columns}",
        remedy="pad the tensors to the first rank's number of rows",
    )


def does_not_gather_itself(parameter: str, methods: Sequence[str], kind: str, missing: Sequence[str]) -> ConfigError:
    """The error for a tensor subclass that does not define its gather."""
    return ConfigError(
        "A parameter is a tensor subclass with inner tensors, and its class does not define how they are gathered.",
        parameter=parameter,
        expected=" and ".join(methods),
        got=f"{kind} without {' and '.join(missing)}",
        remedy="for frozen weights call fullshard.integrations.quantised.by_rows(model) before fully_shard; "
        "else implement these methods (they may be set on the class after fully_shard), or pass it in ignored_params",
    )


def returned_another_shape(parameter: str, expected: Any, shape: Any) -> ConfigError:
    """The error for a tensor of the wrong shape from `fsdp_post_all_gather`."""
    return ConfigError(
        "fsdp_post_all_gather returned a tensor with a different shape than the parameter.",
        parameter=parameter,
        expected=expected,
        got=shape,
    )
