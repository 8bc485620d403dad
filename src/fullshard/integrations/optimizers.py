"""Optimizers of client libraries' programs: built before a model was sharded, of another one, not made for shards."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint import values
from ..errors import ConfigError, PhaseError
from ..forms import FlatShard, owner_of
from ..runtime import runners_in


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """A model's parameters, which may not be sharded yet, and a name of each."""
    return {parameter: name for name, parameter in model.named_parameters()}


def point_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], before: Mapping[nn.Parameter, str], model: nn.Module
) -> None:
    """Put a model's parameters where optimizers hold those that it had before.

    Args:
        optimizers: of any models.
        before: what `names_of` said then.
        model: sharded since.

    Raises:
        ConfigError: an optimizer has state of a parameter, which is of another shape now.
    """
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        inner = inside(optimizer)
        for group in inner.param_groups:
            stepped = [before[one] for one in group["params"] if one in before and inner.state.get(one)]
            if stepped:
                raise ConfigError(
                    "An optimizer has stepped before the model was sharded.",
                    parameter=stepped[0],
                    got=f"{type(inner).__name__} with state",
                    remedy="prepare model and optimizer together, before the first step; load its state after",
                    topic="optimizer-built-early",
                )
            group["params"] = [now[before[one]] if one in before else one for one in group["params"]]


def inside(optimizer: Any) -> Any:
    """The optimizer itself, of one that Accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def check_theirs(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer that steps none of the models.

    Args:
        optimizers: about to be prepared.
        models: prepared, or about to be.

    Raises:
        ConfigError: one has parameters, and none is any model's.
    """
    known = set().union(*map(stepped_in, models))
    for optimizer in optimizers:
        held = [one for group in inside(optimizer).param_groups for one in group["params"]]
        if held and not any(id(one) in known for one in held):
            raise ConfigError(
                "An optimizer steps none of the models that are prepared: it would train another one, on each rank "
                "by itself, or nothing.",
                expected="parameters of a model that is prepared with it, or was before",
                got=f"{type(inside(optimizer)).__name__} of {len(held)} others, the first of shape "
                f"{tuple(held[0].shape)}",
                remedy="build it from model.parameters() of that very model; prepare its own model with it",
            )


def stepped_in(model: nn.Module) -> set[int]:
    """Ids of what an optimizer of this model may hold: its parameters, and views of them (`optimizer_view`)."""
    views = [tensor for runner in runners_in(model) for tensor, *_ in values.views_of(runner.unit)]
    return {id(tensor) for tensor in (*model.parameters(), *views)}


@contextmanager
def naming_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context of one step: an optimizer that cannot compute with sharded parameters is named, and what to do.

    Raises:
        ConfigError: in place of what DTensors or flat shards say of an operation.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is the former
        ours = isinstance(error, PhaseError) and error.topic == "used-while-freed"
        *_, last = traceback.extract_tb(error.__traceback__)
        if not ours and "DTensor" not in str(error) and "/torch/distributed/tensor/" not in last.filename:
            raise
        raise _not_for_shards(optimizer, error) from error


def _name_of(parameter: torch.Tensor) -> str | None:
    unit = owner_of(parameter)
    found = [] if unit is None else [member.name for member in unit.members if member.sharded is parameter]
    return found[0] if found else None


def _not_for_shards(optimizer: Any, error: Exception) -> ConfigError:
    held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    begun = [one for one in held if optimizer.state.get(one)] or held  # it goes from one to the next
    at = begun[-1] if begun else None
    kind = "DTensor" if isinstance(at, DTensor) else "FlatShard" if isinstance(at, FlatShard) else type(at).__name__
    return ConfigError(
        f"{type(optimizer).__name__} cannot step sharded parameters: it computes with them as with plain tensors.",
        parameter=None if at is None else _name_of(at),
        expected="an optimizer that steps DTensors, or elements each by itself",
        got=f"{kind}s: {(str(error) or type(error).__name__).splitlines()[0]}",
        remedy="take torch.optim.AdamW, or another that steps DTensors; one to which an element is an element can be "
        "built from fullshard.optimizer_view(model) of the sharded model: plain tensors, in every layout",
        topic="optimizer-on-shards",
    )
