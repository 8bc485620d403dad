"""What ranks that compare say to users, in the order of the code: the wording of errors and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ConfigError, DivergenceError, UsageError, message
from ..watcher import BACKWARD, END, FORWARD, KEEP, VERB_BITS, VERBS
from .log import ENTER, LEAVE, MODEL, MOST_UNITS, SIZES, VERB

# first_pass.py


def different_orders(ranks: Sequence[int], tokens: Sequence[int], names: Sequence[str]) -> DivergenceError:
    """The error for two ranks that run different units in a first forward.

    Args:
        ranks: two.
        tokens: of each, what it has come to.
        names: of all units.
    """
    return DivergenceError(
        "ranks run their units in different orders (checked along the first forward).\n"
        f"  rank {ranks[0]} {_about_to(tokens[0], names)}\n"
        f"  rank {ranks[1]} {_about_to(tokens[1], names)}",
        remedy="let every rank run the same units in the same order: where a rank has nothing to compute in "
        "one, call it all the same and multiply its result by zero",
        topic="ranks-differ",
    )


# shared_order.py


def out_of_shared_order(unit: str) -> DivergenceError:
    """The error for a unit that runs where the order that ranks share does not have it."""
    name = unit or "(root)"
    return DivergenceError(
        f"Unit {name!r} runs at another place, or more often, than in the first pass of its kind.",
        expected='with unused="zeros": units that run in one order, each as often as in the first pass',
        got=f"unit {name!r} once more",
        remedy='give the root check="every": ranks then say before every unit which one they run (a small '
        "collective each)",
        topic="ranks-differ",
    )


# model.py


def different_models(ranks: Sequence[int], lines: Sequence[str], at: int, count: int) -> DivergenceError:
    """The error for ranks that train different parameters.

    Args:
        ranks: two.
        lines: the parameter of each in which they differ.
        at: its number.
        count: of the parameters of the rank that has more.
    """
    return DivergenceError(
        "ranks disagree on what they train (checked once, at the first forward).\n"
        f"  rank {ranks[0]} has   {lines[0]}\n"
        f"  rank {ranks[1]} has   {lines[1]}\n"
        f"  First difference: line {at + 1} of {count}.",
        remedy="build the same model, with the same dtypes and the same fully_shard calls, on every rank; where "
        "ranks ignore different modules on purpose, give these names that no sharded one has",
        topic="models-differ",
    )


# position.py

_ALIKE = (
    "let every rank run the same units in the same order, with the same number of forwards and backwards, and the same "
    "gradient sync in each"
)
_ALIKE_OR_EVERY = (
    'give the root check="every" beside unused="zeros" if a backward runs several units forward again (activation '
    f"checkpointing) that some ranks leave out, or runs them in any order; else {_ALIKE}"
)


def other_forward_order(names: Sequence[str], rank: int, before: int | None, now: int | None) -> str:
    """The warning for a forward that left the order of the one before it.

    Args:
        names: of all units.
        before, now: the unit that ran there before, and now; None: none.
    """
    was, runs = ["none" if index is None else named(index, names) for index in (before, now)]
    return message(
        f"Forward order differs from that of the first iteration: rank {rank} ran {runs} where "
        f"it ran {was} before. Every rank has to change its order in the same way."
    )


def goes_on_differently(
    step: int, names: Sequence[str], ranks: Sequence[int], tokens: Sequence[int], zeros: bool
) -> DivergenceError:
    """The error for two ranks that are about to issue different collectives.

    Args:
        step: backwards that reduced so far.
        names: of all units.
        ranks: two.
        tokens: of each, what it is about to do.
        zeros: whether ranks may leave units out, and do not say which before each.
    """
    return DivergenceError(
        f"ranks go on differently (step {step}).\n"
        f"  rank {ranks[0]}: {_about_to(tokens[0], names)}\n"
        f"  rank {ranks[1]}: {_about_to(tokens[1], names)}",
        remedy=_ALIKE_OR_EVERY if zeros else _ALIKE,
        topic="ranks-differ",
    )


def _about_to(token: int, names: Sequence[str]) -> str:
    verb, index = token & VERB, token >> VERB_BITS
    if verb < len(VERBS) and verb not in (FORWARD, BACKWARD, KEEP, END):
        return f"{VERBS[verb]} of {named(index, names)}"
    return {
        FORWARD: f"begins a forward of {named(index // 2, names)} with{'' if index % 2 else 'out'} gradients",
        BACKWARD: f"begins a backward with{'' if index else 'out'} gradient sync",
        KEEP: f"begins keep_gathered of {index % MOST_UNITS} units from {named(index // MOST_UNITS, names)} on",
        ENTER: f"runs {named(index, names)}",
        LEAVE: f"has come to the end of {named(index, names)}",
        END: "has come to the end of its forward",
        MODEL: "uses a model, or a part that was sharded since, for the first time",
        SIZES: f"has replaced parameters by ones of another dtype (checksum of all sizes {index:08x})",
    }[verb]


def named(index: int, names: Sequence[str]) -> str:
    """A unit as messages name it."""
    return f"unit {names[index] or '(root)'!r}" if index < len(names) else f"unit {index}"


def unknown_setting(name: str, value: str, kinds: Sequence[str]) -> ConfigError:
    """The error for a setting that is none of its kinds, of which the first is the default."""
    return ConfigError(
        f"{name} is none of its kinds.",
        expected=" or ".join(map(repr, kinds)),
        got=repr(value),
        remedy=f"leave it out for {kinds[0]!r}, the default",
    )


# stale.py


def changed_unseen(parameters: Iterable[str], rank: int) -> UsageError:
    """The error for weights that changed while their units stayed gathered, without a trace."""
    return UsageError(
        "Weights were changed in a way that cannot be seen, while their units stayed gathered: forwards since then "
        "computed with the old ones (on an accelerator, values are compared some forwards later).",
        parameter=", ".join(parameters),
        rank=rank,
        expected="changes of the parameter itself: under torch.no_grad(), by an optimizer, or by loading",
        got="values that differ from what is gathered, though no operation changed the parameter",
        remedy="change p in place of p.data, or call reshard() on the unit before or after the change",
        topic="weights-changed-in-a-step",
    )


# start_alike.py


def split_over_these_ranks(parameter: str, placements: Any, mesh: Any) -> ConfigError:
    """The error for a DTensor whose parts differ between ranks that are to be made equal."""
    return ConfigError(
        "sync_module_states=True was given for a tensor that is split over the ranks it would be sent to.",
        parameter=parameter,
        expected="tensors that these ranks hold whole, or split over other ranks in the same way",
        got=f"a DTensor with placements {placements} on {mesh}",
        remedy="leave sync_module_states out, or make the tensor a DTensor on the tensor-parallel ranks only",
    )


# use.py


def different_units_reduced(rank: int) -> DivergenceError:
    """The error for ranks that gathered or reduced different units up to the end of a backward."""
    return DivergenceError(
        "ranks gathered or reduced different units, or in different orders: this step's gradients are wrong, "
        "or what a forward since the last one gave.",
        rank=rank,
        expected="the same units in every rank's forwards and backward",
        got="different ones (compared at the end of backward)",
        remedy="let every rank run the same units; call set_reduce_scatter_unused_params(True) where ranks "
        "run different ones, and zero_grad() before going on",
        topic="ranks-differ",
    )


def steps_counted(count: int, by: str) -> str:
    """How often optimizers have updated a unit, and with what settings the last did."""
    return f"{count} step{'' if count == 1 else 's'}, the last of {by}"


def different_steps(ranks: Sequence[int], steps: Sequence[str], differ: bool) -> DivergenceError:
    """The error for optimizers that stepped differently.

    Args:
        ranks: two.
        steps: of each, by `steps_counted`.
        differ: whether these tell the difference, which else was earlier.
    """
    return DivergenceError(
        "optimizers did not step alike on all ranks: parameters are no longer one model's.\n"
        f"  rank {ranks[0]}: {steps[0]}\n"
        f"  rank {ranks[1]}: {steps[1] if differ else 'stepped with other settings before'}",
        remedy="give every rank's optimizer the same settings (learning rate, betas, weight decay), and step "
        "it on every rank or on none",
        topic="ranks-differ",
    )


def changed_before_backward(unit: str, parameters: Iterable[str], rank: int) -> UsageError:
    """The error for weights that were changed between a forward and its backward."""
    return UsageError(
        f"Weights of unit {unit or '(root)'!r} were changed between a forward and its backward, which "
        "computed with the new ones: this backward's gradients are wrong.",
        parameter=", ".join(parameters),
        rank=rank,
        expected="optimizer steps, loads and changes in place after the backward",
        remedy="call zero_grad() and repeat the step; run the backward before the weights change, or the "
        "forward again after it",
        topic="weights-changed-in-a-step",
    )


# weights.py


def _unlike(ranks: Sequence[int], more: int, count: int) -> str:
    return f"different ones on ranks {ranks[0]} and {ranks[1]}, here and in {more} more of {count} parameters"


def drawn_apart(parameter: str, ranks: Sequence[int], more: int, count: int) -> str:
    """The warning for ranks that drew other random weights.

    Args:
        parameter: the first that differs.
        ranks: two on which it does.
        more: further parameters that do, of `count`.
    """
    return message(
        "Ranks start from different weights (compared at the first forward), and each trains its slice of its "
        "own: right for weights that every rank drew at random, wrong for weights that ranks loaded.",
        parameter=parameter,
        got=_unlike(ranks, more, count),
        remedy="torch.manual_seed(0) on all ranks before the model is made, or sync_module_states=True in "
        "every call that shards a part of it, makes them equal; nothing is to be done for random weights",
        topic="weights-differ",
    )


def loaded_apart(parameter: str, ranks: Sequence[int], more: int, count: int, wrote: bool) -> DivergenceError:
    """The error for ranks that start from different weights, not drawn at random.

    Args:
        parameter, ranks, more, count: see `drawn_apart`.
        wrote: whether some ranks wrote to it more often than others.
    """
    return DivergenceError(
        "ranks start from different weights (compared at the first forward): each would train its own slice of another "
        "model.",
        parameter=parameter,
        expected="the same values on all ranks",
        got=_unlike(ranks, more, count) + (", which some ranks wrote to more often, as a load does" if wrote else ""),
        remedy="build the model from one seed on all ranks (torch.manual_seed), load the same checkpoint on all, or "
        "give sync_module_states=True, which makes them rank 0's, to every call that shards a part of the model: a "
        "call for the model cannot restore what earlier calls for its blocks have cut",
        topic="weights-differ",
    )
