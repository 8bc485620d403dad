"""The sharded model: built, trained by the user's step or verify's own, observed from outside, and compared with
unsharded parameters, of the whole model or of chosen modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...checkpoint.table import Named
from ...errors import ConfigError, invalid_argument
from ...events import record_events
from ...optim import clip_grad_norm_
from ...optim.clip import STEPPED_KEY
from ...optimizers import as_list, parameters_of
from ...torch_private.step_hooks import closure_of, needs_closure, with_closure
from . import causes
from .causes import Observations, Weights
from .findings import Finding, VerifyReport
from .model_parts import ModelParts
from .rounding import difference, error_findings, exact, gradient_tolerance, index_of, merged, rms, update_tolerance
from .session import Session


@dataclass(frozen=True)
class TrialPlan:
    """The arguments of `verify`, except those that the session depends on. See there.

    Raises:
        ConfigError: names the invalid argument.
    """

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int, int, int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    shard_fn: Callable[[nn.Module], Any]
    optimizer_fn: Callable[[nn.Module], Any]
    train_step_fn: Callable[[nn.Module, Any, list[Any]], Any] | None
    steps: int
    micro_batches: int
    no_sync: bool
    reduction: str
    tokens_fn: Callable[[Any], float] | None
    max_norm: float | None
    modules: Sequence[str] | None
    initial: str
    check_draws: bool
    tolerance: float | None

    def __post_init__(self) -> None:
        for name in ("model_fn", "batch_fn", "loss_fn", "shard_fn", "optimizer_fn", "train_step_fn"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name != "train_step_fn"):
                raise invalid_argument(f"verify({name}=)", value, "a function")
        for name in ("steps", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise invalid_argument(f"verify({name}=)", value, "an int of at least 1")
        if self.reduction not in ("mean", "sum", "tokens"):
            raise invalid_argument("verify(reduction=)", self.reduction, '"mean", "sum" or "tokens"')
        if (self.reduction == "tokens") != (self.tokens_fn is not None):
            raise ConfigError(
                'verify: reduction="tokens" and tokens_fn require each other',
                got=f"reduction={self.reduction!r}, {'no tokens_fn' if self.tokens_fn is None else 'a tokens_fn'}",
            )
        if self.train_step_fn is not None and self.no_sync:
            raise ConfigError("verify: no_sync is for verify's own loop; a train_step_fn decides when to reduce")
        if self.modules is not None and self.max_norm is not None:
            raise ConfigError("verify: max_norm needs the gradients of the whole model, which modules= leaves out")
        if self.initial not in ("compare", "copy"):
            raise ConfigError(f'verify: initial must be "compare" or "copy", got {self.initial!r}')

    def weights(self, counts: Weights) -> Weights:
        """How much each micro-batch's loss counts in the reference; `counts`: of tokens, 1 without `tokens_fn`."""
        total = 1.0 if self.reduction == "sum" else sum(map(sum, counts))
        return [[n / total for n in row] for row in counts]


@dataclass(frozen=True)
class TrialStep:
    """One step of the sharded model, on this rank.

    Attributes:
        number: from 0.
        parts: the model before the step.
        before: this rank's parts of the parameters before the step, by name.
        counts, weights: the number of tokens in each micro-batch, and how much its loss counts.
        losses: of each micro-batch, or one mean of them; None if the step returned none.
        refusal: why the step cannot be compared; None if it can.
        gradients: this rank's parts as the first optimizer that stepped got them (or at the end), by name.
        earlier: this rank's parts that were there before the step, by name.
        left: names of those that no optimizer has, on any rank: `optimizer.zero_grad()` does not clear their gradients,
            `model.zero_grad()` does.
        observations: for the causes of differences.
        settings: with which each optimizer stepped; None: it did not step.
        recorded: by the context in which the step ran.
    """

    number: int
    parts: ModelParts
    before: dict[str, torch.Tensor]
    counts: Weights
    weights: Weights
    losses: list[float] | None
    refusal: str | None
    gradients: dict[str, torch.Tensor | None]
    earlier: dict[str, torch.Tensor]
    left: frozenset[str]
    observations: Observations
    settings: list[Settings | None]
    recorded: Any


