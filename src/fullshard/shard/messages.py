"""The wording of every error and warning of `shard/`, in the order of the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import (
    AssertedError,
    ConfigError,
    DivergenceError,
    LayoutError,
    PhaseError,
    UsageError,
    message,
)

# unit.py


def written_while_gathered(parameters: Iterable[str], rank: int) -> PhaseError:
    """The error for a forward that wrote to its own parameters."""
    return PhaseError(
        "A gathered parameter was written to: the change is in a temporary copy, which "
        "each rank keeps or loses on its own.",
        parameter=", ".join(dict.fromkeys(parameters)),
        rank=rank,
        expected="parameters that change only between steps",
        got="a change in place, or of .data, while it was gathered",
        remedy="change the sharded parameter between steps (under torch.no_grad()), or compute with a changed "
        "copy; Embedding(max_norm=) renormalises rows in its forward: omit max_norm, or put the weight in "
        "ignored_params",
        topic="weights-changed-in-a-step",
    )


def assigned_in_forward(parameter: str, rank: int, unit: str) -> PhaseError:
    """The error for a Parameter that was assigned to a module while forwards run."""
    return PhaseError(
        "A parameter was assigned to a module of a sharded model inside a forward: each rank would train its own.",
        parameter=parameter,
        rank=rank,
        expected="parameters that are assigned between steps",
        got=f"a different object in its place, in or before the forward of unit {unit or '(root)'!r}",
        remedy="assign it between steps, or change its values in place between steps (copy_)",
        topic="parameter-replaced",
    )


# gradients.py


def not_reduced_yet(unit: str, parameters: Iterable[str], rank: int, what: str, do: str) -> PhaseError:
    """The error for an operation that a unit with unreduced gradients refuses; see `refuse_unreduced`."""
    return PhaseError(
        f"Unit {unit or '(root)'!r} cannot be {what} now: it has gradients not yet reduced.",
        parameter=", ".join(parameters),
        rank=rank,
        remedy=f"{do} after the backward that reduces them (set_requires_gradient_sync(True)), "
        "or after optimizer.zero_grad() and before the next backward",
    )


# reduce_buffer.py


def not_dense(parameter: str) -> PhaseError:
    """The error for a sparse gradient."""
    return PhaseError(
        "A parameter has a sparse gradient, which cannot be reduced into shards.",
        parameter=parameter,
        expected="a dense gradient",
        got="a sparse gradient",
        remedy="build the layer with sparse=False (nn.Embedding, nn.EmbeddingBag), or put the parameter in "
        "ignored_params and reduce its gradient yourself",
    )


# hooks.py


def not_a_gradient(parameter: str, rank: int, expected: str, got: str) -> ConfigError:
    """The error for a hook that returned an invalid gradient."""
    return ConfigError(
        "A hook on a sharded parameter returned an invalid gradient.",
        parameter=parameter,
        rank=rank,
        expected=f"None, or {expected}, like the gradient passed to it",
        got=got,
        remedy="compute the result from the gradient passed to the hook (torch.zeros_like(grad), for instance)",
    )


# delivery.py


def two_gradients(parameter: str, rank: int) -> ConfigError:
    """The error for different gradients assigned to a parameter and to an optimizer view over it."""
    return ConfigError(
        "Gradients were assigned to both a parameter and the optimizer view over it.",
        parameter=parameter,
        rank=rank,
        expected="an assignment to only one of them: they share their .grad",
        got="two different tensors since the last step or backward",
        remedy="assign to the parameter's .grad or to the view's, or add one to the other",
    )


def view_of_another_shape(parameter: str, expected: tuple[int, ...], got: tuple[int, ...]) -> ConfigError:
    """The error for the `.data` of an optimizer view that was set to a tensor of a different shape."""
    return ConfigError(
        "The .data of an optimizer view was set to a tensor of a different shape.",
        parameter=parameter,
        expected=f"shape {expected}",
        got=f"shape {got}",
        remedy="assign a result of the view (p.data = p.data * 2)",
    )


def zero_in_a_view(parameter: str) -> str:
    """The warning for a parameter without a gradient, whose neighbours in an optimizer view have one."""
    return message(
        "A parameter got no gradient in this step, but others in its optimizer view did: the optimizer "
        "sees a zero gradient, and weight decay and momentum still move the parameter.",
        parameter=parameter,
        remedy="if they must not, exclude it from the view (optimizer_view(model, params=...)), or pass "
        "model.parameters() to the optimizer; this warning appears once per unit",
    )


def view_on_meta(parameters: Iterable[str]) -> ConfigError:
    """The error for an optimizer view of parameters that have no values."""
    return ConfigError(
        "An optimizer view was requested while parameters are on the meta device.",
        parameter=", ".join(parameters),
        remedy="call model.to_empty(device=...) first",
        topic="weights-on-meta",
    )


def viewed_twice(parameter: str) -> ConfigError:
    """The error for a parameter that already has an optimizer view."""
    return ConfigError(
        "A parameter already has an optimizer view: two optimizers would update it.",
        parameter=parameter,
        remedy="use each parameter in only one optimizer_view, and drop the old optimizer first",
    )


# build.py


def unusable_override(parameter: str, param_dtype: Any, own: Any, chosen: Any) -> ConfigError:
    """The error for an invalid result of `param_dtype_override_fn`."""
    return ConfigError(
        "param_dtype_override_fn returned an invalid value.",
        parameter=parameter,
        expected=f"None, param_dtype ({param_dtype}) or the parameter's own dtype ({own})",
        got=repr(chosen),
    )


def not_cut_into_blocks(name: str, parameter: Any) -> ConfigError:
    """The error for a BlockShard of a parameter that cannot be cut into runs of rows."""
    return ConfigError(
        "shard_placement_fn returned a BlockShard for a parameter that cannot be cut into runs of rows.",
        parameter=name,
        expected="a plain tensor of at least one dim",
        got=f"{type(parameter).__name__} of shape {tuple(parameter.shape)}",
    )


def unusable_placement(parameter: str, placement: Any, layout: Any) -> ConfigError:
    """The error for an unsupported placement from `shard_placement_fn`."""
    return ConfigError(
        "shard_placement_fn returned an unsupported placement.",
        parameter=parameter,
        expected='None, torch.distributed.tensor.Shard or ShardPlacementResult; Shard with layout="rows" only',
        got=f"{placement!r} with layout={layout!r}",
    )


def mesh_on_another_device(parameter: str, expected: Any, device: Any) -> ConfigError:
    """The error for a mesh on a different device from `shard_placement_fn`."""
    return ConfigError(
        "shard_placement_fn returned a mesh on a different device.", parameter=parameter, expected=expected, got=device
    )


def placement_on_missing_dim(parameter: str, dims: int, shape: Sequence[int], placement: Any) -> AssertedError:
    """The error for a placement on a dim that the parameter lacks."""
    return AssertedError(
        "shard_placement_fn returned a placement on a dim that the parameter does not have.",
        parameter=parameter,
        expected=f"Shard(dim) with dim from {-dims} to {dims - 1}, for shape {shape}",
        got=placement,
    )


# find.py


def lazy_parameter(name: str) -> ConfigError:
    """The error for a parameter that has no shape yet."""
    return ConfigError(
        "A parameter of a lazy module has no shape yet.",
        parameter=name,
        remedy="run one forward on a small input before fully_shard",
    )


def inner_tensors(name: str, kind: str) -> ConfigError:
    """The error for a tensor subclass that cannot be cut."""
    return ConfigError(
        "A parameter is a tensor subclass with inner tensors (a quantised weight, for instance), which "
        "would be lost by cutting it.",
        parameter=name,
        expected="a plain tensor, or for fully_shard a class with fsdp_pre_all_gather and "
        "fsdp_post_all_gather that is not inside a DTensor",
        got=kind,
        remedy="shard it with fully_shard, after fullshard.integrations.quantised.by_rows(model) if it is frozen; "
        "implement these two methods; or put it in ignored_params (ignored_states)",
    )


def sparse_parameter(name: str, layout: object) -> ConfigError:
    """The error for a parameter that is not dense."""
    return ConfigError(
        "A parameter is not dense, so it cannot be cut into shards.",
        parameter=name,
        expected="torch.strided, the layout of dense tensors",
        got=layout,
        remedy="make it dense before sharding (to_dense()), or put it in ignored_params (ignored_states)",
    )


def on_another_device(name: str, home: Any, device: Any) -> ConfigError:
    """The error for a parameter on a device that is not its mesh's."""
    if device.type == home.type:
        remedy = "call torch.accelerator.set_device_index(local_rank) before making the mesh and the model"
    else:
        remedy = f"pass a mesh of its device, init_device_mesh({device.type!r}, (world_size,))"
    return ConfigError(
        "A parameter is on a device that is not its mesh's: collectives and computation would not wait for each other.",
        parameter=name,
        expected=home,
        got=device,
        remedy=f"{remedy}; or move it with model.to({str(home)!r})",
    )


