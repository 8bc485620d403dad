"""The wording of every error and warning of `runtime/`, in the order of the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, NotSupportedError, PhaseError, UsageError, message
from ..text import size


def named(unit: str) -> str:
    """A unit's name as it appears in messages."""
    return repr(unit or "(root)")


# phases.py


def refused_transform(unit: str) -> PhaseError:
    """The error for a forward under a transform of `torch.func`."""
    return PhaseError(
        f"The forward of unit {named(unit)} was called under a transform of torch.func (vmap, grad, jacrev, "
        "jvp, ...), which sees neither gathers nor reductions.",
        expected="a forward and backward in plain autograd",
        remedy="use torch.autograd.grad (create_graph=True for higher derivatives), torch.autograd.functional, or a "
        "loop over the batch; or apply the transform to an unsharded copy of the model",
    )


def not_while_it_runs(phase: str, event: str, unit: str) -> PhaseError:
    """The error for a `reshard` or `unshard` that the table of phases refuses."""
    return PhaseError(
        f"{event.lower()}() is not allowed for unit {named(unit)} in its current phase.",
        expected="reshard() and unshard() between, before or after the unit's forward and backward",
        got=f"{event} while {phase}",
        remedy="call it after the unit's own forward or backward has ended",
        topic="called-in-a-step",
    )


# step.py


def root_is_gone(parameters: Iterable[str]) -> PhaseError:
    """The error for a backward that runs after its model was deleted."""
    return PhaseError(
        "A backward reached a unit whose root module was deleted.",
        parameter=", ".join(parameters),
        remedy="keep the root module alive until the backwards of its forwards have ended",
    )


def prefetches_another_model(unit: str, foreign: Iterable[str]) -> str:
    """The warning for units to prefetch that are below a different root."""
    return message(
        f"Unit {named(unit)} is set to prefetch units of a different model, which are ignored: "
        f"{', '.join(map(named, foreign))}.",
        expected="units below the same root module",
        remedy="call unshard(async_op=True) on that unit before its model runs",
    )


# outputs.py


def generator_calls_unit(parameter: str) -> PhaseError:
    """The error for a forward that returned a generator, whose body runs after the unit was freed."""
    return PhaseError(
        "A forward returned a generator whose body calls a module of its unit, which is freed by then.",
        parameter=parameter,
        expected="a forward that computes before it returns",
        got="this rank's part of the parameter",
        remedy="return a list of the results, or shard the modules that the generator calls as separate units",
        topic="used-while-freed",
    )


def object_holds_view(parameter: str, rank: int) -> PhaseError:
    """The error for an object that holds a view of gathered memory and cannot be rebuilt."""
    return PhaseError(
        "A forward returned an object that holds a view of a gathered parameter, which is about to be freed.",
        parameter=parameter,
        rank=rank,
        remedy="return a copy (weight.clone()), or the view itself or in a list, tuple, dict or dataclass",
        topic="used-while-freed",
    )


# root.py


def called_by_itself(unit: str) -> PhaseError:
    """The error for a part of a model that was called before the whole model."""
    return PhaseError(
        f"Unit {unit!r} was used on its own before the model that contains it.",
        expected="the first use to be of the whole model, the outermost sharded module",
        got=f"a forward, state_dict or other use of {unit!r}, which made it a separate root",
        remedy="build and shard the model again, and call the whole model once before you call its parts (under "
        "torch.no_grad() is enough)",
        topic="unit-called-alone",
    )


def other_root_runs(unit: str) -> PhaseError:
    """The error for a unit of two roots while the other root runs."""
    return PhaseError(
        f"Unit {unit!r} belongs to two roots, and the forward or backward of the other one is running.",
        remedy="finish the forward and backward of one root before the other's begin",
    )


def backward_while_summoned() -> UsageError:
    """The error for a backward inside `summon_full_params`."""
    return UsageError(
        "backward() was called inside summon_full_params() of the same model",
        remedy="call it before or after the context: the parameters shown inside it are copies, which get no gradients",
        topic="summoned-parameters",
    )


