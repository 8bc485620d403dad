"""Steps the optimizers attached to sharded parameters during backward, as gradients are delivered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..forms import NAME_KEY, PART_KEY, owner_of
from ..shard import Unit
from ..torch_private.attached_optimizers import attached_to
from ..torch_private.local_tensor import write_grad
from .messages import attached_before_sharding, attached_to_several

_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def step_attached(parameter: torch.Tensor) -> None:
    """Step the optimizers attached to `parameter`, whose gradient is complete, then set the gradient to None.

    Raises:
        PhaseError: see `check_attached`.
    """
    attached = attached_to(parameter)
    if not all([optimizer in _checked for optimizer in attached]):
        check_attached(parameter)
        _checked.update(attached)
    for optimizer in attached:
        optimizer.step()
    write_grad(parameter, None)


def check_units(units: Iterable[Unit]) -> None:
    """Run `check_attached` on every tensor of these units that has an attached optimizer."""
    for unit in units:
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
            for tensor in [*(m.sharded for m in bucket.members), *(view.tensor for view in gradients.delivery.views)]:
                if tensor is not None and attached_to(tensor):
                    check_attached(tensor)


def check_attached(parameter: torch.Tensor) -> None:
    """Refuse optimizers that would step too early, or train nothing.

    Raises:
        PhaseError: they are attached to a tensor over several parameters, whose gradients may complete at different
            times; or they were attached before sharding, which replaced the parameter by a different object.
    """
    attributes, unit = parameter.__dict__, owner_of(parameter)
    if unit is None or not any(member.sharded is parameter for member in unit.members):
        name = attributes.get(NAME_KEY) or ", ".join(attributes.get("_fqns", ())) or None
        raise attached_to_several(name, attributes.get(PART_KEY))
    for optimizer in attached_to(parameter):
        if not any(entry is parameter for group in optimizer.param_groups for entry in group["params"]):
            raise attached_before_sharding(attributes.get(NAME_KEY), optimizer)
