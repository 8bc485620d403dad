"""`park` and `resume`: a sharded model and its optimizers in host memory, while the device serves something else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..forms import owner_of
from ..runtime import Runner, runners_in
from ..shard import Mover, is_parked, park_unit, refuse_unreduced, resume_unit
from ..torch_private.local_tensor import plain_tensors
from . import messages
from .gathered import refuse_running

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class Moved:
    """What `park` or `resume` did on this rank, in bytes of parameters, gradients, optimizer state and buffers.

    Attributes:
        moved: bytes that were copied; their old memory is given back.
        stayed: bytes that were there already (offloaded state, a step counter, everything where the model is on a CPU).
    """

    moved: int
    stayed: int

    def __str__(self) -> str:
        if not self.moved:
            return f"nothing was moved: {self.stayed / 2**20:.1f} MiB were there already"
        return f"{self.moved / 2**20:.1f} MiB were moved, {self.stayed / 2**20:.1f} MiB were there already"


@dataclass
class _Lot:
    """What a parked model has to get back.

    Attributes:
        optimizers: that were parked with it.
        devices: by id of a plain tensor that no unit holds, the tensor and where it was.
    """

    optimizers: list[weakref.ref[Any]]
    devices: dict[int, tuple[torch.Tensor, torch.device]]


_lots: weakref.WeakKeyDictionary[nn.Module, _Lot] = weakref.WeakKeyDictionary()


def park(model: nn.Module, *optimizers: torch.optim.Optimizer, pin_memory: bool = False) -> Moved:
    """Move a sharded model's parameters, gradients, buffers and optimizer state into host memory.

    No communication; call it on every rank, between steps. Parameters, gradients and state stay the objects they are,
    so optimizers, schedulers and references stay valid. While parked, `state_dict`, `save`, `load`, `load_state_dict`
    and optimizer steps work on host memory; a forward, a backward or `unshard()` raises a `PhaseError`. Gathered units
    are freed first.

    The device's memory goes back to torch's allocator; `torch.accelerator.memory.empty_cache()` (or
    `torch.cuda.empty_cache()`) gives it to other processes. On a CPU, or with offloaded shards, there is nothing to
    move: the model is parked all the same, and `Moved` says that no bytes were.

    Args:
        model: the root, or a module with units in it; of either front-end, any layout.
        optimizers: whose state goes along; those that are left out keep theirs where it is.
        pin_memory: page-locked host memory: slower to take, two to three times as fast to copy. Where there is an
            accelerator.

    Returns:
        Bytes that were moved, and that were in host memory before.

    Raises:
        ConfigError: `model` has no units; an optimizer has none of its parameters.
        PhaseError: a part of it is parked already; a forward, a backward, `keep_gathered` or `summon_full_params` runs;
            gradients that were accumulated without sync wait to be reduced. Nothing has changed then.
    """
    runners = _runners(model, "park")
    _check_optimizers(model, optimizers)
    refuse_running(runners, "park")
    parked = [runner.unit.name or "(root)" for runner in runners if is_parked(runner.unit)]
    if parked or model in _lots:
        raise messages.parked_already(parked)
    for runner in runners:
        if runner.held or runner.unit.showing.summoned:
            raise messages.parked_within_a_block(runner.held > 0, runner.unit.name)
        refuse_unreduced(runner.unit.name, runner.unit.gradients, "parked", "park the model")
    for runner in runners:
        runner.unit.reshard()
        runner.unit.refresh()
    accelerated = any(bucket.axes.device.type != "cpu" for runner in runners for bucket in runner.unit.buckets)
    mover = Mover(torch.device("cpu"), pinned=pin_memory and accelerated)
    for runner in runners:
        runner.kept = False
        park_unit(runner.unit, mover)
    apart = list(_held_apart(model, optimizers))
    lot = _Lot([weakref.ref(optimizer) for optimizer in optimizers], {})
    for tensor in apart:
        lot.devices |= {id(plain): (plain, plain.device) for plain in plain_tensors(tensor)}
        mover.move_inside(tensor)
    _lots[model] = lot
    return _told("park", Moved(mover.moved, mover.stayed))


def resume(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Moved:
    """Bring a parked model, and the optimizers that were parked with it, back to where they were.

    No communication; call it on every rank. Values are those that were parked, bit for bit, or what was loaded since.

    Args:
        model: the module that `park` was given.
        optimizers: all that `park` was given, as long as they are alive; others may be among them.

    Returns:
        Bytes that were moved, and that were there already.

    Raises:
        ConfigError: an optimizer that was parked is left out. Nothing has changed then.
        PhaseError: `model` is not parked.
    """
    runners = _runners(model, "resume")
    lot = _lots.get(model)
    if lot is None:
        parked = any(is_parked(runner.unit) for runner in runners)
        raise messages.not_parked(parked)
    given = {id(optimizer) for optimizer in optimizers}
    left = [one for ref in lot.optimizers if (one := ref()) is not None and id(one) not in given]
    if left:
        raise messages.optimizer_left_out(type(left[0]).__name__)
    moved = stayed = 0
    for runner in runners:
        there = resume_unit(runner.unit)
        moved, stayed = moved + there[0], stayed + there[1]
    movers: dict[torch.device, Mover] = {}
    for tensor, fallback in _with_devices(model, optimizers):
        for plain in plain_tensors(tensor):
            device = lot.devices[id(plain)][1] if id(plain) in lot.devices else fallback
            movers.setdefault(device, Mover(device)).move_inside(plain)
    del _lots[model]
    moved += sum(mover.moved for mover in movers.values())
    stayed += sum(mover.stayed for mover in movers.values())
    return _told("resume", Moved(moved, stayed))


def _told(what: str, moved: Moved) -> Moved:
    logger.info("%s: %s", what, moved)
    return moved


def _runners(model: nn.Module, what: str) -> list[Runner]:
    runners = runners_in(model) if isinstance(model, nn.Module) else []
    if not runners:
        raise messages.takes_a_sharded_model(what, type(model).__name__)
    return runners


def _check_optimizers(model: nn.Module, optimizers: Sequence[Any]) -> None:
    units = {id(runner.unit) for runner in runners_in(model)}
    plain = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        groups: Any = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise messages.not_an_optimizer(type(optimizer).__name__)
        given = [p for group in groups for p in group["params"]]
        if not any(id(p) in plain or id(owner_of(p)) in units for p in given):
            raise messages.optimizer_of_another_model(type(optimizer).__name__)


def _held_apart(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """What no unit holds: parameters that are left alone, their gradients, buffers, and optimizer state."""
    for tensor, _ in _with_devices(model, optimizers):
        yield tensor


def _with_devices(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[torch.Tensor, torch.device]]:
    """The same, each with the device it is to be on if it was not there when the model was parked."""
    for alone in model.parameters():
        if owner_of(alone) is None:
            yield alone, alone.device
            if alone.grad is not None:
                yield alone.grad, alone.grad.device
    for buffer in model.buffers():
        yield buffer, buffer.device
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            unit = owner_of(parameter) if isinstance(parameter, torch.Tensor) else None
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    computes = value.dim() > 0 and unit is not None and unit.buckets
                    yield value, unit.buckets[0].shard.device if computes else value.device
