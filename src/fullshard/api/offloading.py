"""`offload_by_budget`: units whose sharded state lives in host memory, so that the rest fits a budget of bytes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import invalid_argument
from ..policies import CPUOffloadPolicy
from ..runtime import Runner, runner_of
from ..shard import Unit, home_of, is_parked, offload_unit
from ..text import size
from ..torch_private.local_tensor import plain_tensors
from . import messages
from .preconditions import refuse_contexts, refuse_running, runners_of

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class Offloaded:
    """The result of `offload_by_budget`, the same on every rank of a mesh. Bytes are those of one rank.

    Attributes:
        units: names of the units that were moved to host memory, in the order in which they were chosen.
        host: bytes of parameters, gradients and optimizer state of these units.
        device: bytes of those of all other units, which stay on the device.
        budget: the bytes that were allowed there; `math.inf`: any number.
    """

    units: tuple[str, ...]
    host: int
    device: int
    budget: float

    def __str__(self) -> str:
        moved = f"{len(self.units)} unit(s) in host memory ({size(self.host)}): {', '.join(self.units)}"
        allowed = f"of a budget of {size(int(self.budget))}" if math.isfinite(self.budget) else "without a budget"
        moved = moved if self.units else "no unit has to leave the device"
        return f"{moved}; {size(self.device)} on the device, {allowed}"


def offload_by_budget(
    model: nn.Module, budget: float, *, state_bytes: int = 8, policy: CPUOffloadPolicy | None = None
) -> Offloaded:
    """Move the sharded state of as few units as needed to host memory, so that the rest fits a budget on the device.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        print(fullshard.offload_by_budget(model, 20 * 2**30))  # before optimizer = ...

    A unit that is moved runs from then on as one that was built with `offload_policy=CPUOffloadPolicy()`: whole units,
    with their parameters, gradients and optimizer state. Parameters stay the same objects. No communication; call it on
    every rank. The choice depends on layouts and dtypes alone, so it is the same on all ranks of a mesh.

    Units that run last in forward (in the order of `model.modules()`) are moved first. Each costs the same copies, but
    the last ones get their gradients first in backward, so that their steps on the host (`step_in_backward`) have the
    longest time beside it; and they are gathered last in the next forward, which the first units would delay. A unit
    around other units comes after those, and the root, which is gathered first, last. Finally units that are not needed
    return to the device: no unit that was chosen can be left out.

    On a CPU nothing is offloaded, whatever the policies of its units; the result is the choice that a device of that
    budget would get if nothing were offloaded there either.

    Args:
        model: sharded by either front-end; units that are offloaded already stay so, and do not count.
        budget: bytes on the device, of one rank, for sharded parameters, their gradients and optimizer state.
            Parameters in no unit, gathered units and activations are not in it (`fullshard.plan` has those).
        state_bytes: bytes of optimizer state per trainable element: 8 for AdamW's two float32, 4 for momentum, 0.
        policy: the kind of host memory; None: `CPUOffloadPolicy()`, which is page-locked.

    Returns:
        What was chosen; `print` shows it in one line.

    Raises:
        ConfigError: `model` has no units; `budget` or `state_bytes` is not a number of at least 0; an optimizer has
            stepped, or a backward has run: state or gradients may be on the device already. (An optimizer that creates
            state when it is built, such as Adagrad, cannot be noticed: build it afterwards.)
        PhaseError: a forward or backward runs, or part of the model is parked. Nothing has changed in either case.
    """
    runners = runners_of(model, "offload_by_budget")
    for name, value in (("budget", budget), ("state_bytes", state_bytes)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        if not is_number or (name == "state_bytes" and not math.isfinite(value)):
            raise invalid_argument(f"offload_by_budget({name}=)", value, "bytes, at least 0")
    policy = CPUOffloadPolicy() if policy is None else policy
    if not isinstance(policy, CPUOffloadPolicy):
        raise invalid_argument("offload_by_budget(policy=)", policy, "a CPUOffloadPolicy or None")
    names = _names(model)
    _refuse_late(runners, names)
    movable = [runner for runner in reversed(runners) if not _at_home(runner.unit)]
    sizes = [bytes_of(runner.unit, state_bytes) for runner in movable]
    chosen = choose(sizes, budget)
    left = sum(sizes) - sum(sizes[index] for index in chosen)
    for index in chosen:
        unit = movable[index].unit
        if unit.buckets and (home := home_of(policy, unit.buckets[0].axes.device)) is not None:
            offload_unit(unit, home)
    result = Offloaded(
        tuple(names[id(movable[index])] for index in chosen), sum(sizes[index] for index in chosen), left, budget
    )
    logger.info("offload_by_budget: %s", result)
    return result


def choose(sizes: Sequence[int], budget: float) -> list[int]:
    """Return the indices to move, in order, such that the others' sizes fit the budget; pure.

    Takes sizes from the first on until the rest fits, then gives back from the last on whatever still fits.
    """
    left, chosen = sum(sizes), []
    for index, nbytes in enumerate(sizes):
        if left <= budget:
            break
        if nbytes:
            chosen.append(index)
            left -= nbytes
    for index in reversed([*chosen]):
        if left + sizes[index] <= budget:
            chosen.remove(index)
            left += sizes[index]
    return chosen


def bytes_of(unit: Unit, state_bytes: int) -> int:
    """Bytes of a unit's sharded parameters, gradients and optimizer state on one rank, padding included."""
    total = 0
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        total += sum(plain.nbytes for tensor in bucket.shard_tensors for plain in plain_tensors(tensor))
        if any(member.sharded.requires_grad for member in bucket.members):
            total += bucket.layout.shard_numel * (gradients.delivery.grad_dtype.itemsize + state_bytes)
    return total


def _at_home(unit: Unit) -> bool:
    return any(bucket.home is not None for bucket in unit.buckets)


def _names(model: nn.Module) -> dict[int, str]:
    """The name of the first module of each runner, by id; "(root)" for `model` itself."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if (runner := runner_of(module)) is not None:
            names.setdefault(id(runner), name or "(root)")
    return names


def _refuse_late(runners: Sequence[Runner], names: dict[int, str]) -> None:
    """Raise unless no optimizer has stepped, no gradient was delivered, and the units are at rest."""
    refuse_running(list(runners), "offload_by_budget")
    parked = [names[id(runner)] for runner in runners if is_parked(runner.unit)]
    if parked:
        raise messages.parked_already("offload_by_budget", parked)
    for runner in runners:
        unit: Any = runner.unit
        refuse_contexts(runner, names[id(runner)], "offload_by_budget")
        trained = unit.touched.count or any(gradients.delivery.set is not None for gradients in unit.gradients)
        if trained or any(gradients.waiting() for gradients in unit.gradients):
            raise messages.offloaded_late(names[id(runner)], bool(unit.touched.count))