def shard_model(session: Session, plan: TrialPlan) -> tuple[nn.Module, Any] | list[Finding]:
    """The sharded model and its optimizer as the user has them; or the errors that sharding raised. Collective."""
    session.seed_with("model")
    model = session.require("model_fn", plan.model_fn)
    result, errors = session.attempt(lambda: _sharded(session, plan, model))
    if errors:
        return error_findings(errors, None, "sharding raised")
    assert result is not None
    session.check(partial(_check_sharded, *result))
    return result


def _sharded(session: Session, plan: TrialPlan, model: nn.Module) -> tuple[Any, Any]:
    session.seed_with("shard")
    with _uninitialized_memory_is_nan():
        result = plan.shard_fn(model)
    sharded, optimizer = result if isinstance(result, tuple) else (result, None)
    if optimizer is None and isinstance(sharded, nn.Module):
        optimizer = plan.optimizer_fn(sharded)
    return sharded, optimizer


def _check_sharded(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard_fn must return a module, or a module and its optimizer; it returned {model!r}")
    _check_optimizers(model, optimizers_in(optimizer))


@contextmanager
def _uninitialized_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN: values that `to_empty()` left uninitialized are then never correct by chance."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill


def optimizers_in(result: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a user's function returned, one or a list.

    Raises:
        ConfigError: it returned something else.
    """
    optimizers = as_list(result)
    for optimizer in optimizers:
        if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"verify: optimizer_fn must return an optimizer or a list of them, got {optimizer!r}")
    return optimizers


def _check_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse a sharded model's optimizers whose steps cannot be compared.

    Raises:
        ConfigError: names the optimizer.
    """
    for optimizer in optimizers:
        if needs_closure(type(optimizer)):
            raise ConfigError(_several_calls(optimizer))
    if any(STEPPED_KEY in stepped.__dict__ for stepped in (*optimizers, *model.parameters())):
        raise ConfigError(
            "verify cannot compare fullshard.step_in_backward(), which frees gradients before they can be read; verify "
            "without it, with optimizer.step() after the backward"
        )


def _several_calls(optimizer: torch.optim.Optimizer) -> str:
    """The error text for an optimizer that calls its closure several times in a step."""
    return (
        f"verify cannot compare steps of {type(optimizer).__name__}, which calls its closure several times in a step; "
        "verify with an optimizer that uses the gradients of one call, such as SGD or AdamW"
    )


Settings = list[dict[str, Any]]
"""By group of an optimizer, the settings that a scheduler may change: numbers, and tuples of numbers."""


def _settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    groups = [{**group, "lr": float(group["lr"])} if "lr" in group else group for group in optimizer.param_groups]
    return [
        {
            name: value
            for name, value in group.items()
            if is_number(value) or (isinstance(value, tuple) and all(map(is_number, value)))
        }
        for group in groups
    ]


class _OptimizerSteps:
    """The optimizers' steps within one training step, on this rank.

    Args:
        parts: the model before the step.

    Attributes:
        optimizers: those that stepped, in order.
        gradients: this rank's parts as the first of them got them, by name: after its closure, if it called one.
        refusal: why these steps cannot be compared; None if they can.
        settings: of each optimizer at its first step, by its id.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: dict[str, torch.Tensor | None] = {}
        self.refusal: str | None = None
        self.settings: dict[int, Settings] = {}
        self._parts = parts

    def copy_gradients(self) -> None:
        """Copy the gradients as they are now."""
        for name, row in self._parts.comparable.items():
            grad = self._parts.gradient(row)
            self.gradients[name] = None if grad is None else grad.clone()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A hook before every optimizer's step; replaces a closure by one that copies gradients after it."""
        closure = closure_of(args, kwargs)
        if isinstance(closure, _Closure):  # torch runs hooks again if `step` calls `super().step`
            return None
        if is_first := not self.optimizers:
            self.copy_gradients()
        self.optimizers.append(optimizer)
        self.settings.setdefault(id(optimizer), _settings_of(optimizer))
        if not callable(closure):
            return None
        return with_closure(args, kwargs, _Closure(closure, partial(self._after_call, optimizer, is_first)))

    def _after_call(self, optimizer: torch.optim.Optimizer, is_first: bool, calls: int) -> None:
        """Copy the gradients that a closure left for the first step, if it is called once, as by most optimizers."""
        if calls > 1:
            self.refusal = _several_calls(optimizer)
        elif is_first:
            self.copy_gradients()
        elif optimizer is not self.optimizers[0]:  # the first one's step has changed parameters already
            self.refusal = (
                f"verify cannot compare the closure of a second optimizer ({type(optimizer).__name__}), which runs "
                "after the first one's step; verify a step whose backward comes before both"
            )


class _Closure:
    """A closure, and a function that gets the number of calls after each call."""

    def __init__(self, closure: Callable[[], Any], after: Callable[[int], None]) -> None:
        self._closure, self._after, self._calls = closure, after, 0

    def __call__(self) -> Any:
        result = self._closure()
        self._calls += 1
        self._after(self._calls)
        return result


def _names_in(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, set[str]]) -> frozenset[str]:
    """The parameters that optimizers have; `names`: see `ModelParts.names_by_tensor`."""
    return frozenset(name for tensor in parameters_of(optimizers) for name in names.get(id(tensor), ()))


def _refusal_of(returned: Any, micro_batches: int) -> str | None:
    """Why the result of a `train_step_fn` cannot be the losses of its micro-batches; None if it can."""
    losses = returned if isinstance(returned, list) else [returned]
    right_length = losses is not returned or len(losses) == micro_batches
    if returned is None or (right_length and all(map(_is_number, losses))):
        return None
    got = type(returned).__name__
    if isinstance(returned, torch.Tensor):
        got += f" of shape {list(returned.shape)}, {str(returned.dtype).removeprefix('torch.')}"
    elif isinstance(returned, list | tuple):
        got += f" of {len(returned)}: {', '.join(type(entry).__name__ for entry in returned[:4])}"
    return (
        "verify: train_step_fn may return the mean of its losses (a number, or a tensor of one element), a list with "
        f"the loss of each micro-batch ({micro_batches}), or None; got {got}"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


@contextmanager
def _gradient_sync(model: Any, enabled: bool) -> Iterator[None]:
    """Whether backward reduces gradients in the block."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(enabled)
        yield
    elif not enabled and hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


class Trial(ABC):
    """A sharded model beside something unsharded.

    Args:
        session: the ranks.
        plan: what to train.
        model, optimizer: the sharded model, and its optimizer as the user has it.
        prefixes: of the names that are compared; "" for the whole model.
        what: what the tolerance of gradients is for, in the report.

    Attributes:
        compared: number of tensors so far.
        allowed: the relative tolerance of losses, outputs and gradients.
        trained: names of parameters that require a gradient in the unsharded model.
        tolerances, notes: for the report.
    """

    def __init__(
        self, session: Session, plan: TrialPlan, model: nn.Module, optimizer: Any, prefixes: Sequence[str], what: str
    ) -> None:
        self.session, self.plan = session, plan
        self.model, self.optimizer = model, optimizer
        self.compared = 0
        self._settings = [_settings_of(each) for each in optimizers_in(optimizer)]  # settings of the last step
        self.trained: frozenset[str] = frozenset()
        parts = ModelParts(model)
        rows = parts.rows.values()
        names = [name for row in rows for name in row.names]
        depth = max(len({name.rpartition(".")[0] for name in names if name.startswith(start)}) for start in prefixes)
        longest = max([session.data_world * plan.micro_batches, *(n for row in rows for n in row.shape)])
        allowed = plan.tolerance
        if allowed is None:
            allowed = gradient_tolerance(parts.dtypes(), parts.packed_dtypes(), depth, longest)
        stored = sorted({dtype for row in rows if (dtype := parts.dtype(row)).is_floating_point}, key=str)
        by_dtype = ((f"{dtype} parameters".removeprefix("torch."), update_tolerance(dtype)) for dtype in stored)
        self.tolerances = session.broadcast(((what, allowed), *by_dtype))
        self.allowed = self.tolerances[0][1]
        self.notes = tuple(
            f"{name} is not compared: tensors of its class are gathered in their own way"
            for name in parts.rows
            if name not in parts.comparable
        )

    @abstractmethod
    def begin(self) -> list[Finding]:
        """Compare what exists before the first step. Collective."""

    @abstractmethod
    def step(self, number: int) -> list[Finding]:
        """Train one step of both, and compare. Collective."""

    def run(self) -> VerifyReport:
        """Compare before the first step and in each step, up to the first difference. Collective."""
        findings, done = self.begin(), 0
        while not findings and done < self.plan.steps:
            findings = self.step(done)
            done += not findings
        compared = self.session.broadcast(self.compared)
        return VerifyReport(tuple(findings), self.session.world, done, compared, self.tolerances, self.notes)

    # The sharded model.

    def load_batches(self, number: int) -> tuple[list[Any], Weights]:
        """This rank's micro-batches of a step, and the number of tokens in those of all data ranks. Collective."""
        session, plan = self.session, self.plan

        def load(index: int) -> Any:
            session.seed_with("batch", index, session.data_rank)
            return plan.batch_fn(index, session.data_rank, session.data_world)

        indices = range(number * plan.micro_batches, (number + 1) * plan.micro_batches)
        batches = session.require("batch_fn", lambda: [load(index) for index in indices])
        count = plan.tokens_fn or (lambda batch: 1.0)
        counts = session.gather(session.require("tokens_fn", lambda: [float(count(batch)) for batch in batches]))
        if any(n < 0 for row in counts for n in row) or not sum(map(sum, counts)):
            raise ConfigError("tokens_fn returned negative numbers, or zero for every batch", got=str(counts))
        return batches, [counts[source] for source in session.sources]

    def train(
        self, number: int, batches: list[Any], counts: Weights, recording: AbstractContextManager[Any]
    ) -> TrialStep | list[Finding]:
        """Train the sharded model for one step, in `recording`; return findings if it raised errors. Collective.

        Raises:
            ConfigError: the step ran, but cannot be compared.
        """
        step, errors = self.session.attempt(lambda: self._train(number, batches, counts, recording))
        if errors:
            return error_findings(errors, number, "the training step of the sharded model raised")
        assert step is not None
        for refusal in filter(None, self.session.gather(step.refusal)):
            raise ConfigError(refusal)
        left = frozenset[str]().union(*self.session.gather(step.left))
        if left and number == 1:
            text = ", ".join(sorted(left)[:3]) + (", ..." if len(left) > 3 else "")
            self.notes += (f"no optimizer has {text}: their gradients are compared in the first step only",)
        return replace(step, left=left)

    def _train(
        self, number: int, batches: list[Any], counts: Weights, recording: AbstractContextManager[Any]
    ) -> TrialStep:
        """Nothing here waits for other ranks: a rank whose step raises must not leave them waiting."""
        session, plan, parts = self.session, self.plan, ModelParts(self.model)
        weights = plan.weights(counts)
        before = {name: parts.value(row).clone() for name, row in parts.comparable.items()}
        names = parts.names_by_tensor()
        present = {name: parts.gradient(row) for name, row in parts.comparable.items()}
        earlier = {name: grad.clone() for name, grad in present.items() if grad is not None}
        left = frozenset(earlier) - _names_in(optimizers_in(self.optimizer), names)
        steps = _OptimizerSteps(parts)
        session.seed_with("step", number, session.data_rank)
        with recording as recorded, record_events() as events, register_optimizer_step_pre_hook(steps.before_step):
            if plan.train_step_fn is not None:
                returned = plan.train_step_fn(self.model, self.optimizer, batches)
            else:
                returned = self._default_step(batches, weights[session.data_rank])
            refusal, losses = steps.refusal or _refusal_of(returned, plan.micro_batches), None
            if returned is not None and refusal is None:
                values = returned if isinstance(returned, list) else [returned]
                losses = [float(loss.detach() if isinstance(loss, torch.Tensor) else loss) for loss in values]
            if not steps.optimizers:
                steps.copy_gradients()
        stepped = steps.optimizers
        names = parts.names_by_tensor()
        tensors = set(map(id, parameters_of(stepped)))
        observations = Observations(
            stepped=bool(stepped),
            optimized=_names_in(stepped, names),
            foreign=len(tensors - names.keys()),
            reductions=sum(event.verb == "reduce" for event in events) if parts.table.sharded else None,
        )
        return TrialStep(
            number=number,
            parts=parts,
            before=before,
            counts=counts,
            weights=weights,
            losses=losses,
            refusal=refusal,
            gradients=steps.gradients,
            earlier=earlier,
            left=left,
            observations=observations,
            settings=[steps.settings.get(id(optimizer)) for optimizer in optimizers_in(self.optimizer)],
            recorded=recorded,
        )

    def _default_step(self, batches: list[Any], weights: list[float]) -> list[float]:
        """The usual loop, for an engine that averages gradients over ranks. Returns the losses."""
        plan, model, losses = self.plan, self.model, []
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            with _gradient_sync(model, not plan.no_sync or number == len(batches) - 1):
                loss = plan.loss_fn(model, batch)
                (loss * (weight * self.session.data_world)).backward()
            losses.append(float(loss.detach()))
        if plan.max_norm is not None:
            method: Any = getattr(model, "clip_grad_norm_", None)
            if method is not None:
                method(plan.max_norm)
            else:
                clip_grad_norm_(model.parameters(), plan.max_norm)
        for optimizer in optimizers_in(self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()  # also parameters that no optimizer has
        return losses

    # Comparisons.

    def compare(
        self,
        parts: ModelParts,
        template: Finding,
        unsharded: Mapping[str, torch.Tensor | None] | None,
        local_part: Callable[[Named], torch.Tensor | None],
        allowed: Callable[[Named, torch.Tensor], float],
        cause: Callable[[Named, torch.Tensor, torch.Tensor], str | None] = lambda row, got, expected: None,
    ) -> list[Finding]:
        """Compare one set of tensors, such as all gradients of a step; every rank compares its parts.

        Besides what ranks have, one whole tensor at a time is in memory. Collective.

        Args:
            parts: this rank's model; alike on all ranks.
            template: completed for each parameter that differs.
            unsharded: whole tensors by name, on the first rank; None for a parameter that should have none.
            local_part: this rank's part of the same.
            allowed: from a parameter and this rank's part of what is expected, [numel] in double precision, to the
                root mean square difference allowed.
            cause: from a parameter that differs, and this rank's parts of what it is and what is expected, likewise.
        """
        session, findings = self.session, list[Finding]()
        facts = {} if unsharded is None else {n: t if t is None else (t.shape, t.dtype) for n, t in unsharded.items()}
        for name, fact in session.broadcast(facts).items():
            row = parts.comparable.get(name)
            if row is None:
                continue
            finding = replace(template, parameter=name, ranks=(session.rank,))
            got = local_part(row)
            self.compared += 1
            if fact is None:
                # A `FlatParameter` has one gradient for all parameters in it: zeros stand for None.
                shared = row.bucket is not None and row.bucket.flat_parameter is not None
                if got is not None and not (shared and not bool(got.any())):
                    size = f"root mean square {rms([got]):.2e}"
                    findings.append(replace(finding, expected="None", got=f"a tensor, {size}"))
                continue
            expected = parts.cut(row, session.broadcast_tensor(unsharded[name] if unsharded else None, *fact))
            if not expected.numel():
                continue  # this rank has no element of it, and may have None for that
            if got is None:
                findings.append(replace(finding, expected="a value", got="None"))
                continue
            expected = expected.to(got.device)
            differing = difference(finding, got, expected, allowed(row, exact(expected)))
            if differing is not None:
                number = int(parts.numbers(row)[differing.element])
                text = cause(row, exact(got), exact(expected))
                findings.append(replace(differing, element=index_of(number, row.shape), cause=text))
        return merged(session, findings, parts.rows)

    def compare_gradients(
        self, step: TrialStep, unsharded: Mapping[str, torch.Tensor] | None, cause: Callable[[list[Finding]], str]
    ) -> list[Finding]:
        """Compare the gradients that the optimizer gets. Collective.

        Args:
            step: of the sharded model.
            unsharded: on the first rank, parameters with their gradients, by name.
            cause: for gradients with wrong values, from all findings. Collective.
        """
        session = self.session
        expected = None if unsharded is None else {n: p.grad for n, p in unsharded.items() if n not in step.left}
        scale = session.broadcast(rms(g for g in expected.values() if g is not None) if expected is not None else 0.0)
        findings = self.compare(
            step.parts,
            Finding("gradient", "the gradient that the optimizer gets differs.", step.number),
            expected,
            lambda row: step.gradients.get(row.name),
            lambda row, expected: self.allowed * (rms([expected]) + scale),
        )
        if not findings:
            return []
        everywhere = sum(finding.got == "None" for finding in findings) == len(self.trained)
        missing_cause = causes.missing_gradient_cause(session.gather(step.observations), everywhere)
        value_cause = cause(findings)

        own = {name for name, row in step.parts.comparable.items() if not row.parameter.requires_grad}
        frozen = set[str]().union(*session.gather(own)) & self.trained

        def cause_of(finding: Finding) -> str:
            if finding.got == "None":
                return causes.FROZEN if finding.parameter in frozen else missing_cause
            if finding.expected != "None":
                return value_cause
            return causes.UNUSED if finding.parameter in self.trained else causes.UNFROZEN

        return [replace(finding, cause=cause_of(finding)) for finding in findings]

    def compare_updates(
        self,
        step: TrialStep,
        names: Iterable[str],
        unsharded: Mapping[str, torch.Tensor] | None,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> list[Finding]:
        """Step unsharded parameters with the sharded model's gradients, and compare the results. Collective.

        Args:
            step: of the sharded model.
            names: of the parameters, in the same order on all ranks.
            unsharded: on the first rank, these parameters, with gradients of their own.
            optimizers: of the unsharded parameters; none on other ranks.
        """
        session, before, after = self.session, step.before, ModelParts(self.model)
        local = {name for name, grad in step.gradients.items() if grad is not None}
        with_gradient = set().union(*session.gather(local))
        for name in names:
            if name in with_gradient:
                grad = step.gradients[name]
                whole = after.whole(after.rows[name], torch.zeros_like(before[name]) if grad is None else grad)
                if unsharded is not None and (parameter := unsharded[name]).grad is not None:
                    parameter.grad = whole.to(parameter.device, parameter.dtype).clone()
        self._follow_settings(step, optimizers)
        for optimizer in optimizers:
            optimizer.step()

        def allowed(row: Named, expected: torch.Tensor) -> float:
            update = rms([expected - exact(before[row.name])])
            return update_tolerance(after.dtype(row)) * (rms([expected]) + 16 * update)

        def cause(row: Named, got: torch.Tensor, expected: torch.Tensor) -> str:
            trained = row.name in self.trained
            return causes.parameter_cause(exact(before[row.name]), got, expected, trained, row.name, step.observations)

        template = Finding("parameter", "a parameter after the optimizer's step differs.", step.number)
        return self.compare(after, template, unsharded, after.value, allowed, cause)

    def _follow_settings(self, step: TrialStep, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Change settings of the unsharded optimizers as a scheduler changed those of the sharded model's.

        A setting that differed before keeps differing: learning rates change by the same factor, others not at all.
        """
        before = self._settings
        self._settings = [now or last for now, last in zip(step.settings, before, strict=True)]
        for optimizer, last, now in zip(optimizers, before, self._settings, strict=False):
            if not len(last) == len(now) == len(optimizer.param_groups):
                continue
            for group, old, new in zip(optimizer.param_groups, last, now, strict=True):
                for name in old.keys() & new.keys() & group.keys():
                    if name == "lr" and old["lr"] and new["lr"] != old["lr"]:
                        group["lr"] = group["lr"] * (new["lr"] / old["lr"])
                    elif new[name] != old[name] and (name == "lr" or group[name] == old[name]):
                        group[name] = new[name]
