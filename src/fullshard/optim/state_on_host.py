"""`optimizer_state_on_host`: an optimizer's state in host memory, copied to the device a unit at a time for its step.

    compute   |-- step 1 --|-- step 2 --|-- step 3 --|        waits for the copy in of its own unit
    inward    '-- in 2 ----'-- in 3 ----'                     while the unit before it steps
    outward                '-- out 1 ---'-- out 2 ---'

The state of a unit is one page-locked buffer, and one copy of it on the device, in which the state tensors lie in turn:
they stay the same objects. At most four units' copies exist: one that arrives, one that steps, two that leave.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from ..comm import Lanes, host_buffer, lanes_of, turns_on
from ..containers import tensors_in
from ..errors import ConfigError
from ..forms import NAME_KEY, note_change, owner_of
from ..optimizers import parameters_of
from ..text import size
from ..torch_private.local_tensor import follow_local, plain_access, read_grad, write_grad
from ..torch_private.step_hooks import closure_of, hook_closely, with_closure
from .clip import STEPPED_KEY
from .in_backward import ON_HOST_KEY, why_not_in_parts
from .outer_steps import OuterSteps
from .plain_step import step_part_plainly
from .state_file import AFTER_STEP_KEY, ALIGN, Place, elementwise

logger = logging.getLogger("fullshard")


class _Part:
    """The state of a unit's parameters, or of one parameter that is in no unit.

    Attributes:
        parameters: those that have stepped, by id.
        memory: [bytes], page-locked; None before the first step, and if the state stays on the device.
        offsets: where each state tensor lies in `memory`, in bytes.
        copy: [bytes], of `memory` on the device, from its copy in to its copy out.
        versions: of the state tensors when `copy` was made.
        stays: whether the state stays on the device.
    """

    __slots__ = ("copy", "memory", "offsets", "parameters", "stays", "versions")

    def __init__(self) -> None:
        self.parameters: dict[int, torch.Tensor] = {}
        self.memory: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.offsets: dict[Place, int] = {}
        self.versions: list[int] = []
        self.stays = False

    def tensors(self, optimizer: torch.optim.Optimizer) -> list[tuple[Place, torch.Tensor]]:
        """The plain state tensors that have an element for each element of a parameter."""
        states = [(p, optimizer.state.get(p) or {}) for p in self.parameters.values()]
        return [found for parameter, state in states for found in elementwise(parameter, state)]

    def show(self, optimizer: torch.optim.Optimizer, memory: torch.Tensor) -> None:
        """Let the state tensors lie in `memory`, which has their values."""
        for place, plain in self.tensors(optimizer):
            nbytes = plain.numel() * plain.element_size()
            start = self.offsets[place]
            plain.data = memory[start : start + nbytes].view(plain.dtype).view(plain.shape)
        self.follow(optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let tensors around the plain ones, such as DTensors, report their device."""
        for parameter in self.parameters.values():
            for tensor in tensors_in(optimizer.state.get(parameter) or {}):
                follow_local(tensor)


