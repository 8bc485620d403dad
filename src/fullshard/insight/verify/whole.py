"""The whole model against an unsharded one on the first rank: phase after phase, until one finds a difference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from . import causes, start
from .apart import difference, rms
from .compare import Cause, compare, merged
from .draws import compare_draws, draws_of
from .held import Held
from .reference import Batches, Reference
from .report import Finding, Report
from .session import Session
from .tolerance import update_tolerance
from .training import Plan, Seen, listed
from .trial import Step, Trial


def run_whole(session: Session, plan: Plan, copy: bool, check_draws: bool, tolerance: float | None) -> Report:
    """See `verify`. Collective."""
    made = start.sharded(session, plan)
    if isinstance(made, list):
        return Report(tuple(made), session.world, 0, 0)
    reference = session.required("the unsharded model", lambda: _reference(session, plan, made[0]))
    whole = _Whole(session, plan, made, reference, check_draws, tolerance)
    return whole.report(whole.begin(copy))


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


class _Whole(Trial):
    """A sharded model and its reference, which the first rank has."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        made: tuple[nn.Module, Any],
        reference: Reference | None,
        check_draws: bool,
        given: float | None,
    ) -> None:
        super().__init__(session, plan, made, given, [""], "losses and gradients")
        self.reference, self.check_draws = reference, check_draws and session.world > 1
        self.unsharded = None if reference is None else reference.parameters

    # Before the first step.

    def begin(self, copy: bool) -> list[Finding]:
        """Structure, ties, dtypes, values and buffers. Collective."""
        session, held = self.session, Held(self.model)
        wanted = session.told(None if self.reference is None else start.Structure.of(self.reference.held))
        assert wanted is not None
        self.trained = wanted.trained
        differing = merged(session, start.compare(session, wanted, held), held.rows)
        if differing:
            return start.with_causes(differing, session)
        if copy:
            start.copy(session, self.reference, held)

        def allowed(row: Named, want: torch.Tensor) -> float:
            return update_tolerance(held.dtype(row)) * rms([want])

        template = Finding("value", "a parameter starts from another value")
        cause: Cause = lambda row, mine, want: causes.start_cause(mine)  # noqa: E731
        found, compared = compare(session, held, template, self.unsharded, held.value, allowed, cause)
        self.compared += compared
        return found or self._buffers(held, None)

    def _buffers(self, held: Held, step: int | None) -> list[Finding]:
        found, compared = start.compare_buffers(self.session, self.reference, held, step, self.allowed)
        self.compared += compared
        return merged(self.session, found, held.buffers)

    # A step.

    def step(self, number: int) -> list[Finding]:
        """One step of both. Collective."""
        session, reference, check_draws = self.session, self.reference, self.check_draws and number == 0
        mine, counts = self.batches(number)
        batches = self._of_all(mine)
        step = self.take(number, mine, counts, draws_of(self.model) if check_draws else nullcontext([]))
        weights = self.plan.weights(counts)
        run = lambda: None if reference is None else reference.run(number, batches, weights)  # noqa: E731
        losses = session.told(session.required("the unsharded model", run))
        assert losses is not None
        if isinstance(step, list):
            return step

        def combination(findings: list[Finding]) -> str:
            return self._combination(step, findings, batches)

        findings = compare_draws(session, number, step.noted) if check_draws else []
        findings = findings or self._losses(step, losses)
        findings = findings or self.gradients(step, None if reference is None else reference.gradients(), combination)
        findings = findings or self._not_stepped(number, step.seen)
        findings = findings or ([] if number else self._suspects(batches))
        if findings:
            return findings
        optimizers = [] if reference is None else reference.optimizers
        findings, after = self.updates(step, step.held.rows, self.unsharded, optimizers)
        if reference is not None:
            reference.accept()
        return findings or self._buffers(after, number)

    def _of_all(self, mine: list[Any]) -> Batches:
        """On the first rank the micro-batches of all data ranks, where they were; nothing on the others. Collective."""
        session = self.session
        away = any(tensor.device.type != "cpu" for tensor in tensors_in(mine))
        gathered = session.to_first(map_tensors(lambda tensor: tensor.detach().cpu(), mine))
        chosen = [] if gathered is None else [gathered[source] for source in session.sources]
        return [map_tensors(lambda tensor: tensor.to(session.device), own) if away else own for own in chosen]

    def _losses(self, step: Step, wanted: list[list[float]]) -> list[Finding]:
        session, found = self.session, []
        for rank, got in enumerate(session.all(step.seen.losses)):
            want = wanted[session.data_ranks[rank]]
            if got is None:
                continue
            if len(got) != len(want):
                got, want = [sum(got) / max(len(got), 1)], [sum(want) / len(want)]
            for number, (a, b) in enumerate(zip(got, want, strict=True)):
                self.compared += 1
                mine, theirs = (torch.tensor(value, dtype=torch.float64) for value in (a, b))
                gap = difference(mine, theirs, self.allowed * (rms([theirs]) + 1e-3))
                if gap is None:
                    continue
                which = f" of micro-batch {number}" if len(got) > 1 else ""
                cause = causes.loss_cause(a, b, session.data_world, self.plan.micro_batches, bool(step.noted))
                at = (None, None, rank, (rank,), gap.expected, gap.got, cause)
                found.append(Finding("loss", f"the loss{which} differs.", step.number, *at))
        return merged(session, found if session.first else [])

    def _combination(self, step: Step, findings: list[Finding], batches: Batches) -> str:
        """What a wrong gradient is made of: found for the largest of them, which says most. Collective."""
        session, rows = self.session, step.held.rows
        wrong = [one for one in findings if "None" not in (one.got, one.expected)]
        if not wrong:
            return causes.BACKWARD
        chosen = max(wrong, key=lambda one: rows[one.parameter or ""].parameter.numel())
        row, source = rows[chosen.parameter or ""], chosen.rank or 0
        sample: tuple[torch.Tensor, torch.Tensor] | None = None
        if session.rank == source and (grad := step.seen.gradients[row.name]) is not None:
            whole = (grad.reshape(-1), step.held.numbers(row, session.device))
            sample = (whole[0][: causes.SAMPLE].cpu(), whole[1][: causes.SAMPLE].cpu())
        sample = session.told(sample, source)
        text = None
        if self.reference is not None and sample is not None and not sample[0].is_complex():
            parts = self.reference.contributions(step.number, batches, row.name, sample[1])
            own = session.data_ranks[source]
            text = causes.gradient_cause(sample[0].double(), parts, step.weights, step.counts, own)
        return session.told(text) or causes.BACKWARD

    def _not_stepped(self, step: int, seen: Seen) -> list[Finding]:
        rank = self.session.rank
        at = (None, None, rank, (rank,), "optimizer.step()", "no call of it", causes.NOT_CALLED)
        found = [] if seen.evidence.stepped else [Finding("step", "no optimizer stepped.", step, *at)]
        return merged(self.session, found)

    def _suspects(self, batches: Batches) -> list[Finding]:
        """Of the unsharded model in the first step: parameters that its own backward forgets. Collective."""
        what = "the loss depends on a parameter that gets no gradient, in the unsharded model too."
        ranks = tuple(range(self.session.world))
        return [
            Finding(
                *("autograd", what, 0, one.parameter, None, 0, ranks, "a gradient"),
                f"none; the loss changes by {one.change:.3g} if it is moved by {one.moved:.3g}",
                causes.DROPPED,
            )
            for one in self.session.told(
                [] if self.reference is None else self.reference.without_gradient(batches[0][0])
            )
        ]