def not_waited_for() -> PhaseError:
    """The error for a pass that begins while gradient reductions are in flight."""
    return PhaseError(
        "A gradient reduction of finalize_backward(async_op=True) was not waited for.",
        expected="handle.wait() before the next forward, backward or finalize_backward of the model, or of one "
        "that shares its communication context",
    )


# units.py


def several_reductions(names: Mapping[str, Sequence[str]]) -> ConfigError:
    """The error for units with different values of `reduction=`; `names`: unit names by value."""
    return ConfigError(
        "Units of one model have different values of reduction=.",
        expected="the same value for all of them",
        got="; ".join(f"{kind!r} of {', '.join(map(repr, units[:3]))}" for kind, units in names.items()),
        remedy="give every call of fully_shard or FullyShardedDataParallel the same reduction=, or use "
        "auto_wrap_policy=",
    )


def tokens_of_fewer_ranks(unit: str, ranks: int, counted: int) -> ConfigError:
    """The error for gradients that are summed over more ranks than tokens are counted on."""
    return ConfigError(
        "Tokens are counted over the root's mesh, but a unit's gradients are summed over more ranks.",
        expected=f"meshes of at most {counted} ranks, like the root's",
        got=f"unit {unit!r} on {ranks} ranks",
        remedy="give the root the mesh of all ranks that hold data",
    )


def setting_below_the_root(setting: str, of_root: str, differing: Mapping[str, str]) -> str:
    """The warning for a setting that only takes effect on the root; `differing`: the values of units below, by name."""
    values = [f"{value!r} of {name!r}" for name, value in differing.items()]
    return message(
        f"{setting}= of units below the root is ignored: only the root's value counts.",
        expected=f"{setting}= in the call for the whole model",
        got=f"{of_root!r} of the root; " + ", ".join(values[:3]) + (", ..." if values[3:] else ""),
        remedy=f"pass {setting}={next(iter(differing.values()))!r} to the last call, "
        "fully_shard(model), or to the outermost FullyShardedDataParallel",
    )


# additions.py


def added_parameters(names: Iterable[str], rank: int) -> PhaseError:
    """The error for trainable parameters that belong to no unit."""
    return PhaseError(
        "Parameters were added to a sharded model and belong to no unit: each rank would train its own copy.",
        parameter=", ".join(names),
        rank=rank,
        remedy="apply fully_shard to the module that holds them, or add them before the model is sharded; "
        "to leave them unsharded, freeze them or list them in ignored_params",
        topic="parameter-added",
    )


# attached.py


def attached_to_several(parameter: str | None, part: object) -> PhaseError:
    """The error for an optimizer attached to a tensor over several parameters."""
    return PhaseError(
        "An optimizer to be stepped in backward was attached to a tensor over several parameters.",
        parameter=parameter,
        expected="optimizers attached to single parameters",
        got=f"one attached to {part}",
        remedy="wrap the model with use_orig_params=True, or attach them to model.parameters() of fully_shard",
    )


def attached_before_sharding(parameter: str | None, optimizer: torch.optim.Optimizer) -> PhaseError:
    """The error for an optimizer attached to a parameter from before sharding."""
    return PhaseError(
        "An optimizer was attached to a parameter before sharding replaced it by a different object.",
        parameter=parameter,
        expected="optimizers attached after the model is sharded, or a model wrapped with use_orig_params=True",
        got=f"{type(optimizer).__name__} of the original parameter, which would train nothing",
        remedy="call _apply_optimizer_in_backward with model.parameters() of the sharded model",
        topic="optimizer-built-early",
    )


# copy.py


def copied_while_it_runs(module: str) -> PhaseError:
    """The error for a deep copy during a forward or backward."""
    return PhaseError(
        f"{module} was deep-copied while a forward or backward through it was running.",
        remedy="copy it between steps",
        topic="called-in-a-step",
    )


