"""What the engine says to its users, in the order of the code: the wording of every error and warning of `runtime/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..errors import ConfigError, PhaseError, UsageError, message


def named(unit: str) -> str:
    """A unit's name as users read it."""
    return repr(unit or "(root)")


# phases.py


def refused_transform(unit: str) -> PhaseError:
    """The error for a forward under a transform of `torch.func`."""
    return PhaseError(
        f"The forward of unit {named(unit)} was called under a transform of torch.func (vmap, grad, jacrev, "
        "jvp, ...), which sees neither gathers nor reductions.",
        expected="a forward and backward by plain autograd",
        remedy="use torch.autograd.grad (create_graph=True for higher derivatives), torch.autograd.functional, or a "
        "loop over the batch; or apply the transform to an unsharded copy of the model",
    )


def not_while_it_runs(phase: str, event: str, unit: str) -> PhaseError:
    """The error for a `reshard` or `unshard` that the table of phases refuses."""
    return PhaseError(
        f"Unit {named(unit)} cannot serve {event.lower()} now.",
        expected="reshard() and unshard() between, before or after the unit's forward and backward",
        got=f"{event} while {phase}",
        remedy="call it when the unit's own forward or backward is over",
        topic="called-in-a-step",
    )


# step.py


def root_is_gone(parameters: Iterable[str]) -> PhaseError:
    """The error for a backward that outlives its model."""
    return PhaseError(
        "A backward reached a unit whose root is gone.",
        parameter=", ".join(parameters),
        remedy="keep the root module until the backwards of its forwards are done",
    )


def prefetches_another_model(unit: str, foreign: Iterable[str]) -> str:
    """The warning for units to prefetch that are below another root."""
    return message(
        f"Unit {named(unit)} is to prefetch units of another model, which is not done: "
        f"{', '.join(map(named, foreign))}.",
        expected="units below the same root module",
        remedy="call unshard(async_op=True) on that unit before its model runs",
    )


# outputs.py


def generator_calls_unit(parameter: str) -> PhaseError:
    """The error for a forward that returned a generator, whose body runs once the unit is freed."""
    return PhaseError(
        "A forward returned a generator, whose body calls a module of its unit: the unit is freed by then.",
        parameter=parameter,
        expected="a forward that computes before it returns",
        got="this rank's part of the parameter",
        remedy="return a list of the results, or shard the modules that the generator calls as units of their own",
        topic="used-while-freed",
    )


def object_holds_view(parameter: str, rank: int) -> PhaseError:
    """The error for an object that holds a view of gathered memory, and that cannot be rebuilt."""
    return PhaseError(
        "A forward returned an object that holds a view of a gathered parameter, which is about to be freed.",
        parameter=parameter,
        rank=rank,
        remedy="return a copy (weight.clone()), or the view itself or in a list, tuple, dict or dataclass",
        topic="used-while-freed",
    )


# root.py


def called_by_itself(unit: str) -> PhaseError:
    """The error for a part of a model that was called before the model."""
    return PhaseError(
        f"Unit {unit!r} was called by itself before the model that it is part of was called.",
        expected="the first forward to be that of the whole model, the outermost module that was sharded",
        got=f"a forward of {unit!r}, which made it a model of its own",
        remedy="call the whole model once before you call its parts (under torch.no_grad() will do); now the "
        "model has to be built and sharded anew",
        topic="unit-called-alone",
    )


def other_root_runs(unit: str) -> PhaseError:
    """The error for a unit of two models of which the other one runs."""
    return PhaseError(
        f"Unit {unit!r} is part of two roots, and the other one's forward or backward is running.",
        remedy="let each root's forward and backward end before the other's begin",
    )


def backward_while_summoned() -> UsageError:
    """The error for a backward inside of `summon_full_params`."""
    return UsageError(
        "backward() was called inside summon_full_params() of the same model",
        remedy="call it before the context or after it: what that shows are copies, which get no gradients",
        topic="summoned-parameters",
    )


def not_waited_for() -> PhaseError:
    """The error for a pass that begins while gradients are in flight."""
    return PhaseError(
        "A gradient reduction of finalize_backward(async_op=True) was not waited for.",
        expected="handle.wait() before the next forward, backward or finalize_backward of the model, or of one "
        "that shares its communication context",
    )


# units.py


def several_reductions(names: Mapping[str, Sequence[str]]) -> ConfigError:
    """The error for units that reduce otherwise than others; `names`: of units, by their setting."""
    return ConfigError(
        "Units of one model have different settings of reduction=.",
        expected="the same for all of them",
        got="; ".join(f"{kind!r} of {', '.join(map(repr, some[:3]))}" for kind, some in names.items()),
        remedy="give every call of fully_shard or FullyShardedDataParallel the same reduction=, or use "
        "auto_wrap_policy=",
    )


def tokens_of_fewer_ranks(unit: str, ranks: int, counted: int) -> ConfigError:
    """The error for gradients that are summed over more ranks than tokens are counted over."""
    return ConfigError(
        "Tokens are counted over the root's mesh, and a unit's gradients are summed over more ranks.",
        expected=f"meshes of at most {counted} ranks, as the root's",
        got=f"unit {unit!r} on {ranks} ranks",
        remedy="give the root the mesh of all ranks that hold data",
    )


def setting_below_the_root(setting: str, own: str, asked: Mapping[str, str]) -> str:
    """The warning for a setting that only the root's counts of; `asked`: what units below have, by name."""
    told = [f"{value!r} of {name!r}" for name, value in asked.items()]
    return message(
        f"{setting}= of units below the root counts for nothing: the root's does.",
        expected=f"{setting}= in the call for the whole model",
        got=f"{own!r} of the root; " + ", ".join(told[:3]) + (", ..." if told[3:] else ""),
        remedy=f"give {setting}={next(iter(asked.values()))!r} to the last call, "
        "fully_shard(model), or to the outermost FullyShardedDataParallel",
    )


