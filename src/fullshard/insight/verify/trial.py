"""The sharded model: made, stepped by the user's step or verify's own, watched from outside, and compared with
unsharded parameters, of a whole model or of chosen modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...checkpoint.names import Named
from ...errors import ConfigError
from ...events import record_events
from ...optim import clip_grad_norm_
from . import causes
from .causes import Evidence, Weights
from .compare import (
    Allowed,
    compare,
    error_findings,
    exact,
    gradient_tolerance,
    rms,
    update_tolerance,
)
from .model_parts import ModelParts
from .report import Finding, Report
from .session import Session


@dataclass(frozen=True)
class Plan:
    """`verify`'s arguments that say what is trained and how. See there."""

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

    def check(self) -> None:
        """Raise for what cannot work, before anything is made.

        Raises:
            ConfigError: names the argument.
        """
        for name in ("model_fn", "batch_fn", "loss_fn", "shard_fn", "optimizer_fn"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"verify: {name} must be callable, got {getattr(self, name)!r}")
        if self.train_step_fn is not None and not callable(self.train_step_fn):
            raise ConfigError(f"verify: train_step_fn must be callable, got {self.train_step_fn!r}")
        for name in ("steps", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"verify: {name} must be an int of at least 1, got {value!r}")
        if self.reduction not in ("mean", "sum", "tokens"):
            raise ConfigError(f'verify: reduction must be "mean", "sum" or "tokens", got {self.reduction!r}')
        if (self.reduction == "tokens") != (self.tokens_fn is not None):
            raise ConfigError(
                'verify: reduction="tokens" and tokens_fn go together; one was given without the other',
                got=f"reduction={self.reduction!r}, {'no tokens_fn' if self.tokens_fn is None else 'a tokens_fn'}",
            )
        if self.train_step_fn is not None and self.no_sync:
            raise ConfigError(
                "verify: no_sync is for verify's own loop; the train_step_fn decides itself when to reduce"
            )

    def weights(self, counts: Weights) -> Weights:
        """How much each micro-batch's loss counts in the reference, by data rank."""
        total = {"mean": float(len(counts) * self.micro_batches), "sum": 1.0}.get(self.reduction)
        if total is not None:
            return [[1.0 / total] * self.micro_batches for _ in counts]
        every = sum(map(sum, counts))
        return [[n / every for n in row] for row in counts]


@dataclass
class Seen:
    """What a step left, on this rank.

    Attributes:
        losses: of each micro-batch, or one mean of them; None if the step told none.
        gradients: this rank's parts when an optimizer first stepped (or at the end), by name.
        evidence: see there.
    """

    losses: list[float] | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=lambda: Evidence(0, frozenset(), 0, None))


def take_step(
    session: Session,
    plan: Plan,
    model: nn.Module,
    optimizer: Any,
    batches: list[Any],
    weights: list[float],
    parts: ModelParts,
) -> Seen:
    """One training step of the sharded model. What it raises is the user's to know."""
    seen = Seen()
    with record_events() as events, _watched(parts, seen) as stepped:
        if plan.train_step_fn is not None:
            seen.losses = _told(plan.train_step_fn(model, optimizer, batches))
        else:
            seen.losses = _own_step(session, plan, model, optimizer, batches, weights)
        if not stepped:
            seen.gradients = _gradients(parts)
    known = parts.tensors()
    tensors = {id(p) for one in stepped for group in one.param_groups for p in group["params"]}
    names = frozenset(name for tensor in tensors for name in known.get(tensor, ()))
    reduced = sum(event.verb == "reduce" for event in events) if parts.table.sharded else None
    seen.evidence = Evidence(len(stepped), names, len(tensors - known.keys()), reduced)
    return seen


def _told(value: Any) -> list[float] | None:
    if value is None:
        return None
    return [float(one) for one in value] if isinstance(value, (list, tuple)) else [float(value)]


def _gradients(parts: ModelParts) -> dict[str, torch.Tensor | None]:
    found = {name: parts.gradient(row) for name, row in parts.rows.items() if parts.comparable(row)}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


