"""The wording of errors of the integrations."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

from ..errors import ArgumentTypeError, ConfigError, PhaseError, PrivateNameError
from ..forms import NAME_KEY
from ..optimizers import parameters_of

# adopt.py


def adopted_late(uses: Iterable[str]) -> PhaseError:
    """The error for `adopt` after the program imported names that it replaces; `uses` lists the names and places."""
    return PhaseError(
        "This program already uses PyTorch's FSDP, which adopt() can replace only before it is imported.",
        got="; ".join(uses),
        remedy="start the program with: python -m fullshard adopt SCRIPT; or call fullshard.adopt() first, before "
        "these imports",
    )


# private.py, adjustments.py


def private_name(path: str, verb: str, where: str, instead: str) -> PrivateNameError:
    """The error for a program's use of a private name; `where` is its module, file and line."""
    return PrivateNameError(
        f"This program {verb} {path}, which is private to PyTorch's FSDP and has no effect on Fullshard.",
        got=where,
        remedy=f"{instead}; or adopt leniently (--lenient), if the program works without it",
    )


def memory_tracker() -> PrivateNameError:
    """The error for PyTorch's `FSDPMemTracker`."""
    return PrivateNameError(
        "FSDPMemTracker patches private methods of PyTorch's FSDP, which Fullshard does not have.",
        remedy="fullshard.memory_use(model) before and after a step; fullshard.record_events() for allocations and "
        "frees within a step",
    )


# sharding.py


def unknown_argument(name: object, value: object, allowed: Collection[str]) -> ArgumentTypeError:
    """The error for an argument that `fully_shard` does not have, or that the integration sets itself."""
    similar = ["units"] if name == "auto_wrap_policy" else difflib.get_close_matches(str(name), allowed, 1)
    return ArgumentTypeError(
        f"Unknown sharding argument {name!r}.",
        expected=", ".join(sorted(allowed)),
        got=f"{name}={value!r}"[:200],
        remedy=f"did you mean {similar[0]}=?" if similar else "omit it",
    )


def no_such_class(name: Any, classes: Iterable[type]) -> ConfigError:
    """The error for units of a class that does not occur in the model."""
    return ConfigError(
        "units names a class that does not occur in the model.",
        expected=f"some of {', '.join(sorted({cls.__name__ for cls in classes}))}",
        got=getattr(name, "__name__", str(name)),
        remedy="omit units to use the model's own plan (_no_split_modules)",
    )


def two_precisions(precision: str, policy: object) -> ConfigError:
    """The error for both mixed_precision and mp_policy."""
    return ConfigError(
        "mixed_precision and mp_policy both set the precision.",
        got=f"mixed_precision={precision!r}, mp_policy={policy}",
        remedy='pass mp_policy with mixed_precision="no"',
    )


def stepped_before(optimizer: object, parameter: object) -> ConfigError:
    """The error for an optimizer that has state for a parameter from before it was sharded."""
    return ConfigError(
        "An optimizer stepped before the model was sharded.",
        parameter=getattr(parameter, NAME_KEY, None),
        got=f"{type(optimizer).__name__} with state",
        remedy="prepare model and optimizer together, before the first step; load the optimizer's state afterwards",
        topic="optimizer-built-early",
    )


def unrelated_optimizer(optimizer: Any) -> ConfigError:
    """The error for an optimizer with no parameter from any prepared model."""
    parameters = parameters_of([optimizer])
    return ConfigError(
        "An optimizer has no parameter of any prepared model. It would train nothing, or a different model, on each "
        "rank separately.",
        expected="parameters of a model that is prepared with it, or was prepared before",
        got=f"{type(optimizer).__name__} of {len(parameters)} other parameters, the first of shape "
        f"{tuple(parameters[0].shape)}",
        remedy="build it from model.parameters() of the model that is prepared; or prepare its own model with it",
    )


def cannot_step_shards(optimizer: object, parameter: Any, error: Exception) -> ConfigError:
    """The error for an optimizer whose step failed; `parameter` is the one it failed at, if known."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"{type(optimizer).__name__} cannot step sharded parameters: it treats them as plain tensors.",
        parameter=getattr(parameter, NAME_KEY, None),
        expected="an optimizer that supports DTensor, or that treats each element by itself",
        got=reason if parameter is None else f"{type(parameter.data).__name__}: {reason}",
        remedy="use torch.optim.AdamW or another optimizer that supports DTensor; build one that treats each element "
        "by itself from fullshard.optimizer_view(model), which has plain tensors in every layout",
        topic="optimizer-on-shards",
    )


def accelerate_is_alone(world: int, processes: int) -> ConfigError:
    return ConfigError(
        "Accelerate does not see the other ranks: it would give each the same batches, and average nothing.",
        expected=f"{world} processes, as were launched",
        got=f"Accelerator.num_processes is {processes}",
        remedy="on a CPU pass cpu=True, or set ACCELERATE_USE_CPU=true",
    )