class StateOnHost:
    """An optimizer's state in host memory, as made by `optimizer_state_on_host`.

    Attributes:
        nbytes: bytes of state in host memory, of this rank; grows in the first step.
        kept: bytes of state that stay on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, keep: int, device: torch.device, lanes: Lanes) -> None:
        self.kept = 0
        self._optimizer, self._keep, self._device, self._lanes = weakref.ref(optimizer), keep, device, lanes
        self._parts: dict[Any, _Part] = {}  # by number of the unit, or id of the parameter
        self._following: dict[Any, Any] = {}  # by key: the key that stepped after it last time
        self._last: Any = None  # the key that stepped last in this step
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters that have stepped, and their gradients
        with lanes.inward:
            self._turns = turns_on(device)  # device copies return to this lane's memory: it waits for their copies out
        self._outer = OuterSteps()
        self._takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters
        optimizer.__dict__[ON_HOST_KEY] = self
        self._unhook = hook_closely(optimizer, self._before_step, self._after_step)  # other hooks see gradients

    @property
    def nbytes(self) -> int:
        """See the class."""
        return sum(part.memory.nbytes for part in self._parts.values() if part.memory is not None)

    def __repr__(self) -> str:
        return f"{size(self.nbytes)} of optimizer state in host memory, {size(self.kept)} kept on {self._device}"

    def remove(self) -> None:
        """Undo `optimizer_state_on_host`: copy the state back to the device."""
        self._unhook()
        optimizer = self._optimizer()
        if optimizer is None or optimizer.__dict__.get(ON_HOST_KEY) is not self:
            return
        del optimizer.__dict__[ON_HOST_KEY]
        self._finish()
        with plain_access(), torch.no_grad():
            for part in self._parts.values():
                if part.memory is not None:
                    part.show(optimizer, part.memory.to(self._device, copy=True))
        self._parts = {}

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Step unit by unit, after the closure if there is one; then `optimizer.step()` finds no gradients."""
        is_outer = self._outer.begin()
        if STEPPED_KEY in optimizer.__dict__:  # `StepsInBackward` calls `step_all` itself, after clipping
            return None
        if is_outer:
            self.forget_hidden()
        closure = closure_of(args, kwargs) if self._takes_closure else None
        if isinstance(closure, _Stepping):  # torch runs hooks twice if a step calls `super().step`
            return None
        if not callable(closure):
            self.step_all(*args[1:], **kwargs)
            return None
        (_, *rest), others = with_closure(args, kwargs, None)
        return with_closure(args, kwargs, _Stepping(self, closure, rest, others))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Show the gradients again."""
        if self._outer.end():
            with plain_access():
                for parameter, grad in self._hidden:
                    write_grad(parameter, grad)
            self._hidden = []

    def forget_hidden(self) -> None:
        """Drop gradients that were hidden by a step that raised."""
        self._hidden = []

    @torch.no_grad()
    def step_all(self, *args: Any, **kwargs: Any) -> None:
        """Step all parameters that have gradients, unit by unit, and hide their gradients until the end of the step.

        Args:
            args, kwargs: of the optimizer's step.
        """
        optimizer: Any = self._optimizer()
        by_part: dict[Any, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if read_grad(parameter) is not None:
                    by_part.setdefault(_key(parameter), []).append(parameter)
        try:
            for parameters in by_part.values():
                self.step(parameters, *args, **kwargs)
        finally:
            self._finish()
        for parameter in chain.from_iterable(by_part.values()):
            if (grad := read_grad(parameter)) is not None:
                self._hidden.append((parameter, grad))
                write_grad(parameter, None)

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        """Step these parameters of one unit; start to copy in the state of the unit that stepped after it last time."""
        optimizer: Any = self._optimizer()
        key = _key(parameters[0])
        part = self._parts.setdefault(key, _Part())
        part.parameters |= {id(parameter): parameter for parameter in parameters}
        try:
            with plain_access():
                self._show(part)
                if self._last is not None:
                    self._following[self._last] = key
                self._last = key
                following = self._parts.get(self._following.get(key))
                if following is not None and following is not part:
                    self._copy_in(following)
            step_part_plainly(optimizer, parameters, *args, **kwargs)
        except BaseException:
            with plain_access():
                self._leave(part)
            self._finish()
            raise
        with plain_access():
            self._leave(part)
        note_change(parameters)

    def _copy_in(self, part: _Part) -> None:
        if part.memory is None:
            return
        optimizer: Any = self._optimizer()
        versions = [plain._version for _, plain in part.tensors(optimizer)]
        if part.copy is None or part.versions != versions:
            part.copy, part.versions = self._lanes.copy_in([part.memory], lambda copy: copy), versions

    def _show(self, part: _Part) -> None:
        """Let a unit's state tensors lie on the device; the compute stream waits for their copy."""
        optimizer: Any = self._optimizer()
        if self._is_whole(part, part.memory):
            self._copy_in(part)
            self._lanes.join()
            assert part.copy is not None
            part.show(optimizer, part.copy)
            return
        part.copy = None  # new, or loaded by the user
        for _, plain in part.tensors(optimizer):
            plain.data = plain.to(self._device)
        part.follow(optimizer)

    def _is_whole(self, part: _Part, memory: torch.Tensor | None) -> bool:
        """Whether all state tensors of a unit lie in `memory`, each in its place."""
        if memory is None:
            return False
        optimizer: Any = self._optimizer()
        start, tensors = memory.data_ptr(), part.tensors(optimizer)
        return all(plain.data_ptr() == start + part.offsets.get(place, -1) for place, plain in tensors)

    def _leave(self, part: _Part) -> None:
        """Let a unit's state tensors lie in host memory; they may be read there after `_finish`."""
        optimizer: Any = self._optimizer()
        copy, part.copy = part.copy, None
        if part.stays:
            return
        if copy is not None and self._is_whole(part, copy):
            assert part.memory is not None
            self._lanes.copy_out(part.memory, copy, self._turns)
            part.show(optimizer, part.memory)
            return
        tensors = part.tensors(optimizer)
        offsets, total = {}, 0
        for place, plain in tensors:
            offsets[place] = total
            total += -(-plain.numel() * plain.element_size() // ALIGN) * ALIGN
        if part.memory is None and self.kept + total <= self._keep:
            part.stays, self.kept = True, self.kept + total
            return
        if total:  # the host waits: the memory of these tensors is not a lane's
            memory = host_buffer(-(-total // 8)).view(torch.uint8)
            for place, plain in tensors:
                nbytes = plain.numel() * plain.element_size()
                target = memory[offsets[place] : offsets[place] + nbytes]
                target.view(plain.dtype).copy_(plain.contiguous().view(-1))
            part.memory, part.offsets = memory, offsets
            part.show(optimizer, memory)

    def _finish(self) -> None:
        """The end of a step: drop copies that no step used, and wait on the host until state may be read there."""
        for part in self._parts.values():
            part.copy = None
        self._last = None
        self._lanes.settle()


class _Stepping:
    """A step's closure, followed by the step of all units; and the step's other arguments."""

    def __init__(self, state: StateOnHost, closure: Callable[[], Any], args: Sequence[Any], kwargs: Any) -> None:
        self._state, self._closure, self._args, self._kwargs = state, closure, args, kwargs

    def __call__(self) -> Any:
        result = self._closure()
        self._state.step_all(*self._args, **self._kwargs)
        return result


def _key(parameter: torch.Tensor) -> Any:
    unit = owner_of(parameter)
    return id(parameter) if unit is None else ("unit", unit.number)


def optimizer_state_on_host(optimizer: torch.optim.Optimizer, *, keep: int = 0) -> StateOnHost | None:
    """Keep an optimizer's state in host memory; each unit's is copied to the device for its step, and back.

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        fullshard.optimizer_state_on_host(optimizer)

    Parameters and gradients stay on the device, where they step unit by unit. Copies run beside the steps of
    other units, and the state of at most four units is on the device. In `optimizer.step()` the host waits until the
    state is back. Results are the same bits; checkpoints (`save`, `state_dict`) work as without. With
    `step_in_backward`, units step, and their state is copied, during the backward: do not read it before
    `optimizer.step()`. To offload parameters and gradients too, use `CPUOffloadPolicy` or `offload_by_budget`.

    What moves are state tensors with an element for each element of a parameter: moments, but not step counts. A step
    copies each byte in and out once, between the device and page-locked memory. In the first step the state is created
    on the device, a unit at a time, and the host waits for each copy.

    Args:
        optimizer: any that steps parameters one by one; it may have stepped.
        keep: bytes of state that may stay on the device; the units that step first keep theirs, as far as it fits.

    Returns:
        The bytes in host memory, and `remove()`, which brings the state back. None if the parameters are in host memory
        already (offloaded, or on a CPU), and with them the state: nothing is done then.

    Raises:
        ConfigError: not an optimizer; one that cannot step unit by unit (an `OwnerOptimizer`, a step that computes
            gradients or depends on other parameters); its state is on disk, or on the host already; it steps in the
            backward with clip="redo"; parameters are on several devices; or `keep` is negative. Nothing has changed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _refused(f"not an optimizer: {type(optimizer).__name__}")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise _refused(f"keep={keep!r}")
    _check(optimizer)
    parameters = parameters_of([optimizer])
    devices = {parameter.device: parameter.__dict__.get(NAME_KEY, "?") for parameter in parameters}
    if len(devices) > 1:
        named = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise _refused(f"parameters on several devices: {named}", "offload all units or none")
    device = next(iter(devices), None)
    lanes = None if device is None else lanes_of(device)
    if lanes is None or device is None:
        logger.info("optimizer_state_on_host: the state is in host memory already, as the parameters are")
        return None
    return StateOnHost(optimizer, keep, device, lanes)


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer cannot step unit by unit, or something else moves or copies its state."""
    if ON_HOST_KEY in optimizer.__dict__:
        raise _refused("an optimizer whose state is in host memory already")
    if AFTER_STEP_KEY in optimizer.__dict__:
        raise _refused(
            "an optimizer whose state is on disk", "call remove() on the object that optimizer_state_on_disk returned"
        )
    if getattr(optimizer.__dict__.get(STEPPED_KEY), "clip", None) == "redo":
        raise _refused('step_in_backward(clip="redo"), which keeps copies of the state', 'use clip="two passes"')
    if (reason := why_not_in_parts(optimizer)) is not None:
        raise _refused(f"{type(optimizer).__name__}, {reason}")


def _refused(got: str, remedy: str | None = None) -> ConfigError:
    return ConfigError(
        "optimizer_state_on_host: the state cannot be in host memory.",
        expected="an optimizer that steps parameters one by one, and keep >= 0",
        got=got,
        remedy=remedy,
    )
