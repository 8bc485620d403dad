"""The whole model against an unsharded one on the first rank: phase after phase, until one finds a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from . import causes, start
from .apart import rms
from .causes import Weights
from .compare import Comparison, merged
from .draws import Draw, compare_draws, draws_of
from .held import Held
from .reference import Batches, Reference
from .report import Finding, Report
from .session import Session
from .tolerance import gradient_tolerance, update_tolerance
from .training import Plan, Seen, listed, take_step


def run_whole(session: Session, plan: Plan, copy: bool, check_draws: bool, tolerance: float | None) -> Report:
    """See `verify`. Collective."""
    session.seed_with("model")
    model = session.required("model_fn", plan.model_fn)
    made, errors = start.sharded(session, plan, model)
    if made is None:
        return Report(tuple(errors), session.world, 0, 0)
    del model
    reference = session.required("the unsharded model", lambda: _reference(session, plan, made[0]))
    run = _Run(session, plan, made, reference, tolerance)
    findings = run.begin(copy)
    done = 0
    while not findings and done < plan.steps:
        findings = run.step(done, check_draws and done == 0 and session.world > 1)
        done += not findings
    return Report(tuple(findings), session.world, done, run.compared, run.tolerances, run.notes)


def _reference(session: Session, plan: Plan, other: nn.Module) -> Reference | None:
    if not session.first:
        return None
    session.seed_with("model")
    model = plan.model_fn()
    if not isinstance(model, nn.Module) or model is other:
        raise ConfigError("model_fn must make a new module at each call")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError("model_fn gave parameters on the meta device; let it give values, and use meta in shard_fn")
    model.to(session.device)
    return Reference(session, model, listed(plan.optimizer_fn(model)), plan.loss_fn, plan.max_norm)


class _Run:
    """A sharded model and its reference.

    Attributes:
        compared: tensors so far.
        tolerances, notes: of the report.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        made: tuple[nn.Module, Any],
        reference: Reference | None,
        given: float | None,
    ) -> None:
        self.session, self.plan, self.reference = session, plan, reference
        self.model, self.optimizer = made
        self.compared = 0
        held = Held(self.model)
        self.notes = tuple(
            f"{name} is not compared: tensors of its class are gathered in a way of their own"
            for name, row in held.rows.items()
            if not held.comparable(row)
        )
        self.allowed = session.told(given if reference is None or given is not None else self._formula(held))
        assert self.allowed is not None
        self.tolerances = (
            ("losses and gradients", self.allowed),
            *((f"{dtype} parameters".removeprefix("torch."), update_tolerance(dtype)) for dtype in self._stored(held)),
        )

    def _formula(self, held: Held) -> float:
        assert self.reference is not None
        model = self.reference.model
        depth = sum(1 for module in model.modules() if module._parameters)
        longest = max((size for p in model.parameters() for size in p.shape), default=1)
        terms = max(longest, self.session.data_world * self.plan.micro_batches)
        return gradient_tolerance(held.dtypes(), depth, terms)

    @staticmethod
    def _stored(held: Held) -> list[torch.dtype]:
        return sorted({held.dtype(row) for row in held.rows.values() if held.dtype(row).is_floating_point}, key=str)

    # Before the first step.

    def begin(self, copy: bool) -> list[Finding]:
        """Structure, ties, dtypes, values and buffers. Collective."""
        held = Held(self.model)
        wanted = self.session.told(start.Structure.of(self.reference.held) if self.reference is not None else None)
        assert wanted is not None
        findings = start.with_causes(
            merged(self.session, start.compare(self.session, wanted, held), held.rows), self.session
        )
        if findings:
            return findings
        if copy:
            start.copy(self.session, self.reference, held)
        found = self._compare(held, "value", "a parameter starts from another value", None, self._values(), held.value)
        found = [
            replace(one, cause=causes.start_cause("value", held.value(held.rows[one.parameter or ""]))) for one in found
        ]
        return merged(self.session, found, held.rows) or self._buffers(held, None)

    def _values(self) -> dict[str, torch.Tensor] | None:
        return None if self.reference is None else self.reference.values()

    def _compare(
        self, held: Held, kind: str, what: str, step: int | None, wanted: Mapping[str, Any] | None, got: Any
    ) -> list[Finding]:
        """This rank's differences from values that must be equal but for the last bits."""
        comparison = Comparison(self.session, held, kind, what, step)

        def allowed(row: Named) -> Any:
            return lambda want: update_tolerance(held.dtype(row)) * rms([want])

        found = comparison.run(wanted, got, allowed)
        self.compared += comparison.compared
        return found

    def _buffers(self, held: Held, step: int | None) -> list[Finding]:
        found, compared = start.compare_buffers(self.session, self.reference, held, step, self.allowed or 0.0)
        self.compared += compared
        return merged(self.session, found, held.buffers)

    # A step.

    def step(self, step: int, check_draws: bool) -> list[Finding]:
        """One step of both. Collective."""
        session, plan = self.session, self.plan
        mine, batches, counts = self._batches(step)
        weights = plan.weights(counts)
        held = Held(self.model)
        before = {name: held.value(row).clone() for name, row in held.rows.items() if held.comparable(row)}
        session.seed_with("step", step, session.data_rank)

        def sharded() -> tuple[Seen, list[Draw]]:
            with ExitStack() as stack:
                draws = stack.enter_context(draws_of(self.model)) if check_draws else []
                own = weights[session.data_rank]
                return take_step(session, plan, self.model, self.optimizer, mine, own, held), draws

        result, failed = session.attempt(sharded)
        if failed:
            return start.error_findings(failed, step, "the training step of the sharded model raised")
        assert result is not None
        seen, draws = result
        wanted = session.required(
            "the unsharded model",
            lambda: None if self.reference is None else self.reference.run(step, batches, weights),
        )
        losses = session.told(wanted)
        assert losses is not None
        findings = compare_draws(session, step, draws) if check_draws else []
        findings = findings or self._losses(step, seen, losses, bool(draws))
        findings = findings or self._gradients(step, held, seen, batches, weights, counts)
        findings = findings or self._not_stepped(step, seen)
        findings = findings or self._suspects(step, batches)
        return findings or self._parameters(step, held, seen, before)

    def _batches(self, step: int) -> tuple[list[Any], Batches, Weights]:
        """This rank's micro-batches; on the first rank those of all; and the number of tokens in each."""
        session, plan = self.session, self.plan

        def make() -> list[Any]:
            found = []
            for index in range(step * plan.micro_batches, (step + 1) * plan.micro_batches):
                session.seed_with("batch", index, session.data_rank)
                found.append(plan.batch_fn(index, session.data_rank, session.data_world))
            return found

        mine = session.required("batch_fn", make)
        count = plan.tokens_fn or (lambda batch: 1.0)
        counts = session.all(session.required("tokens_fn", lambda: [float(count(batch)) for batch in mine]))
        if any(n < 0 for row in counts for n in row) or not sum(map(sum, counts)):
            raise ConfigError("tokens_fn gave negative numbers, or zero for every batch", got=str(counts))
        away = any(tensor.device.type != "cpu" for tensor in tensors_in(mine))
        gathered = session.to_first(map_tensors(lambda tensor: tensor.detach().cpu(), mine))
        batches: Batches = []
        if gathered is not None:
            chosen = [gathered[source] for source in session.sources]
            batches = [map_tensors(lambda tensor: tensor.to(session.device), own) if away else own for own in chosen]
        return mine, batches, [counts[source] for source in session.sources]

    def _losses(self, step: int, seen: Seen, wanted: list[list[float]], drew: bool) -> list[Finding]:
        session, found = self.session, []
        for rank, got in enumerate(session.all(seen.losses)):
            want = wanted[session.data_ranks[rank]]
            if got is None:
                continue
            if len(got) != len(want):
                got, want = [sum(got) / max(len(got), 1)], [sum(want) / len(want)]
            for number, (a, b) in enumerate(zip(got, want, strict=True)):
                self.compared += 1
                if a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= (self.allowed or 0.0) * (abs(b) + 1e-3):
                    continue
                which = f" of micro-batch {number}" if len(got) > 1 else ""
                cause = causes.loss_cause(a, b, session.data_world, self.plan.micro_batches, drew)
                at = (None, None, rank, (rank,), f"{b:.7g}", f"{a:.7g}", cause)
                found.append(Finding("loss", f"the loss{which} differs.", step, *at))
        return merged(session, found if session.first else [])

    def _gradients(
        self, step: int, held: Held, seen: Seen, batches: Batches, weights: Weights, counts: Weights
    ) -> list[Finding]:
        session, reference = self.session, self.reference
        scale = session.told(reference.scale() if reference is not None else 0.0)
        comparison = Comparison(session, held, "gradient", "the gradient that the optimizer is given differs", step)
        wanted = None if reference is None else reference.gradients()

        def allowed(row: Named) -> Any:
            return lambda want: (self.allowed or 0.0) * (rms([want]) + scale)

        comparison.run(wanted, lambda row: seen.gradients.get(row.name), allowed)
        self.compared += comparison.compared
        findings = merged(session, comparison.findings, held.rows)
        if not findings:
            return []
        evidence = session.all(seen.evidence)
        frozen = session.told([] if reference is None else [n for n, f in reference.held.facts().items() if not f[2]])
        missing = [one for one in findings if one.got == "None"]
        trained = sum(row.parameter.requires_grad for row in held.rows.values())
        texts = {
            "missing": causes.missing_gradient_cause(evidence, len(missing) == trained),
            "wrong": self._combination(step, held, seen, findings, batches, (weights, counts)),
        }
        return [replace(one, cause=_cause_of(one, frozen, texts)) for one in findings]

    def _combination(
        self,
        step: int,
        held: Held,
        seen: Seen,
        findings: list[Finding],
        batches: Batches,
        sums: tuple[Weights, Weights],
    ) -> str:
        """What a wrong gradient is made of: found for the largest of them, which says most. Collective."""
        session, reference = self.session, self.reference
        wrong = [one for one in findings if one.got != "None" and one.expected != "None" and one.parameter]
        if not wrong:
            return causes.BACKWARD
        chosen = max(wrong, key=lambda one: held.rows[one.parameter or ""].parameter.numel())
        row, source = held.rows[chosen.parameter or ""], chosen.rank or 0
        sample: tuple[torch.Tensor, torch.Tensor] | None = None
        if session.rank == source and (grad := seen.gradients[row.name]) is not None:
            numbers = torch.arange(torch.Size(row.shape).numel(), device=session.device).view(row.shape)
            sample = (
                grad.reshape(-1)[: causes.SAMPLE].cpu(),
                held.cut(row, numbers).reshape(-1)[: causes.SAMPLE].cpu(),
            )
        sample = session.told(sample, source)
        text = None
        if reference is not None and sample is not None and not sample[0].is_complex():
            got, where = sample
            parts = reference.contributions(step, batches, row.name, where)
            own = session.data_ranks[source]
            text = causes.gradient_cause(got.double(), parts, *sums, own)
        return session.told(text) or causes.BACKWARD

    def _not_stepped(self, step: int, seen: Seen) -> list[Finding]:
        if seen.evidence.stepped:
            return merged(self.session, [])
        rank = self.session.rank
        at = (None, None, rank, (rank,), "optimizer.step()", "no call of it", causes.NOT_CALLED)
        return merged(self.session, [Finding("step", "no optimizer stepped.", step, *at)])

    def _suspects(self, step: int, batches: Batches) -> list[Finding]:
        """Of the unsharded model: parameters that its own backward forgets. Once. Collective."""
        if step:
            return []
        kept = None if self.reference is None else self.reference.gradients()
        found = None if self.reference is None else self.reference.without_gradient(step, batches[0][0])
        if self.reference is not None and kept is not None:
            for name, row in self.reference.held.rows.items():
                row.parameter.grad = kept[name]
        return [
            Finding(
                "autograd",
                "the loss depends on a parameter that gets no gradient, in the unsharded model too.",
                step,
                one.parameter,
                rank=0,
                ranks=tuple(range(self.session.world)),
                expected="a gradient",
                got=f"none; the loss changes by {one.change:.3g} if it is moved by {one.moved:.3g}",
                cause=causes.DROPPED,
            )
            for one in self.session.told(found) or []
        ]

    def _parameters(self, step: int, held: Held, seen: Seen, before: dict[str, torch.Tensor]) -> list[Finding]:
        """Step the reference with the sharded model's gradients, and compare what came out, and buffers."""
        session, reference = self.session, self.reference
        have = set().union(*session.all({name for name, grad in seen.gradients.items() if grad is not None}))
        for name, row in held.rows.items():
            if name in have:
                grad = seen.gradients[name]
                whole = held.whole(row, torch.zeros_like(before[name]) if grad is None else grad)
                if reference is not None and reference.held.rows[name].parameter.grad is not None:
                    parameter = reference.held.rows[name].parameter
                    parameter.grad = whole.to(parameter.device, parameter.dtype).clone()
        if reference is not None:
            reference.step()
            reference.accept()
        after = Held(self.model)
        comparison = Comparison(session, after, "parameter", "a parameter after the optimizer's step differs", step)
        parts: dict[str, torch.Tensor] = {}

        def allowed(row: Named) -> Any:
            small = update_tolerance(after.dtype(row))

            def of(want: torch.Tensor) -> float:
                parts[row.name] = want.cpu()
                was = before[row.name].reshape(-1).to(want)
                return small * (rms([want]) + 16 * (rms([want - was]) if was.shape == want.shape else 0.0))

            return of

        comparison.run(None if reference is None else reference.values(), after.value, allowed)
        self.compared += comparison.compared
        frozen = session.told([] if reference is None else [n for n, f in reference.held.facts().items() if not f[2]])
        found = []
        for one in comparison.findings:
            name = one.parameter or ""
            was, now = (tensor.reshape(-1).cpu() for tensor in (before[name], after.value(after.rows[name])))
            cause = causes.parameter_cause(was, now, parts[name], name not in frozen, name, seen.evidence)
            found.append(replace(one, cause=cause))
        return merged(session, found, after.rows) or self._buffers(after, step)


def _cause_of(finding: Finding, frozen: list[str], texts: dict[str, str]) -> str:
    if finding.got == "None":
        return texts["missing"]
    if finding.expected != "None":
        return texts["wrong"]
    return causes.UNFROZEN if finding.parameter in frozen else causes.UNUSED