def tied_between_units(parameter: str) -> LayoutError:
    """The error for a parameter tied between units that cannot move from one to the other."""
    return LayoutError(
        "A parameter that is tensor-parallel, or of a tensor subclass, is tied between units.",
        parameter=parameter,
        remedy="let one fully_shard call take all modules that use it: shard the module around them, "
        "or a list of them, before sharding any of them on its own",
        topic="tied-weights",
    )


def is_a_dtensor(parameter: str, layout: Any) -> ConfigError:
    """The error for a DTensor in a layout other than rows."""
    return ConfigError(
        "fully_shard was given a parameter that is already a DTensor (tensor parallelism).",
        parameter=parameter,
        expected='layout="rows", whose sharded parameters can describe both splits',
        got=f"layout={layout!r}",
        remedy='use layout="rows" for this unit, or pass the parameter in ignored_params',
        topic="mesh-dims",
    )


def share_memory(other: str, name: str) -> LayoutError:
    """The error for two Parameter objects that share memory."""
    return LayoutError(
        "Two Parameter objects share the same memory: sharded separately, they would drift apart.",
        parameter=f"{other} and {name}",
        remedy="tie them by assigning the same Parameter object to both modules",
        topic="tied-weights",
    )


def used_outside_its_unit(unit: str, parameter: str) -> LayoutError:
    """The error for a weight that is also used outside its unit."""
    return LayoutError(
        f"A weight of unit {unit!r} is also used outside the unit, where it is not gathered.",
        parameter=parameter,
        expected="one unit around all uses of a tied weight",
        remedy="apply fully_shard to the innermost module that contains all uses, after its parts",
        topic="tied-weights",
    )


