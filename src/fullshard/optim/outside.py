"""Parameters that an optimizer steps beside sharded ones and that no unit holds: nothing averages their gradients.

Usually `fully_shard` was applied to a model's blocks and never to the model: its embedding, norm and head are then
trained on each rank's own data alone, and drift apart without a word.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import message
from ..forms import owner_of
from ..runtime import all_roots, left_alone_by_all, runners_in

_SHOWN = 5  # names in a warning
MOST_LOOKS = 16  # at all objects of the process: programs may make an optimizer for each parameter
LOOKED: list[bool] = []
"""Whether each look of this process found something."""


def warn_of_outside(parameters: Sequence[torch.Tensor]) -> None:
    """Warn, once in a process, of an optimizer's parameters with gradients that nothing known to us averages.

    Of those beside sharded ones, in the optimizer or in the model. Not meant are those that a unit was told to ignore,
    those under `DistributedDataParallel`, those with hooks of the user's on their gradients, and `DTensor`s, which some
    other plan distributes.
    """
    if len(LOOKED) >= MOST_LOOKS or any(LOOKED):
        return
    outside = [one for one in parameters if owner_of(one) is None and _is_plain(one)]
    if not outside or not any(_on_several_ranks(runner) for root in all_roots() for runner in root.units):
        return
    ignored = left_alone_by_all()
    beside = any(owner_of(one) is not None for one in parameters)
    names = _names_of([one for one in outside if id(one) not in ignored], beside)
    LOOKED.append(bool(names))
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        warnings.warn(
            message(
                "An optimizer steps parameters that no unit holds, beside sharded ones: their gradients are this "
                "rank's own, and ranks drift apart.",
                parameter=shown,
                expected="every trained parameter in a unit",
                remedy="call fully_shard(model) on the whole model after its blocks (or wrap it whole): it takes what "
                "no block took. Where you average these gradients yourself, name them in ignored_params= "
                "(ignored_states= of the wrapper). (Shown once per process.)",
                topic="root-forgotten",
            ),
            stacklevel=5,
        )


def _on_several_ranks(runner: Any) -> bool:
    return any(bucket.axes.world > 1 for bucket in runner.unit.buckets)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is a leaf of one rank alone that has a gradient, which nothing looks at on its way."""
    return (
        isinstance(parameter, nn.Parameter)
        and not isinstance(parameter, DTensor)
        and parameter.grad is not None
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _names_of(parameters: Sequence[torch.Tensor], beside: bool) -> list[str]:
    """Their names from the outermost modules that hold them, without those under `DistributedDataParallel`.

    Looks at all objects that Python tracks, for nothing leads from a parameter to its module.

    Args:
        beside: take those of modules without units, too.
    """
    modules: list[nn.Module] = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    modules = [one for one in modules if "_modules" in vars(one)]  # the `__init__` of others has not run, or raised
    below = {id(child) for module in modules for child in module._modules.values() if child is not None}
    wanted = {id(one): f"of shape {tuple(one.shape)}" if beside else "" for one in parameters}
    averaged: set[int] = set()
    for top in modules:
        if isinstance(top, DistributedDataParallel):
            averaged.update(id(one) for one in top.parameters())
        elif id(top) not in below and (beside or runners_in(top)):
            wanted.update({id(one): name for name, one in top.named_parameters() if id(one) in wanted})
    return [name for key, name in wanted.items() if name and key not in averaged]