def pickled(module: str) -> PhaseError:
    """The error for pickling a sharded module, for instance with `torch.save(model)`."""
    return PhaseError(
        f"A sharded {module} cannot be pickled: it holds process groups, and only part of the weights on each rank.",
        expected="a state dict, or a checkpoint",
        got="torch.save(model), or pickle.dumps(model)",
        remedy="fullshard.save(folder, model), on all ranks; or, for one file, call get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) on all ranks and torch.save the result on rank 0",
        topic="copied-or-pickled",
    )


def copied_in_part(module: str) -> PhaseError:
    """The error for a deep copy of only some of the modules of a unit."""
    return PhaseError(
        f"{module} is in one unit with a module that was deep-copied without it.",
        remedy="deep-copy a module that contains all modules of the unit",
        topic="copied-or-pickled",
    )


def copied_from_a_module_that_is_gone(unit: str) -> PhaseError:
    """The error for a forward of a shallow copy of a unit's module that no longer exists."""
    return PhaseError(
        f"A copy by copy.copy of unit {unit or '(root)'!r} was called after the module that it was copied from was "
        "deleted.",
        expected="that module, to which the unit belongs",
        remedy="keep it, or copy by copy.deepcopy",
        topic="copied-or-pickled",
    )


def no_unsharded_copy(parameter: str, why: str) -> NotSupportedError:
    """The error for a model whose unsharded copy cannot be planned."""
    return NotSupportedError(
        f"explain_memory(): there is no unsharded copy of {parameter}: {why}.",
        parameter=parameter,
        remedy="pass build=",
    )


# noticed.py


def input_never_ran(parameter: str) -> PhaseError:
    """The error for `backward(inputs=...)` of a unit that never ran."""
    return PhaseError(
        "backward(inputs=...) names a parameter whose unit has not run yet.",
        parameter=parameter,
        remedy="name parameters that the loss depends on",
        topic="gradients-by-autograd",
    )


def needs_what_was_freed(parameters: Iterable[str], shape: Sequence[int]) -> PhaseError:
    """The error for a graph that was kept where the engine cannot see its backward coming."""
    return PhaseError(
        "A backward needs a tensor that is gone: a parameter of a freed unit, unless one of your own tensors was "
        "changed in place.",
        parameter=", ".join(parameters) + " (the freed parameters of this shape)",
        expected="a loss that depends on tensors returned by the units' forwards, or left on modules as attributes",
        got=f"a graph kept elsewhere, through a tensor of shape {shape}",
        remedy="return the tensor you differentiate from the forward, or make it an attribute of the module; "
        "set_reshard_after_forward(False) keeps the unit gathered",
    )


def grad_of_sharded(parameters: Iterable[str]) -> PhaseError:
    """The error for `torch.autograd.grad` of sharded parameters."""
    return PhaseError(
        "torch.autograd.grad was asked for gradients of sharded parameters, which are not part of the graph: units "
        "compute with gathered parameters.",
        parameter=", ".join(parameters),
        expected="loss.backward(), which leaves reduced gradients in .grad (inputs= selects parameters)",
        remedy="call loss.backward(inputs=parameters) and read .grad; compute a penalty on weights from "
        "parameter.full_tensor() or the sharded parameters themselves",
        topic="gradients-by-autograd",
    )


# kept_graph.py


def second_order(parameter: str) -> PhaseError:
    """The error for differentiating a reduced gradient."""
    return PhaseError(
        "A loss was computed from .grad of a sharded parameter after backward(create_graph=True): the reduced "
        "gradient is not part of the graph, so the second-order term would be missing.",
        parameter=parameter,
        expected="a loss that depends on gradients with respect to inputs or activations, or treats .grad as a "
        "constant (.grad.detach())",
        remedy="for a penalty on gradients of weights use finite differences of two backwards, or compute it in a "
        "module that is not sharded",
        topic="gradients-by-autograd",
    )


# reduce_kept.py


