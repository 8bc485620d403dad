"""Plain tensors for element-wise optimizers: no cost per parameter, no `DTensor` in the step.

An element-wise optimizer (SGD, Adam, AdamW, Lion, ...) does not care which elements belong to which parameter. A view
is a plain 1-D tensor over a run of a unit's shard; the optimizer updates the shard through it. A bucket has one view if
all its parameters are in the same group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ArgumentTypeError, ConfigError, invalid_argument
from ..runtime import take_over_replaced
from ..shard import Bucket, members_of, run_of, units_of


def optimizer_view(model: nn.Module, params: Iterable[torch.Tensor] | None = None) -> list[nn.Parameter]:
    """Plain local tensors over the same memory as the model's sharded parameters, for an element-wise optimizer.

    Their `.grad` is set together with that of the sharded parameters. Setting either to None (`optimizer.zero_grad()`,
    `model.zero_grad()`) clears both. If you assign another tensor to a parameter's `.grad`, the optimizer uses it.
    Optimizers that need a parameter's shape (Muon, Shampoo, LBFGS, LAMB's per-tensor norms) require the sharded
    parameters themselves, in the layout "rows". If only some parameters of a view get a gradient in a step (the others
    are unused or frozen), the others are not skipped: their gradient is zero, so weight decay and momentum still change
    them. A warning names them.

    Args:
        model: a model with units.
        params: the sharded parameters to include, for parameter groups; None: all that currently require a gradient.
            A parameter that is unfrozen later is in no view and is not stepped. Parameters that are adjacent in memory
            share a tensor.

    Returns:
        1-D Parameters, one per run of adjacent parameters, then the unsharded (ignored) parameters of `model`,
        unchanged. The list has the same length on every rank; a tensor may be empty.

    Raises:
        ArgumentTypeError: `model` is not a module.
        ConfigError: the model has no units, a tensor is not one of its parameters, or a parameter already has a view.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "optimizer_view takes the model.",
            expected="an nn.Module",
            got=type(model).__name__,
            remedy="pass the model itself: optimizer_view(model); params= takes parameters",
        )
    wanted = None if params is None else {id(parameter): parameter for parameter in params}
    if not all(isinstance(parameter, torch.Tensor) for parameter in (wanted or {}).values()):
        raise invalid_argument("optimizer_view(params=)", params, "sharded parameters", kind=ArgumentTypeError)

    def is_wanted(parameter: torch.Tensor) -> bool:
        return parameter.requires_grad if wanted is None else id(parameter) in wanted

    take_over_replaced(model)
    units = units_of(model)
    if not units:
        raise ConfigError(
            "optimizer_view needs a model that fully_shard was applied to",
            got=f"a {type(model).__name__} without units",
            remedy="call fully_shard(model) first, and build the optimizer after it",
            topic="no-units",
        )
    sharded = {id(member.sharded) for _, _, member in members_of(model)}
    flats = [bucket.flat_parameter for unit in units for bucket in unit.buckets if bucket.flat_parameter is not None]
    sharded |= {id(flat) for flat in flats}
    plain = [p for p in model.parameters() if id(p) not in sharded and is_wanted(p)]
    if wanted is not None:
        parameters = sharded | {id(p) for p in plain}
        for key, parameter in wanted.items():
            if key not in parameters:
                raise ConfigError(
                    "optimizer_view: a tensor in params is not a parameter of the model.",
                    got=f"{type(parameter).__name__} of shape {tuple(parameter.shape)}",
                    remedy="take parameters from model.parameters() after the last fully_shard call",
                )
    views: list[nn.Parameter] = []
    for unit in units:
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
            if not bucket.form.plain:  # a tensor subclass: the optimizer must use the sharded parameter itself
                views += [member.sharded for member in bucket.members if is_wanted(member.sharded)]
            elif bucket.flat_parameter is not None:  # a view already
                views += [bucket.flat_parameter] if is_wanted(bucket.flat_parameter) else []
            elif chosen := {i for i, member in enumerate(bucket.members) if is_wanted(member.sharded)}:
                views.extend(gradients.delivery.add_views(_runs(bucket, chosen)))
    return views + plain


def _runs(bucket: Bucket, chosen: set[int]) -> list[tuple[int, int, list[int]]]:
    """Runs (offset, length, members) of the shard that hold the chosen members and no others."""
    rank = bucket.axes.shard.rank
    if len(chosen) == len(bucket.members):
        return [(*run_of(bucket, sorted(chosen), rank), sorted(chosen))]
    # Memory order, which does not depend on the rank: every rank has the same runs.
    order = sorted(
        range(len(bucket.members)), key=lambda i: (bucket.members[i].slot.segment, bucket.members[i].slot.offset)
    )
    runs: list[list[int]] = []
    for position, i in enumerate(order):
        if i not in chosen:
            continue
        if position and order[position - 1] in chosen:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [(*run_of(bucket, members, rank), members) for members in runs]
