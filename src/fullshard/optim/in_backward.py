"""Step an optimizer unit by unit during the backward, so that only a few units have gradients at a time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ..errors import ConfigError, PhaseError, invalid_argument
from ..forms import NAME_KEY, PART_KEY, note_change, owner_of
from ..generators import restored_generators
from ..optimizers import parameters_of
from ..shard import UNDOABLE, Unit, refuse_undoable, release_all
from ..torch_private.autograd_task import BackwardEnd, inside_backward
from ..torch_private.local_tensor import write_grad
from ..torch_private.step_hooks import needs_closure
from .clip import STEPPED_KEY, Groups, clip_scale, joined_norm, local_norms, on_one_device, scale_gradients
from .guard import check_parameters
from .owner_optimizer import OwnerOptimizer
from .plain_step import step_part_plainly
from .probe import steps_in_parts, treats_elements, treats_parameters
from .state_file import AFTER_STEP_KEY
from .undo import StepUndo
from .worker import StepWorker, check_threads

Clip = Literal["two passes", "redo"]
ON_HOST_KEY = "_fullshard_state_on_host"
"""Attribute of an optimizer: its `StateOnHost`, which steps in place of `step_part_plainly`."""


class StepsInBackward:
    """An optimizer that steps during the backward, as returned by `step_in_backward`.

    Attributes:
        optimizer: the optimizer that steps.
        max_norm, clip: see `step_in_backward`.
        norm: the total norm of the gradients before clipping. In two passes: from the last `measure()`; None once the
            optimizer has stepped with it. With clip="redo": of the last `optimizer.step()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        clip: Clip,
        threads: int | Sequence[int] | None,
    ) -> None:
        self.optimizer, self.max_norm, self.clip = optimizer, max_norm, clip
        self._worker = None if threads is None else StepWorker(threads)
        self._end: BackwardEnd | None = None  # end of the last backward that gave the worker a step
        self.norm: torch.Tensor | None = None
        self._redoes = max_norm is not None and clip == "redo"
        self._undos: list[StepUndo] = []  # with the copies of the steps since `optimizer.step()`, in order; then unused
        self._assumed = 0  # how many of `_undos` are in use
        self._measuring = False
        self._measured = False  # whether gradients were measured that no unit has stepped with yet
        self._in_step = False  # inside `optimizer.step()`: torch runs hooks twice if it calls `super().step`
        self._norms: dict[int, tuple[Groups, torch.Tensor]] = {}  # by id of the parameter
        self._ready: dict[int, torch.Tensor] = {}  # by id: parameters of `_unit` whose gradients are reduced
        self._unit: Unit | None = None
        self._counts: dict[Unit, int] = {}  # how many of a unit's parameters the optimizer steps
        self._handles: list[Any] = []
        self._parameters = parameters_of([optimizer])
        optimizer.__dict__[STEPPED_KEY] = self
        for parameter in self._parameters:
            unit = owner_of(parameter)
            if unit is not None and parameter.requires_grad:  # if unfrozen later, `optimizer.step()` steps it
                self._counts[unit] = self._counts.get(unit, 0) + 1
                hook = _weakly(self._on_reduced)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.__dict__[STEPPED_KEY] = self
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Undo `step_in_backward`: parameters step in `optimizer.step()` again.

        Raises:
            PhaseError: units have stepped unclipped since the last `optimizer.step()` (clip="redo").
        """
        self._finish()
        refuse_undoable([*self._counts])
        for handle in self._handles:
            handle.remove()
        for stepped in (self.optimizer, *self._parameters):
            stepped.__dict__.pop(STEPPED_KEY, None)
        self._handles = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """A context for a first pass that measures gradients and discards them. Collective at its end.

        The next pass must use the same batch. The state of random generators (dropout), on every device, is
        restored at the end; buffers that a forward updates (batch statistics) are updated in both passes.

        Raises:
            ConfigError: `max_norm` is None, or clip="redo", which needs one pass.
        """
        if self.max_norm is None or self._redoes:
            raise ConfigError(
                "measure() needs a max_norm to clip to, in two passes.",
                expected='step_in_backward(optimizer, max_norm=..., clip="two passes")',
                got=f"max_norm={self.max_norm}, clip={self.clip!r}",
                topic="step-in-backward",
            )
        if self._measuring:
            raise PhaseError(
                "measure() was called inside measure(): gradients are measured already.",
                remedy="measure one pass at a time",
                topic="step-in-backward",
            )
        self._measuring, self._norms = True, {}
        try:
            with restored_generators():
                yield
            self._consume([p for p in self._parameters if p.grad is not None])
            self.norm = joined_norm(self._by_groups(), 2.0, self._parameters[0].device)
            self._measured = bool(self._norms)
        finally:
            self._measuring, self._norms, self._ready, self._unit = False, {}, {}, None

    def undo(self) -> None:
        """Undo the steps since the last `optimizer.step()`, bit for bit: after a backward that raised. For clip="redo".

        The gradients of these steps are dropped. No communication; call it on every rank or on none.
        """
        self._end = None
        if self._worker is not None:
            self._worker.drop()
        for undo in reversed(self._undos[: self._assumed]):
            undo.undo(self.optimizer)
        self._forget_steps()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory with copies that undo steps (clip="redo")."""
        return sum(undo.memory.nbytes for undo in self._undos)

    def _forget_steps(self) -> None:
        for undo in self._undos:
            undo.forget()
        UNDOABLE.pop(self, None)
        self._assumed, self._norms, self._ready, self._unit = 0, {}, {}, None

    def _by_groups(self) -> list[tuple[Groups, torch.Tensor]]:
        """The measured norms in the order of the parameters: the total is bitwise that of `clip_grad_norm_`."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if id(parameter) in self._norms:
                groups, norm = self._norms[id(parameter)]
                by_groups.setdefault(tuple(groups), []).append(norm)
        return [(groups, torch.cat(on_one_device(norms))) for groups, norms in by_groups.items()]

    def _on_reduced(self, parameter: torch.Tensor) -> None:
        """Step the unit of a parameter whose gradient is reduced, if it was the unit's last."""
        unit = owner_of(parameter)
        if unit is not self._unit:
            self._flush()
            self._unit = unit
        self._ready[id(parameter)] = parameter
        if len(self._ready) == self._counts[unit]:
            self._flush()

    @torch.no_grad()
    def _on_end(self) -> None:
        """The end of a backward: wait for steps beside it."""
        self._finish()

    def _flush(self) -> None:
        ready, self._ready = [p for p in self._ready.values() if p.grad is not None], {}
        if ready:
            self._consume(ready)

    @torch.no_grad()
    def _consume(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step these parameters, or measure their gradients, and free the gradients."""
        self._in_step = False  # may be left over from a step that raised
        step: Callable[[Sequence[torch.Tensor]], None] = self._step_clipped
        if self._measuring:
            self._note_norms(parameters)
        elif self._redoes:
            step = self._step_unclipped(parameters)
        if self._worker is not None and not self._measuring and _in_host_memory(parameters) and inside_backward():
            if self._end is None or self._end.alive() is None:
                self._worker.drop()  # steps left over from a backward that raised
                self._end = BackwardEnd(_weakly(self._on_end), 0)
            unit = owner_of(parameters[0])
            self._worker.submit(unit.name or "(root)", partial(step, parameters), partial(_free, parameters))
            return
        if not self._measuring:
            step(parameters)
        _free(parameters)

    def _finish(self) -> None:
        """Wait for steps beside the backward."""
        self._end = None
        if self._worker is not None:
            self._worker.finish()

    def _note_norms(self, parameters: Sequence[torch.Tensor]) -> None:
        self._norms |= zip(map(id, parameters), local_norms(parameters, 2.0), strict=True)

    @torch.no_grad()
    def _step_clipped(self, parameters: Sequence[torch.Tensor]) -> None:
        self._measured = False
        self._clip(parameters)
        self._step(parameters)

    def _step_unclipped(self, parameters: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
        """Return a function that steps these parameters unclipped and records how to undo that; note their norms."""
        if any(id(parameter) in self._norms for parameter in parameters):
            raise PhaseError(
                "A second backward stepped a parameter before it was known whether the first one is clipped.",
                parameter=parameters[0].__dict__.get(NAME_KEY, "?"),
                expected="optimizer.step() after each backward that reduces gradients",
                remedy="accumulate under model.set_requires_gradient_sync(False); after a backward that raised, call "
                "undo() of what step_in_backward returned",
                topic="step-in-backward",
            )
        self._note_norms(parameters)
        if self._assumed == len(self._undos):
            self._undos.append(StepUndo())
        self._assumed += 1
        UNDOABLE.setdefault(self, set()).add(owner_of(parameters[0]))
        return partial(self._recorded_step, self._undos[self._assumed - 1])

    def _recorded_step(self, undo: StepUndo, parameters: Sequence[torch.Tensor]) -> None:
        undo.record(self.optimizer, parameters)
        self._step(parameters)

    def _redo(self) -> None:
        """Undo the steps of this backward, and step again with clipped gradients, in the same order and portions."""
        for undo in self._undos[: self._assumed]:
            undo.undo(self.optimizer)
            undo.show_gradients()
            self._clip(undo.parameters)
            self._step(undo.parameters)
            for parameter in undo.parameters:
                write_grad(parameter, None)

    def _step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step only these parameters. Group settings that count steps change in `optimizer.step()` alone."""
        if (state := self.optimizer.__dict__.get(ON_HOST_KEY)) is not None:
            state.step(parameters)
            return
        step_part_plainly(self.optimizer, parameters)
        if (move := self.optimizer.__dict__.get(AFTER_STEP_KEY)) is not None:
            move(parameters)
        note_change(parameters)

    def _clip(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.max_norm is None:
            return
        if self.norm is None:
            raise PhaseError(
                "Cannot clip gradients: no backward has measured their norm.",
                parameter=parameters[0].__dict__.get(NAME_KEY, "?"),
                expected="a pass of the same batch inside measure() before each backward that steps",
                remedy="with steps.measure(): model(batch).loss.backward(); then the pass that steps; or max_norm=None",
                topic="step-in-backward",
            )
        scale_gradients([p.grad for p in parameters if p.grad is not None], self.norm, self.max_norm)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Clip the rest, which `optimizer.step()` steps: parameters in no unit, or that some ranks did not use."""
        if self._in_step:
            return
        state = optimizer.__dict__.get(ON_HOST_KEY)
        if state is not None:
            state.forget_hidden()
        if len(args) > 2 or kwargs.keys() - {"closure"}:
            raise ConfigError(
                "optimizer.step() got arguments, but with step_in_backward units have stepped without them.",
                expected="no argument but a closure",
                got=", ".join([*map(repr, args[2:]), *(name for name in kwargs if name != "closure")])[:200],
                remedy="call remove() on the object that step_in_backward returned, or set these values in the groups",
                topic="step-in-backward",
            )
        self._finish()
        if self.max_norm is not None and sum([len(g["params"]) for g in optimizer.param_groups]) > len(
            self._parameters
        ):
            own = set(map(id, self._parameters))
            added = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
            raise ConfigError(
                "Parameters were added to an optimizer that clips in the backward: the norm is without them.",
                parameter=added[0].__dict__.get(NAME_KEY, "?"),
                expected="all groups before step_in_backward(optimizer, max_norm=...)",
                remedy="call remove() on step_in_backward's result, add the group, and call step_in_backward again",
                topic="step-in-backward",
            )
        remaining = [parameter for parameter in self._parameters if parameter.grad is not None]
        if self._measured and not remaining:
            self._measured = False
            raise PhaseError(
                "optimizer.step() was called after measure() alone: it discards gradients, so nothing has stepped.",
                expected="a second pass of the same batch, which steps, between measure() and optimizer.step()",
                remedy="call model(batch).loss.backward() again after measure(); to skip this batch, do not step",
                topic="step-in-backward",
            )
        self._in_step, self._ready, self._unit, self._measured = True, {}, None, False
        with torch.no_grad():
            if self._redoes and self.max_norm is not None:
                self._note_norms(remaining)
                self.norm = joined_norm(self._by_groups(), 2.0, self._parameters[0].device)
                if clip_scale(self.norm, self.max_norm) != 1:  # NaN too, as clipping makes all gradients NaN then
                    self._redo()
                UNDOABLE.pop(self, None)
            if remaining:
                self._clip(remaining)
        if state is not None:
            state.step_all()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = False
        if self._redoes:
            self._forget_steps()
        else:
            self.norm = None


def _in_host_memory(parameters: Sequence[torch.Tensor]) -> bool:
    return all(parameter.device.type == "cpu" for parameter in parameters)


def _free(parameters: Sequence[torch.Tensor]) -> None:
    """Free the gradients of parameters that have stepped."""
    units = {owner_of(parameter): None for parameter in parameters}
    for parameter in parameters:
        write_grad(parameter, None)
    for unit in units:
        if unit is not None and all(gradients.delivery.all_none() for gradients in unit.gradients):
            release_all(unit.gradients)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a bound method for a hook, without keeping its object alive.

    Python's garbage collector does not see what hooks refer to, and would never free the model.
    """
    reference = weakref.WeakMethod(method)

    def called(*args: Any) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return called


def step_in_backward(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    clip: Clip = "two passes",
    threads: int | Sequence[int] | None = None,
) -> StepsInBackward:
    """Step each unit's parameters as soon as its gradients are reduced, and free these, during the backward.

        steps = fullshard.step_in_backward(optimizer)
        for batch in data:
            model(batch).loss.backward()  # steps
            optimizer.step()  # steps the remaining parameters and counts the step for schedulers
            optimizer.zero_grad()

    A rank then holds the reduced gradients of about one unit instead of all units, with the same results as stepping
    after the backward. Every backward that reduces gradients is a step: accumulate micro-batches without sync
    (`model.set_requires_gradient_sync(False)`) before it. Gradient scaling needs all gradients at once and is not
    supported; `clip_grad_norm_` raises an error. There are two ways to clip, both bit for bit `clip_grad_norm_` of the
    parameters in the order of the optimizer's groups, and a step afterwards. An additional pass measures the norm:

        steps = fullshard.step_in_backward(optimizer, max_norm=1.0)
        for batch in data:
            with steps.measure():
                model(batch).loss.backward()
            model(batch).loss.backward()
            optimizer.step()

    Or, with clip="redo", each unit steps as if nothing was clipped, and copies of its parameters, gradients and state
    before that stay in host memory (16 bytes per element with AdamW in float32). `optimizer.step()` computes the norm;
    if it is over `max_norm`, it undoes these steps and takes them again with clipped gradients, unit by unit. Until
    then forwards, saves, loads and `park` raise an error: the weights may not be those of the step. That is
    for runs in which few steps are clipped, on a device: where parameters are in host memory (a CPU, offloading), the
    copies take more there than the gradients that they replace. If a backward raises, call `steps.undo()`.

    With `threads`, units whose parameters are in host memory (offloaded, or on a CPU) step on a thread of their own
    while the backward goes on; up to two units wait for it, with their gradients. The backward ends when they have
    stepped, and raises what a step raised, with a note that names the unit. Results are the same bits.

    Fused backward and step: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
    Resources" (LOMO, arXiv:2306.09782), section 3; two passes for the norm: section 3.3.1. Steps that are undone:
    "speculation-then-validation" of Lian et al. 2025, "SuperOffload" (arXiv:2509.21271); here copies restore what was
    there, so that any optimizer's steps are undone exactly.

    Args:
        optimizer: an optimizer of parameters of `fully_shard` that steps parameters one by one. `optimizer.step()`
            steps its other parameters.
        max_norm: the largest total 2-norm of the gradients; None: no clipping.
        clip: how to clip: "two passes" or "redo".
        threads: processor threads of the thread that steps units in host memory; or a list of processors for it to run
            on, a thread each (Linux); None: they step on autograd's thread. For element-wise optimizers: the step of
            others may communicate, which only one thread of a rank may do.

    Raises:
        ConfigError: the optimizer already steps in backward, cannot step sharded parameters, or not one by one, or has
            flat runs of elements (of FullyShardedDataParallel or `optimizer_view`); `max_norm` is not a positive
            number; `clip` or `threads` is a different value, or `threads` was passed with an optimizer that is not
            element-wise.
    """
    is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and 0 < max_norm < math.inf):
        raise invalid_argument("step_in_backward(max_norm=)", max_norm, "a positive number or None")
    if clip not in get_args(Clip):
        raise invalid_argument("step_in_backward(clip=)", clip, " or ".join(map(repr, get_args(Clip))))
    if clip == "redo" and max_norm is None:
        raise ConfigError(
            'step_in_backward: clip="redo" needs a max_norm to clip to.', expected="max_norm=1.0, for example"
        )
    if not issubclass(type(optimizer), torch.optim.Optimizer):
        raise ConfigError("step_in_backward needs an optimizer.", got=type(optimizer).__name__)
    if (refusal := _why_not(optimizer, clip)) is not None:
        reason, remedy = refusal
        raise ConfigError(
            "step_in_backward: this optimizer cannot step unit by unit.",
            expected="an optimizer built from model.parameters() of a fully_shard model",
            got=f"{type(optimizer).__name__}, {reason}",
            remedy=remedy,
            topic="step-in-backward",
        )
    check_parameters(optimizer)  # steps in the backward run no hooks
    if threads is not None:
        check_threads(threads)
        if not treats_elements(optimizer):
            raise ConfigError(
                "step_in_backward: threads is for element-wise optimizers: the step of others may communicate.",
                got=f"{type(optimizer).__name__} with threads={threads!r}",
                remedy="omit threads, or use SGD, Adam, AdamW, ...",
                topic="step-in-backward",
            )
    return StepsInBackward(optimizer, max_norm, clip, threads)


def _why_not(optimizer: torch.optim.Optimizer, clip: Clip) -> tuple[str, str] | None:
    """Why an optimizer cannot step in the backward, and the remedy; None if it can."""
    parameters = parameters_of([optimizer])
    if any(STEPPED_KEY in parameter.__dict__ for parameter in parameters):
        return "whose parameters already step in backward", "call remove() on the object that step_in_backward returned"
    afterwards = "step it after the backward, or use an element-wise optimizer (SGD, Adam, AdamW, ...)"
    if any(PART_KEY in parameter.__dict__ for parameter in parameters):
        return "which has flat runs of elements", afterwards
    if clip == "redo" and ON_HOST_KEY in optimizer.__dict__:
        return "whose state is in host memory (optimizer_state_on_host)", 'use clip="two passes"'
    if not any(owner_of(parameter) for parameter in parameters):
        return "which has no sharded parameters", "build it from model.parameters() after fully_shard"
    reason = why_not_in_parts(optimizer)
    return None if reason is None else (reason, afterwards)


def why_not_in_parts(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer cannot step some of its parameters at a time; None if it can."""
    kind, groups = type(optimizer), optimizer.param_groups
    if isinstance(optimizer, OwnerOptimizer):
        return "which exchanges all parameters at once"
    if needs_closure(kind):
        return "whose step() computes gradients"
    if treats_parameters(kind, optimizer.defaults, groups) is False:
        return "whose step of a parameter depends on others, or fails if another has no gradient"
    if steps_in_parts(kind, optimizer.defaults, groups) is False:
        return "whose parts of a step differ from a whole one: it counts steps in place, or treats all parameters alike"
    return None