def reduction_was_dropped() -> PhaseError:
    """The error for waiting for a reduction that was dropped."""
    return PhaseError(
        "This gradient reduction was dropped before it was waited for.",
        got="reset_iter_state(), or an exception in the reduction",
        remedy="run the forwards and backwards of this step again",
    )


def replicas_would_differ(units: Sequence[str]) -> PhaseError:
    """The error for `finalize_backward` without the all-reduce between replicas."""
    return PhaseError(
        "finalize_backward() cannot leave gradients that differ between replicas.",
        expected="set_requires_all_reduce(True)",
        got=f"False on {', '.join(map(named, units[:3]))}",
    )


def reset_while_it_runs() -> PhaseError:
    """The error for `reset_iter_state` during a pass."""
    return PhaseError(
        "reset_iter_state() was called while the model runs.",
        remedy="call it after the forward or backward has ended, for instance with an exception",
        topic="called-in-a-step",
    )


def added_to_older_gradients(parameters: Iterable[str]) -> PhaseError:
    """The error for `reset_iter_state` when the iteration's gradients were added to older ones."""
    return PhaseError(
        "reset_iter_state() cannot undo gradients that were added to older ones.",
        parameter=", ".join(parameters),
        expected="no .grad before the first backward of an iteration (zero_grad() after each step)",
        got="gradients of this iteration and of earlier ones summed in one .grad",
        remedy="call zero_grad(), and repeat all iterations since the last step",
    )


def reduced_while_it_runs() -> PhaseError:
    """The error for reducing kept gradients during a pass."""
    return PhaseError(
        "Kept gradients cannot be reduced while the model runs.",
        remedy="call it after the forward and backward have ended",
        topic="called-in-a-step",
    )


# hints.py


def hint_of_freed(which: str) -> str:
    """The hint for a gathered weight that was used after its unit was freed."""
    return (
        f"this is probably a gathered weight ({which}) that was stored in a forward and used after its unit was "
        "freed. Use the parameter in its unit's own forward, store a copy (weight.clone()), or keep the unit gathered "
        "until then (reshard_after_forward=False, unshard(), SHARD_GRAD_OP)."
    )


def hint_of_parts(parameter: str, numel: int) -> str:
    """The hint for a wrapper's parameter that was used while it showed this rank's part."""
    return (
        f"parameter {parameter!r} is sharded at this point and shows this rank's 1-D part, of {numel} elements: its "
        "unit is not gathered. A weight can be used inside the forward of its own FullyShardedDataParallel instance; "
        "wrap the module that uses it together with the one that owns it, and return results from a forward, not a "
        "generator that computes them later."
    )


def hint_of_dtypes(unit: str, dtype: torch.dtype) -> str:
    """The hint for a tensor that meets the output of a unit with mixed precision."""
    return (
        f"unit {unit!r} computes in {dtype} (mixed precision), and so are its outputs. Convert the other tensor "
        "(y.to(x.dtype)), or the unit's output, with MixedPrecisionPolicy(output_dtype=...)."
    )


# out_of_memory.py


Planned = tuple[int, Sequence[tuple[int, str]]]
"""Bytes at the peak of a step, and what each change frees of them, with its description."""


@dataclass(frozen=True)
class Account:
    """Bytes that hold memory on this rank, by use.

    Attributes:
        gathered: units and their bytes, by why they are gathered: "running", "kept", "prefetched".
        reducing, shards, gradients: bytes of reductions in flight, of sharded parameters, and of reduced gradients.
        optimizer: bytes of its state; None: not known.
        rest: allocated beyond all these; None: the device has no allocator that says so.
        unused: reserved by the allocator and not allocated; None: as above.
        asked: bytes of the allocation that failed; None: none failed.
        ranks: the number of ranks over which parameters are split.
        saved: bytes that twice as many ranks would free on this one.
        reserved: bytes that the allocator has; None: the device has no allocator that says so.
        wrapped: whether the model is a `FullyShardedDataParallel`.
    """

    gathered: dict[str, list[tuple[str, int]]]
    reducing: int
    shards: int
    gradients: int
    optimizer: int | None
    rest: int | None
    unused: int | None
    asked: int | None
    ranks: int
    saved: int
    reserved: int | None
    wrapped: bool = False