# additions.py


def added_parameters(names: Iterable[str], rank: int) -> PhaseError:
    """The error for trainable parameters that no unit has."""
    return PhaseError(
        "Parameters were added to a sharded model, and no unit has them: ranks would train them apart.",
        parameter=", ".join(names),
        rank=rank,
        remedy="apply fully_shard to the module that holds them, or add them before the model is sharded; "
        "freeze them, or name them in ignored_params, to leave them alone",
        topic="parameter-added",
    )


# attached.py


def attached_to_several(parameter: str | None, part: object) -> PhaseError:
    """The error for an optimizer in backward of a tensor over several parameters."""
    return PhaseError(
        "An optimizer was attached to a tensor over several parameters, to be stepped in backward.",
        parameter=parameter,
        expected="optimizers attached to single parameters",
        got=f"one attached to {part}",
        remedy="wrap the model with use_orig_params=True, or attach them to model.parameters() of fully_shard",
    )


def attached_before_sharding(parameter: str | None, optimizer: torch.optim.Optimizer) -> PhaseError:
    """The error for an optimizer in backward of what was there before sharding."""
    return PhaseError(
        "An optimizer was attached to a parameter before sharding put another object in its place.",
        parameter=parameter,
        expected="optimizers attached once the model is sharded, or a model wrapped with use_orig_params=True",
        got=f"{type(optimizer).__name__} of the parameter from before, which would train nothing",
        remedy="call _apply_optimizer_in_backward with model.parameters() of the sharded model",
        topic="optimizer-built-early",
    )


# copy.py


def copied_while_it_runs(module: str) -> PhaseError:
    """The error for a deep copy within a forward or backward."""
    return PhaseError(
        f"{module} was deep-copied while a forward or backward through it runs.",
        remedy="copy it between steps",
        topic="called-in-a-step",
    )


def pickled(module: str) -> PhaseError:
    """The error for pickling a sharded module, by `torch.save(model)` for instance."""
    return PhaseError(
        f"A sharded {module} cannot be pickled: it holds process groups, and on each rank a part of the weights.",
        expected="a state dict, or a checkpoint",
        got="torch.save(model), or pickle.dumps(model)",
        remedy="fullshard.save(folder, model), on all ranks; or, for one file, call get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) on all ranks and torch.save the result on the first",
        topic="copied-or-pickled",
    )


def copied_in_part(module: str) -> PhaseError:
    """The error for a deep copy of some of the modules that form a unit."""
    return PhaseError(
        f"{module} forms one unit with a module that was deep-copied without it.",
        remedy="deep-copy a module that contains all modules of the unit",
        topic="copied-or-pickled",
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
    """The error for a graph that was kept where nothing tells of its backward."""
    return PhaseError(
        "A backward needs a tensor that is gone: a parameter whose unit is freed, unless one of yours was changed in "
        "place.",
        parameter=", ".join(parameters) + " (those of its shape)",
        expected="a loss that depends on what the units' forwards returned, or left on their modules as attributes",
        got=f"a graph kept elsewhere, through a tensor of shape {shape}",
        remedy="return from the forward what you differentiate, or make it an attribute of the module; "
        "set_reshard_after_forward(False) keeps the unit gathered",
    )


def grad_of_sharded(parameters: Iterable[str]) -> PhaseError:
    """The error for `torch.autograd.grad` of sharded parameters."""
    return PhaseError(
        "torch.autograd.grad was asked for gradients of sharded parameters, which are no part of the graph: units "
        "compute with what they gather.",
        parameter=", ".join(parameters),
        expected="loss.backward(), which leaves reduced gradients in .grad (inputs= chooses parameters)",
        remedy="call loss.backward(inputs=parameters) and read .grad; for a penalty on weights compute it from "
        "parameter.full_tensor() or the sharded parameters themselves",
        topic="gradients-by-autograd",
    )


# second_order.py


def second_order(parameter: str) -> PhaseError:
    """The error for differentiating a reduced gradient."""
    return PhaseError(
        "A loss was computed from .grad of a sharded parameter after backward(create_graph=True): the reduced "
        "gradient is no part of the graph, and the second-order term would be missing.",
        parameter=parameter,
        expected="a loss that depends on gradients with respect to inputs or activations, or takes .grad as a "
        "constant (.grad.detach())",
        remedy="for a penalty on weights' gradients take finite differences of two backwards, or compute it in a "
        "unit that is not sharded",
        topic="gradients-by-autograd",
    )


# reduce_kept.py


def reduction_was_dropped() -> PhaseError:
    """The error for waiting for a reduction that is no more."""
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
    """The error for `reset_iter_state` within a pass."""
    return PhaseError(
        "reset_iter_state() was called while the model runs.",
        remedy="let its forward or backward end, by an exception for instance, and call it then",
        topic="called-in-a-step",
    )


def added_to_older_gradients(parameters: Iterable[str]) -> PhaseError:
    """The error for `reset_iter_state` where gradients cannot be told apart."""
    return PhaseError(
        "reset_iter_state() cannot take back gradients that were added to older ones.",
        parameter=", ".join(parameters),
        expected="no .grad before the first backward of an iteration (zero_grad() after each step)",
        got="gradients of this iteration in one .grad with those of iterations before",
        remedy="zero_grad(), and repeat all iterations since the last step",
    )


def reduced_while_it_runs() -> PhaseError:
    """The error for reducing kept gradients within a pass."""
    return PhaseError(
        "Kept gradients cannot be reduced while the model runs.",
        remedy="let its forward and backward end first",
        topic="called-in-a-step",
    )
