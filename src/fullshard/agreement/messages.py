"""The wording of this package's errors and warnings, in the order of the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ConfigError, DivergenceError, UsageError, message
from ..watcher import BACKWARD, END, FORWARD, KEEP, VERB_BITS, VERBS
from .log import ENTER, LEAVE, MODEL, MOST_UNITS, SIZES, VERB

# start.py


def different_models(ranks: Sequence[int], lines: Sequence[str], at: int, count: int) -> DivergenceError:
    """The error for ranks that train different parameters.

    Args:
        ranks: two ranks.
        lines: the first parameter in which they differ, as each describes it.
        at: its index.
        count: the number of parameters of the rank that has more.
    """
    return DivergenceError(
        "ranks disagree on what they train (checked once, at the first forward).\n"
        f"  rank {ranks[0]} has   {lines[0]}\n"
        f"  rank {ranks[1]} has   {lines[1]}\n"
        f"  First difference: line {at + 1} of {count}.",
        remedy="build the same model, with the same dtypes and the same fully_shard calls, on every rank; if "
        "ranks ignore different modules on purpose, give these names that no sharded module has",
        topic="models-differ",
    )


def split_over_these_ranks(parameter: str, placements: Any, mesh: Any) -> ConfigError:
    """The error for a DTensor whose parts differ between the ranks that would receive them."""
    return ConfigError(
        "sync_module_states=True cannot broadcast a tensor that is split over the ranks that would receive it.",
        parameter=parameter,
        expected="tensors that these ranks hold whole, or split over other ranks in the same way",
        got=f"a DTensor with placements {placements} on {mesh}",
        remedy="omit sync_module_states, or make the tensor a DTensor on the tensor-parallel ranks only",
    )


def meta_in_place_of_values(name: str, module: str) -> ConfigError:
    """The error for a tensor without values, of a module of that class, that would be sent or received."""
    return ConfigError(
        "sync_module_states=True needs modules with values, on every rank.",
        parameter=f"{name} of {module}",
        expected="tensors on the host or the device",
        got="a tensor on the meta device",
        remedy="call module.to_empty(device=...) first; or omit sync_module_states, and "
        "initialize or load the sharded model after its to_empty",
    )


def _unlike(ranks: Sequence[int], more: int, count: int) -> str:
    return f"different values on ranks {ranks[0]} and {ranks[1]}, here and in {more} more of {count} parameters"


def drawn_apart(parameter: str, ranks: Sequence[int], more: int, count: int) -> str:
    """The warning for ranks that drew different random weights.

    Args:
        parameter: the first that differs.
        ranks: two ranks on which it differs.
        more: the number of further parameters that differ, of `count`.
    """
    return message(
        "Ranks start from different weights (compared at the first forward), and each trains its slice of its "
        "own weights: harmless for weights that every rank drew at random, wrong for weights that ranks loaded.",
        parameter=parameter,
        got=_unlike(ranks, more, count),
        remedy="call torch.manual_seed(0) on all ranks before the model is built, or pass sync_module_states=True in "
        "every call that shards a part of it, to make them equal; random weights need no change",
        topic="weights-differ",
    )


def loaded_apart(parameter: str, ranks: Sequence[int], more: int, count: int, wrote: bool) -> DivergenceError:
    """The error for ranks that start from different weights, not drawn at random.

    Args:
        parameter, ranks, more, count: see `drawn_apart`.
        wrote: whether some ranks wrote to it more often than others.
    """
    return DivergenceError(
        "ranks start from different weights (compared at the first forward): each would train its slice of a different "
        "model.",
        parameter=parameter,
        expected="the same values on all ranks",
        got=_unlike(ranks, more, count) + (", written to more often on some ranks, as by a load" if wrote else ""),
        remedy="call torch.manual_seed with the same seed on all ranks before building the model, load the same "
        "checkpoint on all, or pass sync_module_states=True, which broadcasts rank 0's weights, to every call that "
        "shards a part of the model: a call for the model cannot restore weights that earlier calls for its blocks "
        "have cut",
        topic="weights-differ",
    )


# first_pass.py


def different_orders(ranks: Sequence[int], tokens: Sequence[int], names: Sequence[str]) -> DivergenceError:
    """The error for two ranks that run different units in a first forward.

    Args:
        ranks: two ranks.
        tokens: what each of them is about to do.
        names: of all units.
    """
    return DivergenceError(
        "ranks run their units in different orders (checked along the first forward).\n"
        f"  rank {ranks[0]} {_about_to(tokens[0], names)}\n"
        f"  rank {ranks[1]} {_about_to(tokens[1], names)}",
        remedy="let every rank run the same units in the same order: if a rank has nothing to compute in a unit, call "
        "it anyway and multiply its result by zero",
        topic="ranks-differ",
    )


# shared_order.py


def out_of_shared_order(unit: str) -> DivergenceError:
    """The error for a unit that runs where the shared order does not contain it."""
    name = unit or "(root)"
    return DivergenceError(
        f"Unit {name!r} runs at a different point, or more often, than in the first pass of its kind.",
        expected='with unused="zeros": units in a fixed order, each as often as in the first pass',
        got=f"unit {name!r} again",
        remedy='set check="every" on the root: ranks then announce every unit before they run it (a small '
        "collective each)",
        topic="ranks-differ",
    )


# position.py

_ALIKE = (
    "let every rank run the same units in the same order, with the same number of forwards and backwards, and the same "
    "gradient sync in each"
)
_ALIKE_OR_EVERY = (
    'with unused="zeros", set check="every" on the root if a backward runs several units forward again (activation '
    f"checkpointing) that some ranks skip, or runs units in no fixed order; else {_ALIKE}"
)


def other_forward_order(names: Sequence[str], rank: int, before: int | None, now: int | None) -> str:
    """The warning for a forward that left the order of the previous forward.

    Args:
        names: of all units.
        before, now: the unit that ran there before, and now; None if no unit did.
    """
    was, runs = ["none" if index is None else named(index, names) for index in (before, now)]
    return message(
        f"Forward order differs from that of the first iteration: rank {rank} ran {runs} where "
        f"it ran {was} before. All ranks must change their order in the same way."
    )


def goes_on_differently(
    step: int, names: Sequence[str], ranks: Sequence[int], tokens: Sequence[int], zeros: bool
) -> DivergenceError:
    """The error for two ranks that are about to issue different collectives.

    Args:
        step: number of backwards that have reduced.
        names: of all units.
        ranks: two ranks.
        tokens: what each of them is about to do.
        zeros: whether ranks may skip units without announcing each.
    """
    return DivergenceError(
        f"ranks are about to issue different collectives (step {step}).\n"
        f"  rank {ranks[0]}: {_about_to(tokens[0], names)}\n"
        f"  rank {ranks[1]}: {_about_to(tokens[1], names)}",
        remedy=_ALIKE_OR_EVERY if zeros else _ALIKE,
        topic="ranks-differ",
    )


def compared_alone(token: int, names: Sequence[str]) -> str:
    """A note for a rank that compares its next action, while others repeat their previous pass without comparing."""
    why = ""
    if token & VERB == BACKWARD:
        why = ": requires_grad of all parameters of a unit, or gradient sync, changed on this rank"
    return f"This rank stopped to compare: it {_about_to(token, names)}, which it did not do before at this point{why}."


def _about_to(token: int, names: Sequence[str]) -> str:
    verb, index = token & VERB, token >> VERB_BITS
    if verb < len(VERBS) and verb not in (FORWARD, BACKWARD, KEEP, END):
        return f"{VERBS[verb]} of {named(index, names)}"
    return {
        FORWARD: f"begins a forward of {named(index // 2, names)} with{'' if index % 2 else 'out'} gradients",
        BACKWARD: f"begins a backward with{'' if index % 2 else 'out'} gradient sync (checksum of trainable buckets: "
        f"{index >> 1:08x})",
        KEEP: f"begins keep_gathered of {index % MOST_UNITS} units from {named(index // MOST_UNITS, names)} on",
        ENTER: f"runs {named(index, names)}",
        LEAVE: f"has reached the end of {named(index, names)}",
        END: "has reached the end of its forward",
        MODEL: "uses a model, or a part of one that was sharded later, for the first time",
        SIZES: f"has replaced parameters by parameters of a different dtype (checksum of all sizes {index:08x})",
    }[verb]


def named(index: int, names: Sequence[str]) -> str:
    """A unit's name in messages."""
    return f"unit {names[index] or '(root)'!r}" if index < len(names) else f"unit {index}"


