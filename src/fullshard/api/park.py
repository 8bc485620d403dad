"""`park` and `resume`: move a sharded model and its optimizers to host memory while the device serves other work."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..containers import leaves_in
from ..forms import owner_of
from ..runtime import Runner
from ..shard import Mover, is_parked, park_unit, refuse_undoable, refuse_unreduced, resume_unit
from ..text import size
from ..torch_private.local_tensor import plain_tensors
from . import messages
from .preconditions import refuse_contexts, refuse_running, runners_of

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class Moved:
    """The result of `park` or `resume` on this rank, in bytes of parameters, gradients, optimizer state and buffers.

    Attributes:
        moved: bytes that were copied; the memory they occupied before is released.
        stayed: bytes that were in place already (offloaded state, a step counter; on a CPU, everything).
    """

    moved: int
    stayed: int

    def __str__(self) -> str:
        if not self.moved:
            return f"nothing was moved: {size(self.stayed)} were in place already"
        return f"{size(self.moved)} were moved, {size(self.stayed)} were in place already"


@dataclass
class _Parked:
    """The data that `resume` needs to restore a parked model.

    Attributes:
        optimizers: the optimizers that were parked with it.
        devices: id of a plain tensor outside all units -> the tensor and the device it was on.
    """

    optimizers: list[weakref.ref[Any]]
    devices: dict[int, tuple[torch.Tensor, torch.device]]


_parked: weakref.WeakKeyDictionary[nn.Module, _Parked] = weakref.WeakKeyDictionary()


def park(model: nn.Module, *optimizers: torch.optim.Optimizer, pin_memory: bool = False) -> Moved:
    """Move a sharded model's parameters, gradients, buffers and optimizer state into host memory.

    No communication; call it on every rank, between steps. Parameters, gradients and state stay the objects they are,
    so optimizers, schedulers and references stay valid. While parked, `state_dict`, `save`, `load`, `load_state_dict`
    and optimizer steps work on host memory; a forward, a backward or `unshard()` raises a `PhaseError`. Gathered units
    are freed first.

    The device's memory goes back to torch's allocator; `torch.accelerator.memory.empty_cache()` (or
    `torch.cuda.empty_cache()`) releases it to other processes. On a CPU, or with offloaded shards, there is nothing to
    move: the model is parked all the same, and `Moved` reports 0 bytes.

    Args:
        model: the root, or a module with units in it, of either front-end and any layout.
        optimizers: the optimizers to park; the state of any others stays where it is.
        pin_memory: use page-locked host memory: slower to allocate, two to three times as fast to copy. Has no effect
            without an accelerator.

    Returns:
        The bytes that were moved, and those that were in host memory already.

    Raises:
        ConfigError: `model` has no units, or an optimizer has none of its parameters.
        PhaseError: part of it is parked already; a forward, a backward, `keep_gathered` or `summon_full_params` is
            running; gradients accumulated without sync are not reduced yet, or steps may still be undone
            (`step_in_backward(clip="redo")`). Nothing has changed then.
    """
    runners = runners_of(model, "park")
    _check_optimizers(model, runners, optimizers)
    refuse_running(runners, "park")
    parked = [runner.unit.name or "(root)" for runner in runners if is_parked(runner.unit)]
    if parked or model in _parked:
        raise messages.parked_already("park", parked)
    refuse_undoable([runner.unit for runner in runners])
    for runner in runners:
        refuse_contexts(runner, runner.unit.name, "park")
        refuse_unreduced(runner.unit.name, runner.unit.gradients, "parked", "park the model")
    for runner in runners:
        runner.unit.reshard()
        runner.unit.refresh()
    accelerated = any(bucket.axes.device.type != "cpu" for runner in runners for bucket in runner.unit.buckets)
    mover = Mover(torch.device("cpu"), pinned=pin_memory and accelerated)
    # Before anything moves: if memory runs out, `resume` restores what has moved.
    parked_model = _parked[model] = _Parked([weakref.ref(optimizer) for optimizer in optimizers], {})
    for runner in runners:
        runner.kept = False
        park_unit(runner.unit, mover)
    for tensor, _ in list(_outside_units(model, optimizers)):
        parked_model.devices |= {id(plain): (plain, plain.device) for plain in plain_tensors(tensor)}
        mover.move_inside(tensor)
    return _logged("park", Moved(mover.moved, mover.stayed))


def resume(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Moved:
    """Move a parked model, and the optimizers that were parked with it, back to their devices.

    No communication; call it on every rank. Values are those that were parked, bit for bit, or those loaded since. If
    `park` or `resume` runs out of memory, call `resume`: it moves what is not on its device.

    Args:
        model: the module that was passed to `park`.
        optimizers: all optimizers passed to `park` that are still alive; may include others.

    Returns:
        The bytes that were moved, and those that were in place already.

    Raises:
        ConfigError: a parked optimizer is missing. Nothing has changed then.
        PhaseError: `model` is not parked.
    """
    runners = runners_of(model, "resume")
    parked_model = _parked.get(model)
    if parked_model is None:
        raise messages.not_parked(any(is_parked(runner.unit) for runner in runners))
    passed = {id(optimizer) for optimizer in optimizers}
    for reference in parked_model.optimizers:
        if (optimizer := reference()) is not None and id(optimizer) not in passed:
            raise messages.optimizer_left_out(type(optimizer).__name__)
    moved = stayed = 0
    for runner in runners:
        unit_bytes = resume_unit(runner.unit)
        moved, stayed = moved + unit_bytes[0], stayed + unit_bytes[1]
    movers: dict[torch.device, Mover] = {}
    for tensor, fallback in _outside_units(model, optimizers):
        for plain in plain_tensors(tensor):
            device = parked_model.devices.get(id(plain), (plain, fallback))[1]
            movers.setdefault(device, Mover(device)).move_inside(plain)
    del _parked[model]
    moved += sum(mover.moved for mover in movers.values())
    stayed += sum(mover.stayed for mover in movers.values())
    return _logged("resume", Moved(moved, stayed))


def _logged(function: str, moved: Moved) -> Moved:
    logger.info("%s: %s", function, moved)
    return moved


def _check_optimizers(model: nn.Module, runners: Sequence[Runner], optimizers: Sequence[Any]) -> None:
    units = {id(runner.unit) for runner in runners}
    plain = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        groups: Any = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise messages.not_an_optimizer(type(optimizer).__name__)
        parameters = [p for group in groups for p in group["params"]]
        if not any(id(p) in plain or id(owner_of(p)) in units for p in parameters):
            raise messages.optimizer_of_another_model(type(optimizer).__name__)


def _outside_units(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[torch.Tensor, torch.device]]:
    """Tensors outside all units: ignored parameters, their gradients, buffers, and optimizer state.

    Each with the device to resume on if it did not exist when the model was parked.
    """
    for ignored in model.parameters():
        if owner_of(ignored) is None:
            yield ignored, ignored.device
            if ignored.grad is not None:
                yield ignored.grad, ignored.grad.device
    for buffer in model.buffers():
        yield buffer, buffer.device
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            unit = owner_of(parameter) if isinstance(parameter, torch.Tensor) else None
            for value in leaves_in(state) if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    computes = value.dim() > 0 and unit is not None and unit.buckets
                    yield value, unit.buckets[0].shard.device if computes else value.device
