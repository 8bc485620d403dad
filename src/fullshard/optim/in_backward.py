"""Steps an optimizer unit by unit during the backward, so that the gradients of few units are alive at once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, PhaseError
from ..forms import NAME_KEY, PART_KEY, note_change, owner_of
from ..shard import Unit, release_all
from ..torch_private.local_tensor import write_grad
from ..torch_private.step_hooks import without_step_hooks
from .clip import STEPPED_KEY, joined_norm, local_norms, scale_gradients
from .owner_optimizer import OwnerOptimizer
from .probe import treats_parameters


class StepsInBackward:
    """What `step_in_backward` returns.

    Attributes:
        optimizer: the optimizer that steps.
        max_norm: see `step_in_backward`.
        norm: the total norm that the last `measure()` found; None once the optimizer has stepped by it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        self.optimizer, self.max_norm = optimizer, max_norm
        self.norm: torch.Tensor | None = None
        self._measuring = False
        self._norms: dict[int, list[tuple[list[dist.ProcessGroup], torch.Tensor]]] = {}  # by id of a parameter
        self._waiting: dict[int, torch.Tensor] = {}  # by id: parameters of one unit, whose gradients are complete
        self._unit: Unit | None = None  # theirs
        self._counts: dict[Unit, int] = {}  # parameters that the optimizer steps
        self._handles: list[Any] = []
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in self._parameters:
            unit = owner_of(parameter)
            if unit is not None:
                self._counts[unit] = self._counts.get(unit, 0) + 1
                # Python's garbage collector does not see what hooks refer to, and would never free the model.
                hook = partial(_complete, weakref.ref(self))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.__dict__[STEPPED_KEY] = self
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Step after backwards again, when `optimizer.step()` is called."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.__dict__.pop(STEPPED_KEY, None)
        self._handles = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """A context for a first pass, whose gradients are measured and dropped. Collective when it ends.

        The pass that follows must be of the same batch. Random numbers (dropout) are those of before again, on the CPU
        and on the current accelerator; buffers that a forward changes (batch statistics) change in both passes.

        Raises:
            ConfigError: there is no `max_norm` to measure for.
        """
        if self.max_norm is None:
            raise ConfigError(
                "measure() is for clipping.",
                expected="step_in_backward(optimizer, max_norm=...)",
                topic="step-in-backward",
            )
        self._measuring, self._norms = True, {}
        try:
            with _same_random_numbers():
                yield
            self._use([p for p in self._parameters if p.grad is not None])
            self.norm = joined_norm(self._by_groups(), 2.0, self._parameters[0].device)
        finally:
            self._measuring, self._norms, self._waiting, self._unit = False, {}, {}, None

    def _by_groups(self) -> list[tuple[list[dist.ProcessGroup], torch.Tensor]]:
        """What was measured, in the order of the parameters, as `clip_grad_norm_` has it: to the bit the same norm."""
        together: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
        for parameter in self._parameters:
            for groups, norms in self._norms.get(id(parameter), ()):
                together.setdefault(tuple(map(id, groups)), (groups, []))[1].append(norms)
        return [(groups, torch.cat(norms)) for groups, norms in together.values()]

    def _complete(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is reduced: step its unit, if it was the last one."""
        unit = owner_of(parameter)
        if unit is not self._unit:
            self._flush()
            self._unit = unit
        self._waiting[id(parameter)] = parameter
        if len(self._waiting) == self._counts[unit]:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = [p for p in self._waiting.values() if p.grad is not None], {}
        if waiting:
            self._use(waiting)

    @torch.no_grad()
    def _use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step these parameters, or measure their gradients, and let the gradients go."""
        if self._measuring:
            self._norms |= zip(map(id, parameters), local_norms(parameters, 2.0), strict=True)
        else:
            self._clip(parameters)
            self._step(parameters)
        units = {owner_of(parameter): None for parameter in parameters}
        for parameter in parameters:
            write_grad(parameter, None)
        for unit in units:
            if unit is not None and all(gradients.delivery.all_none() for gradients in unit.gradients):
                release_all(unit.gradients)

    def _step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step these parameters alone. Settings that count steps are left to `optimizer.step()`, which counts once."""
        groups, chosen = self.optimizer.param_groups, {id(parameter) for parameter in parameters}
        before = [dict(group) for group in groups]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
            with without_step_hooks(self.optimizer):
                type(self.optimizer).step(self.optimizer)
        finally:
            for group, own in zip(groups, before, strict=True):
                group.clear()
                group.update(own)
        note_change(parameters)

    def _clip(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.max_norm is None:
            return
        if self.norm is None:
            raise PhaseError(
                "Gradients are to be clipped, and their norm is not known: the backward that measures it is missing.",
                parameter=parameters[0].__dict__.get(NAME_KEY, "?"),
                expected="a pass of the same batch inside measure() before each backward that steps",
                remedy="with steps.measure(): model(batch).loss.backward(); then the pass that steps; or max_norm=None",
                topic="step-in-backward",
            )
        scale_gradients([p.grad for p in parameters if p.grad is not None], self.norm, self.max_norm)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Of `optimizer.step()`, which steps what is left: parameters of no unit, or that not all ranks used."""
        self._waiting, self._unit = {}, None
        left = [parameter for parameter in self._parameters if parameter.grad is not None]
        if left:
            with torch.no_grad():
                self._clip(left)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.norm = None


def _complete(steps: weakref.ref[StepsInBackward], parameter: torch.Tensor) -> None:
    """The hook of a parameter whose gradient is reduced."""
    if (alive := steps()) is not None:
        alive._complete(parameter)


def step_in_backward(optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> StepsInBackward:
    """Step each unit's parameters as soon as its gradients are reduced, and free these, during the backward.

        steps = fullshard.step_in_backward(optimizer)
        for batch in data:
            model(batch).loss.backward()  # steps
            optimizer.step()  # what is left, and schedulers' count
            optimizer.zero_grad()

    A rank then holds the reduced gradients of about one unit in place of all. The numbers are those of steps after the
    backward. A backward that reduces gradients is a step: accumulate micro-batches without sync
    (`model.set_requires_gradient_sync(False)`) before it. Gradient scaling, which has to look at all gradients first,
    is not supported, and `clip_grad_norm_` is refused. Clipping takes a pass of its own:

        steps = fullshard.step_in_backward(optimizer, max_norm=1.0)
        for batch in data:
            with steps.measure():
                model(batch).loss.backward()
            model(batch).loss.backward()
            optimizer.step()

    Fused backward and step: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
    Resources" (LOMO, arXiv:2306.09782), section 3; two passes for the norm: section 3.3.1.

    Args:
        optimizer: of parameters of `fully_shard`; others among them are stepped by `optimizer.step()`. It must step
            parameters one by one.
        max_norm: the largest total norm (of order 2) of the gradients; None: they are not clipped.

    Raises:
        ConfigError: the optimizer steps in backward already, cannot step some parameters alone, or has runs of elements
            (of FullyShardedDataParallel or `optimizer_view`); `max_norm` is no positive number.
    """
    name = type(optimizer).__name__
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and 0 < max_norm < math.inf):
        raise ConfigError(
            "step_in_backward: max_norm is out of range.", expected="a positive number, or None", got=repr(max_norm)
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    got = _unfit(optimizer, parameters)
    if got is None and treats_parameters(type(optimizer), optimizer.defaults, optimizer.param_groups) is False:
        got = f"{name}, whose step of a parameter depends on other parameters"
    if got is not None:
        raise ConfigError(
            "step_in_backward: this optimizer cannot step unit by unit.",
            expected="an optimizer of model.parameters(), of a model of fully_shard",
            got=got,
            remedy="step it after the backward; or take an element-wise optimizer (SGD, Adam, AdamW, ...)",
            topic="step-in-backward",
        )
    return StepsInBackward(optimizer, max_norm)


def _unfit(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> str | None:
    """Why an optimizer cannot step unit by unit, as far as its class and parameters say; None if it can."""
    name = type(optimizer).__name__
    if any(STEPPED_KEY in parameter.__dict__ for parameter in parameters):
        return f"{name}, whose parameters step in backward already"
    if any(PART_KEY in parameter.__dict__ for parameter in parameters):
        return f"{name} of runs of elements"
    if isinstance(optimizer, OwnerOptimizer):
        return f"{name}, which exchanges all parameters at once"
    if not any(owner_of(parameter) for parameter in parameters):
        return f"{name} without sharded parameters"
    return None


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A context after which random numbers go on as before it, on the CPU and on the current accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        index = torch.get_device_module(device).current_device()
        with torch.random.fork_rng(devices=[index], device_type=device.type):
            yield