@contextmanager
def _watched(parts: ModelParts, seen: Seen) -> Iterator[list[torch.optim.Optimizer]]:
    """Copies gradients when the first optimizer steps; yields the optimizers that stepped, each time they did.

    Nothing here talks to other ranks: one that does not step must not leave the others waiting.
    """
    stepped: list[torch.optim.Optimizer] = []

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not stepped:
            seen.gradients = _gradients(parts)
        stepped.append(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield stepped
    finally:
        handle.remove()


def _own_step(
    session: Session, plan: Plan, model: Any, optimizer: Any, batches: list[Any], weights: list[float]
) -> list[float]:
    """The usual loop, for an engine that averages gradients over ranks."""
    losses = []
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with _synchronised(model, not plan.no_sync or number == len(batches) - 1):
            loss = plan.loss_fn(model, batch)
            (loss * (weight * session.data_world)).backward()
        losses.append(float(loss.detach()))
    if plan.max_norm is not None:
        own = getattr(model, "clip_grad_norm_", None)
        if own is not None:
            own(plan.max_norm)
        else:
            clip_grad_norm_(model.parameters(), plan.max_norm)
    for one in listed(optimizer):
        one.step()
        one.zero_grad()
    return losses


@contextmanager
def _synchronised(model: Any, wanted: bool) -> Iterator[None]:
    """Whether gradients of the backwards in here are reduced."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
        yield
    elif not wanted and hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


def listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, as a list.

    Raises:
        ConfigError: it is something else.
    """
    found: Iterable[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for one in found:
        if not hasattr(one, "step") or not hasattr(one, "param_groups"):
            raise ConfigError(f"verify: optimizer_fn must return an optimizer or a list of them, got {one!r}")
    return list(found)


def sharded(session: Session, plan: Plan) -> tuple[nn.Module, Any] | list[Finding]:
    """The sharded model and its optimizer as the user has them; or the errors that sharding raised. Collective.

    Uninitialised memory is filled with NaN meanwhile, so that what `to_empty()` leaves behind never is right by chance.
    """
    session.seed_with("model")
    model = session.required("model_fn", plan.model_fn)

    def make() -> tuple[nn.Module, Any]:
        session.seed_with("shard")
        with _poisoned():
            made = plan.shard_fn(model)
        found, optimizer = made if isinstance(made, tuple) else (made, None)
        if optimizer is None and isinstance(found, nn.Module):
            optimizer = plan.optimizer_fn(found)
        return found, optimizer

    def check() -> tuple[nn.Module, Any]:
        found, optimizer = made or (None, None)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"shard_fn must return a module, or a module and its optimizer; it gave {found!r}")
        listed(optimizer)
        return found, optimizer

    made, failed = session.attempt(make)
    if failed:
        return error_findings(failed, None, "sharding raised")
    return session.required("shard_fn or optimizer_fn", check)


@contextmanager
def _poisoned() -> Iterator[None]:
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


@dataclass(frozen=True)
class Step:
    """One step of the sharded model, on this rank.

    Attributes:
        number: from 0.
        parts: the model, before it.
        before: this rank's parts of the parameters then, by name.
        counts, weights: the number of tokens in each micro-batch, and how much its loss counts; by data rank.
        seen: what the step left.
        noted: what the context gave in which it ran.
    """

    number: int
    parts: ModelParts
    before: dict[str, torch.Tensor]
    counts: Weights
    weights: Weights
    seen: Seen
    noted: Any


class Trial(ABC):
    """A sharded model beside something unsharded.

    Args:
        session, plan: as everywhere.
        made: the model and its optimizer.
        given: the user's tolerance.
        prefixes: of the names that are compared; "" of the whole model.
        what: of the report: what the tolerance is for.

    Attributes:
        compared: tensors so far.
        allowed: the relative tolerance of losses, outputs and gradients.
        trained: names of parameters that require a gradient in the unsharded model.
        tolerances, notes: of the report.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        made: tuple[nn.Module, Any],
        given: float | None,
        prefixes: Sequence[str],
        what: str,
    ) -> None:
        self.session, self.plan = session, plan
        self.model, self.optimizer = made
        self.compared = 0
        self.trained: frozenset[str] = frozenset()
        parts = ModelParts(self.model)
        names = [name for row in parts.rows.values() for name in row.names]
        depth = max(len({name.rpartition(".")[0] for name in names if name.startswith(start)}) for start in prefixes)
        longest = max([session.data_world * plan.micro_batches, *(n for row in parts.rows.values() for n in row.shape)])
        allowed = gradient_tolerance(parts.dtypes(), depth, longest) if given is None else given
        stored = sorted(
            {parts.dtype(row) for row in parts.rows.values() if parts.dtype(row).is_floating_point},
            key=str,
        )
        by_dtype = ((f"{dtype} parameters".removeprefix("torch."), update_tolerance(dtype)) for dtype in stored)
        self.tolerances = session.told(((what, allowed), *by_dtype))
        self.allowed = self.tolerances[0][1]
        self.notes = tuple(
            f"{name} is not compared: tensors of its class are gathered in a way of their own"
            for name, row in parts.rows.items()
            if not parts.comparable(row)
        )

    @abstractmethod
    def step(self, number: int) -> list[Finding]:
        """One step of both. Collective."""

    def report(self, findings: list[Finding]) -> Report:
        """Of all steps up to the first that differs, if nothing was found before. Collective."""
        done = 0
        while not findings and done < self.plan.steps:
            findings = self.step(done)
            done += not findings
        compared = self.session.told(self.compared)
        return Report(tuple(findings), self.session.world, done, compared, self.tolerances, self.notes)

    def batches(self, number: int) -> tuple[list[Any], Weights]:
        """This rank's micro-batches of a step, and the number of tokens in those of all data ranks. Collective."""
        session, plan = self.session, self.plan

        def make() -> list[Any]:
            found = []
            for index in range(number * plan.micro_batches, (number + 1) * plan.micro_batches):
                session.seed_with("batch", index, session.data_rank)
                found.append(plan.batch_fn(index, session.data_rank, session.data_world))
            return found

        mine = session.required("batch_fn", make)
        count = plan.tokens_fn or (lambda batch: 1.0)
        counts = session.all(session.required("tokens_fn", lambda: [float(count(batch)) for batch in mine]))
        if any(n < 0 for row in counts for n in row) or not sum(map(sum, counts)):
            raise ConfigError("tokens_fn gave negative numbers, or zero for every batch", got=str(counts))
        return mine, [counts[source] for source in session.sources]

    def take(
        self, number: int, batches: list[Any], counts: Weights, around: AbstractContextManager[Any]
    ) -> Step | list[Finding]:
        """A step of the sharded model, in a context; or the errors that it raised. Collective."""
        session, plan, parts = self.session, self.plan, ModelParts(self.model)
        weights = plan.weights(counts)
        before = {name: parts.value(row).clone() for name, row in parts.rows.items() if parts.comparable(row)}
        session.seed_with("step", number, session.data_rank)

        def sharded() -> tuple[Seen, Any]:
            with around as noted:
                own = weights[session.data_rank]
                return take_step(session, plan, self.model, self.optimizer, batches, own, parts), noted

        result, failed = session.attempt(sharded)
        if failed:
            return error_findings(failed, number, "the training step of the sharded model raised")
        assert result is not None
        return Step(number, parts, before, counts, weights, *result)

    def gradients(
        self, step: Step, wanted: Mapping[str, torch.Tensor | None] | None, wrong: Callable[[list[Finding]], str]
    ) -> list[Finding]:
        """Gradients as the optimizer was given them. Collective.

        Args:
            step: of the sharded model.
            wanted: on the first rank, by name.
            wrong: the cause of those with other values. Collective.
        """
        session, what = self.session, "the gradient that the optimizer is given differs"
        scale = session.told(rms(g for g in wanted.values() if g is not None) if wanted is not None else 0.0)
        allowed: Allowed = lambda row, want: self.allowed * (rms([want]) + scale)  # noqa: E731
        got: Callable[[Named], torch.Tensor | None] = lambda row: step.seen.gradients.get(row.name)  # noqa: E731
        findings, compared = compare(session, step.parts, Finding("gradient", what, step.number), wanted, got, allowed)
        self.compared += compared
        if not findings:
            return []
        everywhere = sum(one.got == "None" for one in findings) == len(self.trained)
        missing = causes.missing_gradient_cause(session.all(step.seen.evidence), everywhere)
        other = wrong(findings)

        def cause(one: Finding) -> str:
            if one.got == "None":
                return missing
            if one.expected != "None":
                return other
            return causes.UNUSED if one.parameter in self.trained else causes.UNFROZEN

        return [replace(one, cause=cause(one)) for one in findings]

    def updates(
        self,
        step: Step,
        names: Iterable[str],
        unsharded: Mapping[str, torch.Tensor] | None,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> tuple[list[Finding], ModelParts]:
        """Step unsharded parameters with the sharded model's gradients, and compare what comes out. Collective.

        Args:
            step: of the sharded model.
            names: of the parameters, in one order on all ranks.
            unsharded: on the first rank, these parameters, with gradients of their own.
            optimizers: of theirs; none on other ranks.

        Returns:
            What was found, and the sharded model after the step.
        """
        session, seen, before, after = self.session, step.seen, step.before, ModelParts(self.model)
        have = set().union(*session.all({name for name, grad in seen.gradients.items() if grad is not None}))
        for name in names:
            if name in have:
                grad = seen.gradients[name]
                whole = after.whole(after.rows[name], torch.zeros_like(before[name]) if grad is None else grad)
                if unsharded is not None and (parameter := unsharded[name]).grad is not None:
                    parameter.grad = whole.to(parameter.device, parameter.dtype).clone()
        for optimizer in optimizers:
            optimizer.step()

        def allowed(row: Named, want: torch.Tensor) -> float:
            moved = rms([want - exact(before[row.name])])
            return update_tolerance(after.dtype(row)) * (rms([want]) + 16 * moved)

        def cause(row: Named, mine: torch.Tensor, want: torch.Tensor) -> str:
            trained = row.name in self.trained
            return causes.parameter_cause(exact(before[row.name]), mine, want, trained, row.name, seen.evidence)

        template = Finding("parameter", "a parameter after the optimizer's step differs", step.number)
        found, compared = compare(session, after, template, unsharded, after.value, allowed, cause)
        self.compared += compared
        return found, after
