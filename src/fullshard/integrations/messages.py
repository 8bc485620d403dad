"""The wording of errors of the integrations."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..errors import ArgumentTypeError, ConfigError, PhaseError, PrivateNameError

# adopt.py


def adopted_late(uses: Iterable[str]) -> PhaseError:
    """The error for `adopt` after the program imported what it replaces; `uses` says what, where."""
    return PhaseError(
        "This program uses PyTorch's FSDP already, which adopt() can only replace before it is imported.",
        got="; ".join(uses),
        remedy="start the program by: python -m fullshard adopt SCRIPT; or call fullshard.adopt() first, before these "
        "imports",
    )


# private.py, adopted.py


def private_name(path: str, verb: str, where: str, instead: str) -> PrivateNameError:
    """The error for a program's use of a private name; `where` is its module, file and line."""
    return PrivateNameError(
        f"This program {verb} {path}, which is private in PyTorch and has no part in how Fullshard shards.",
        got=where,
        remedy=f"{instead}; or adopt leniently (--lenient), if the program can do without",
    )


def memory_tracker() -> PrivateNameError:
    """The error for PyTorch's `FSDPMemTracker`."""
    return PrivateNameError(
        "FSDPMemTracker replaces private methods of PyTorch's units, which Fullshard's do not have.",
        remedy="fullshard.memory_use(model) before a step and after it; fullshard.record_events() for what comes "
        "and goes within one",
    )


# sharding.py


def no_dictionary(sharding: object) -> ConfigError:
    """The error for `sharding=` of another kind."""
    return ConfigError(
        "sharding is a dictionary: arguments of fullshard.integrations.hf.shard by their names.",
        expected='{"reshard_after_forward": True}, say',
        got=repr(sharding),
    )


def unknown_argument(name: object, value: object, known: Collection[str]) -> ArgumentTypeError:
    """The error for an argument that `fully_shard` does not have, or that the integration gives itself."""
    near = ["units"] if name == "auto_wrap_policy" else difflib.get_close_matches(str(name), known, 1)
    return ArgumentTypeError(
        f"Sharding has no argument {name!r} here.",
        expected=", ".join(sorted(known)),
        got=f"{name}={value!r}"[:200],
        remedy=f"{near[0]}= is meant, probably" if near else "omit it",
    )


def no_such_class(name: Any, classes: Iterable[type]) -> ConfigError:
    """The error for units of a class that no module of the model has."""
    return ConfigError(
        "units names a class that no module of the model has.",
        expected=f"some of {', '.join(sorted({cls.__name__ for cls in classes}))}",
        got=getattr(name, "__name__", str(name)),
        remedy="omit units to take the model's own plan (_no_split_modules)",
    )


def unknown_precision(word: object, known: Iterable[str]) -> ConfigError:
    """The error for another word as mixed_precision."""
    return ConfigError(f"mixed_precision must be {' or '.join(map(repr, known))}.", got=repr(word))


def two_precisions(word: str, policy: object) -> ConfigError:
    """The error for both mixed_precision and mp_policy."""
    return ConfigError(
        "mixed_precision and mp_policy both set the precision.",
        got=f"mixed_precision={word!r}, mp_policy={policy}",
        remedy='give mp_policy with mixed_precision="no"',
    )


def stepped_before(optimizer: object, name: str) -> ConfigError:
    """The error for an optimizer that has state of a parameter which is sharded now."""
    return ConfigError(
        "An optimizer has stepped before the model was sharded.",
        parameter=name,
        got=f"{type(optimizer).__name__} with state",
        remedy="prepare model and optimizer together, before the first step; load its state after",
        topic="optimizer-built-early",
    )


def of_no_model(optimizer: object, parameters: Sequence[Any]) -> ConfigError:
    """The error for an optimizer of parameters that no prepared model has."""
    return ConfigError(
        "An optimizer steps none of the models that are prepared: it would train another one, on each rank by itself, "
        "or nothing.",
        expected="parameters of a model that is prepared with it, or was before",
        got=f"{type(optimizer).__name__} of {len(parameters)} others, the first of shape {tuple(parameters[0].shape)}",
        remedy="build it from model.parameters() of that very model; prepare its own model with it",
    )


def not_for_shards(optimizer: object, at: Sequence[Any], names: Sequence[str], error: Exception) -> ConfigError:
    """The error for an optimizer whose step failed; `at` is the parameter at which it did, if known, `names` its."""
    kinds = ", ".join(type(parameter.data).__name__ for parameter in at)
    return ConfigError(
        f"{type(optimizer).__name__} cannot step sharded parameters: it computes with them as with plain tensors.",
        parameter=names[0] if names else None,
        expected="an optimizer that steps DTensors, or elements each by itself",
        got=f"{kinds}: {(str(error) or type(error).__name__).splitlines()[0]}",
        remedy="take torch.optim.AdamW, or another that steps DTensors; one to which an element is an element can be "
        "built from fullshard.optimizer_view(model) of the sharded model: plain tensors, in every layout",
        topic="optimizer-on-shards",
    )