# clone.py


def copied_without_its_tie(parameter: str, rank: int) -> PhaseError:
    """The error for a deep copy of a part whose weight is tied to a module outside it."""
    return PhaseError(
        "A part of a sharded model was deep-copied, and one of its parameters is tied to a module outside it.",
        parameter=parameter,
        rank=rank,
        remedy="deep-copy the whole model",
        topic="tied-weights",
    )


# asked.py


def forward_on_meta(parameters: Iterable[str]) -> PhaseError:
    """The error for a forward with parameters that have no values."""
    return PhaseError(
        "A forward was called while parameters are on the meta device and have no values.",
        parameter=", ".join(parameters),
        remedy="call model.to_empty(device=...), then torch.manual_seed(rank) (each rank draws the rows that it "
        "owns: with the same seed all would draw the same values), and initialise every module "
        "(reset_parameters()); or load a state dict",
        topic="weights-on-meta",
    )


# scaling.py


def other_counts_of_batches(rank: int, count: int, total: int, world: int) -> DivergenceError:
    """The error for ranks that counted tokens for different numbers of micro-batches."""
    return DivergenceError(
        "Ranks called set_token_count with different numbers of micro-batches.",
        rank=rank,
        expected="the same number on every rank",
        got=f"{count} on this rank, {total} on all {world} ranks together",
        remedy="give one count per backward on every rank, 0 where a rank has no tokens",
        topic="token-counts",
    )


def tokens_not_counted(backwards: int | None) -> UsageError:
    """The error for a backward without a token count; `backwards`: how many the last count covered, if any."""
    if backwards is None:
        summary, got = 'A backward with reduction="tokens" began before its tokens were counted.', "no count"
    else:
        summary = 'A backward with reduction="tokens" began after all backwards covered by the last count.'
        got = f"one more than the {backwards} of the last count"
    return UsageError(
        summary,
        expected="set_token_count(model, counts) once per step, with a count for each of its backwards",
        got=got,
        remedy="call fullshard.set_token_count(model, count) before the step's first backward, or "
        "set_token_count(model, [count, ...]) with the counts of all micro-batches of the step",
        topic="token-counts",
    )


# gradient_dtypes.py


def several_grad_dtypes(names: Mapping[Any, Sequence[str]]) -> ConfigError:
    """The error for parameters of one buffer with different values of grad_dtype."""
    return ConfigError(
        "Parameters of a unit, which are reduced in one buffer, have different values of grad_dtype.",
        expected="the same grad_dtype for all of them",
        got="; ".join(f"{dtype or 'unset'}: {', '.join(group[:3])}" for dtype, group in names.items()),
        remedy="set grad_dtype before fully_shard, which creates a separate buffer for each value",
        topic="mixed-dtypes",
    )


# asked.py


def steps_may_be_undone(units: Iterable[str]) -> PhaseError:
    """The error for using a model between a backward that stepped it without clipping and `optimizer.step()`."""
    return PhaseError(
        "Steps that a backward took may still be undone, to clip gradients; the model cannot be used meanwhile.",
        expected='optimizer.step() after the backward, with step_in_backward(clip="redo")',
        got="units that stepped unclipped: " + ", ".join(name or "(root)" for name in units),
        remedy="call optimizer.step() first; after a backward that raised, undo() of what step_in_backward returned",
        topic="step-in-backward",
    )


# parking.py


def parked_asked_to_compute(units: Iterable[str]) -> PhaseError:
    """The error for a forward, backward or unshard() of a parked model."""
    return PhaseError(
        "A model whose shards are parked in host memory was asked to compute.",
        expected="save, load, state_dict and optimizer steps while it is parked, and no forward, backward or unshard()",
        got="parked units " + ", ".join(name or "(root)" for name in dict.fromkeys(units)),
        remedy="call fullshard.resume(model, *optimizers) first, on every rank",
    )