# stale.py


def changed_unseen(parameters: Iterable[str], rank: int) -> UsageError:
    """The error for weights that changed undetected while their units stayed gathered."""
    return UsageError(
        "Weights were changed in a way that cannot be detected while their units stayed gathered: forwards since then "
        "computed with the old values (on an accelerator, values are compared a few forwards later).",
        parameter=", ".join(parameters),
        rank=rank,
        expected="changes of the parameter itself: under torch.no_grad(), by an optimizer, or by loading",
        got="values that differ from the gathered ones, although no operation changed the parameter",
        remedy="change p instead of p.data, or call reshard() on the unit before or after the change",
        topic="weights-changed-in-a-step",
    )


# use.py


def different_units_reduced(rank: int) -> DivergenceError:
    """The error for ranks that had gathered or reduced different units by the end of a backward."""
    return DivergenceError(
        "ranks gathered or reduced different units, or in different orders: this step's gradients are wrong, "
        "or the outputs of a forward since the last step were.",
        rank=rank,
        expected="the same units in every rank's forwards and backward",
        got="different units (compared at the end of backward)",
        remedy="let every rank run the same units, or call set_reduce_scatter_unused_params(True) if ranks "
        "run different ones; call zero_grad() before you continue",
        topic="ranks-differ",
    )


