"""The sharded model, stepped and compared with unsharded parameters: of a whole model, or of chosen modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...errors import ConfigError
from . import causes
from .apart import exact, rms
from .causes import Weights
from .compare import Allowed, compare, error_findings
from .held import Held
from .report import Finding, Report
from .session import Session
from .tolerance import gradient_tolerance, update_tolerance
from .training import Plan, Seen, take_step


@dataclass(frozen=True)
class Step:
    """One step of the sharded model, on this rank.

    Attributes:
        number: from 0.
        held: the model, before it.
        before: this rank's parts of the parameters then, by name.
        counts, weights: the number of tokens in each micro-batch, and how much its loss counts; by data rank.
        seen: what the step left.
        noted: what the context gave in which it ran.
    """

    number: int
    held: Held
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
        held = Held(self.model)
        names = [name for row in held.rows.values() for name in row.names]
        depth = max(len({name.rpartition(".")[0] for name in names if name.startswith(start)}) for start in prefixes)
        longest = max([session.data_world * plan.micro_batches, *(n for row in held.rows.values() for n in row.shape)])
        allowed = gradient_tolerance(held.dtypes(), depth, longest) if given is None else given
        stored = sorted({held.dtype(row) for row in held.rows.values() if held.dtype(row).is_floating_point}, key=str)
        by_dtype = ((f"{dtype} parameters".removeprefix("torch."), update_tolerance(dtype)) for dtype in stored)
        self.tolerances = session.told(((what, allowed), *by_dtype))
        self.allowed = self.tolerances[0][1]
        self.notes = tuple(
            f"{name} is not compared: tensors of its class are gathered in a way of their own"
            for name, row in held.rows.items()
            if not held.comparable(row)
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
        session, plan, held = self.session, self.plan, Held(self.model)
        weights = plan.weights(counts)
        before = {name: held.value(row).clone() for name, row in held.rows.items() if held.comparable(row)}
        session.seed_with("step", number, session.data_rank)

        def sharded() -> tuple[Seen, Any]:
            with around as noted:
                own = weights[session.data_rank]
                return take_step(session, plan, self.model, self.optimizer, batches, own, held), noted

        result, failed = session.attempt(sharded)
        if failed:
            return error_findings(failed, number, "the training step of the sharded model raised")
        assert result is not None
        return Step(number, held, before, counts, weights, *result)

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
        findings, compared = compare(session, step.held, Finding("gradient", what, step.number), wanted, got, allowed)
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
    ) -> tuple[list[Finding], Held]:
        """Step unsharded parameters with the sharded model's gradients, and compare what comes out. Collective.

        Args:
            step: of the sharded model.
            names: of the parameters, in one order on all ranks.
            unsharded: on the first rank, these parameters, with gradients of their own.
            optimizers: of theirs; none on other ranks.

        Returns:
            What was found, and the sharded model after the step.
        """
        session, seen, before, after = self.session, step.seen, step.before, Held(self.model)
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