CHANGES = {
    "prefetch": ("prefetch=0", "backward_prefetch=None"),
    "free": ("reshard_after_forward=True", "sharding_strategy=ShardingStrategy.FULL_SHARD"),
    "offload": ("CPUOffloadPolicy()", "cpu_offload=CPUOffload(offload_params=True)"),
}
"""What frees memory, as an argument of `fully_shard`, and of `FullyShardedDataParallel`."""


def memory_in_words(account: Account, planned: Planned | None = None, why: str | None = None) -> str:
    """One paragraph on what holds memory, and a line for each change that frees some: see `changes_in_words`."""
    optimizer, rest = account.optimizer, account.rest
    reasons = {"running": "in use", "kept": "kept for the backward or by request", "prefetched": "gathered ahead"}
    words = [] if account.asked is None else [f"An allocation of {size(account.asked)} failed."]
    parts = [
        f"{size(sum(nbytes for _, nbytes in units))} in units {reasons[kind]} ({some([name for name, _ in units])})"
        for kind, units in account.gathered.items()
        if units
    ]
    parts += [f"{size(account.reducing)} in reductions"] if account.reducing else []
    parts += [f"{size(account.shards)} in sharded parameters", f"{size(account.gradients)} in reduced gradients"]
    parts += [f"{size(optimizer)} in optimizer state"] if optimizer is not None else []
    if rest is not None:
        unknown = "" if optimizer is not None else "optimizer state, "
        parts.append(f"{size(rest)} in {unknown}activations and the program's own tensors")
    words.append(f"This rank holds {', '.join(parts)}.")
    if account.unused:
        words.append(f"The allocator has {size(account.unused)} more, which are free but may lie in pieces.")
    return f"{' '.join(words)}\n{changes_in_words(account, planned, why)}"


def changes_in_words(account: Account, planned: Planned | None, why: str | None) -> str:
    """A line for each change that frees memory, the smallest first.

    Args:
        account: what holds memory.
        planned: the peak of a step, and for each change the bytes it frees and its description; None: estimated from
            `account`.
        why: what the plan leaves out and why, or why there is no plan; None for a full plan, or if none was tried.
    """
    rest = account.rest or 0
    named = {kind: names[account.wrapped] for kind, names in CHANGES.items()}
    kept, ahead = (sum(nbytes for _, nbytes in account.gathered[kind]) for kind in ("kept", "prefetched"))
    changes = [
        (ahead, named["prefetch"]),
        (kept, named["free"] if account.wrapped else f"{named['free']} (or reshard() where unshard() was called)"),
        (rest // 2, "half the micro-batch, and twice as many of them; or activation checkpointing, which frees more"),
        (account.saved, f"shards over {2 * account.ranks} ranks instead of {account.ranks}"),
    ]
    if account.rest is not None:  # not on a CPU
        changes.append((account.shards + account.gradients + (account.optimizer or 0), named["offload"]))
    estimated = " (of activations an estimate: half of the rest)" if rest else ""
    peak = 0
    title = f"What changes would free now, the smallest change first{estimated}:"
    if planned is not None:
        peak, changes = planned[0], list(planned[1])
        title = f"What changes would free of the {size(peak)} at the peak of a step (fullshard.plan):"
    lines = [] if not why else [f"A step could not be planned ({why})." if planned is None else f"Not planned: {why}."]
    lines.append(title)
    for nbytes, change in changes:
        fits = account.asked and account.reserved and 0 < peak - nbytes <= account.reserved
        lines += [f"  {size(nbytes):>10}  {change}{'  (fits)' if fits else ''}"] if nbytes else []
    return "\n".join([*lines, *([] if planned is not None or why else [_PLANS])])


_PLANS = "Of the peak of a whole step (planned; takes seconds): fullshard.explain_memory(model, optimizer)."


def some(names: Sequence[str]) -> str:
    """The first three of these."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