def different_parameters_train(parameter: str, ranks: Sequence[int], trains: Sequence[bool]) -> DivergenceError:
    """The error for ranks that differ in `requires_grad`.

    Args:
        parameter: the first that differs.
        ranks: two ranks on which it differs.
        trains: whether it trains on each of them.
    """
    return DivergenceError(
        "ranks differ in which parameters train: this step's gradients are wrong.",
        parameter=parameter,
        expected="the same requires_grad on all ranks",
        got=" and ".join(f"{flag} on rank {rank}" for rank, flag in zip(ranks, trains, strict=True))
        + " (compared at the end of backward)",
        remedy="set requires_grad alike on all ranks, between the same two steps; call zero_grad() before you continue",
        topic="ranks-differ",
    )


def steps_counted(count: int, by: str) -> str:
    """How often optimizers have updated a unit, and the settings of the last optimizer."""
    return f"{count} step{'' if count == 1 else 's'}, the last of {by}"


def different_steps(ranks: tuple[int, int | None], steps: Sequence[str]) -> DivergenceError:
    """The error for optimizers that stepped differently.

    Args:
        ranks: two ranks; the second is None if ranks only stepped at different times, which a device shows late.
        steps: of each, by `steps_counted`; if these are equal, an earlier step differed.
    """
    other = f"rank {ranks[1]}: {steps[1] if steps[1] != steps[0] else 'stepped with different settings before'}"
    return DivergenceError(
        "optimizers stepped differently on different ranks: their parameters no longer belong to the same model.\n"
        f"  rank {ranks[0]}: {steps[0]}\n"
        f"  {other if ranks[1] is not None else 'the others: the same by now, but not when a backward began'}",
        remedy="give every rank's optimizer the same settings (learning rate, betas, weight decay), and step "
        "it on every rank or on none",
        topic="ranks-differ",
    )


def undecided_in_graph(parameters: Iterable[str], rank: int) -> UsageError:
    """The error for a parameter without a gradient in a step that is captured as a graph."""
    return UsageError(
        "A step was captured as a graph in which a parameter has no gradient on this rank: whether it gets the other "
        "ranks' depends on what they computed, which the host has to read.",
        parameter=", ".join(parameters),
        rank=rank,
        remedy="let the captured step use every trainable parameter, freeze those that it does not use, or do not "
        "capture the step",
    )


def changed_before_backward(unit: str, parameters: Iterable[str], rank: int) -> UsageError:
    """The error for weights that were changed between a forward and its backward."""
    return UsageError(
        f"Weights of unit {unit or '(root)'!r} were changed between a forward and its backward, which "
        "computed with the new ones: this backward's gradients are wrong.",
        parameter=", ".join(parameters),
        rank=rank,
        expected="optimizer steps, loads and in-place changes after the backward",
        remedy="call zero_grad() and repeat the step; run the backward before the weights change, or run the "
        "forward again after the change",
        topic="weights-changed-in-a-step",
    )
