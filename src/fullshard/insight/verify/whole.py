"""The whole model against an unsharded one on the first rank: phase after phase, until one finds a difference.

Memory of that rank besides its own shards: the whole model, its gradients and optimizer state, two copies of its
buffers per data rank (what batch norm counts differs between ranks), and the batches of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from ...torch_private.local_tensor import local_part
from . import causes
from .causes import Weights
from .compare import Cause, compare, difference, index_of, merged, rms, unit_roundoff, update_tolerance
from .draws import compare_draws, draws_of
from .model_parts import ModelParts, buffers_of
from .report import Finding, Report
from .session import Session
from .trial import Plan, Seen, Step, Trial, listed, sharded

Loss = Callable[[nn.Module, Any], torch.Tensor]
Batches = list[list[Any]]  # of each data rank, its micro-batches of one step


@dataclass(frozen=True)
class Suspect:
    """A trained parameter that gets no gradient though the loss depends on it."""

    parameter: str
    change: float  # of the loss
    moved: float  # by which every element was moved, root mean square


class Reference:
    """See the module's docstring.

    Args:
        session: the ranks; this one is the first.
        model: unsharded, on the device where ranks compute.
        optimizers: of its parameters.
        loss_fn: `loss_fn(model, batch)`.
        max_norm: gradients are clipped to this total norm before a step; None: they are not.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss_fn: Loss,
        max_norm: float | None,
    ) -> None:
        self.session, self.model, self.optimizers = session, model, optimizers
        self.loss_fn, self.max_norm = loss_fn, max_norm
        self.parts = ModelParts(model)
        self.parameters = {name: row.parameter for name, row in self.parts.rows.items()}
        start = self._buffers_now()
        self.buffers = [dict(start) for _ in range(session.data_world)]
        self.after = self.buffers

    def run(self, step: int, batches: Batches, weights: Weights) -> list[list[float]]:
        """Forward and backward on every batch; leaves gradients of the weighted sum. Returns the losses."""
        self.model.zero_grad()
        self.after = []
        losses = []
        for number, (own, weight) in enumerate(zip(batches, weights, strict=True)):
            losses.append([float(loss) for loss in self._one_rank(step, number, own, weight)])
            self.after.append(self._buffers_now())
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return losses

    def _one_rank(self, step: int, number: int, batches: list[Any], weights: list[float]) -> Iterable[torch.Tensor]:
        self._restore(number)
        self.session.seed_with("step", step, number)
        for batch, weight in zip(batches, weights, strict=True):
            loss = self.loss_fn(self.model, batch)
            (loss * weight).backward()
            yield loss.detach()

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in buffers_of(self.model).items()}

    def _restore(self, number: int) -> None:
        with torch.no_grad():
            for name, buffer in buffers_of(self.model).items():
                buffer.copy_(self.buffers[number][name])

    def accept(self) -> None:
        """What the last `run` left in buffers is what the next step begins with."""
        self.buffers = self.after

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Every parameter's gradient."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def contributions(self, step: int, batches: Batches, name: str, where: torch.Tensor) -> list[list[torch.Tensor]]:
        """What each micro-batch's unweighted loss alone gives as a parameter's gradient; `.grad`s are lost.

        Args:
            step, batches: as for `run`.
            name: of the parameter.
            where: [n], numbers of the elements that are wanted.

        Returns:
            For each data rank and micro-batch, [n] in double precision.
        """
        parameter = self.parameters[name]
        found: list[list[torch.Tensor]] = []
        for number, own in enumerate(batches):
            self._restore(number)
            self.session.seed_with("step", step, number)
            found.append([])
            for batch in own:
                self.model.zero_grad()
                self.loss_fn(self.model, batch).backward()
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
                found[-1].append(grad.reshape(-1)[where.to(grad.device)].to("cpu", torch.float64))
        self.model.zero_grad()
        return found

    def without_gradient(self, batch: Any) -> list[Suspect]:
        """Trained parameters without a gradient, or with one of zeros, on which the loss depends.

        Costs nothing if there is no such parameter, else two forwards, and two more for each that is found. What counts
        is a change of the loss in proportion to a small change of the parameter: not one of its square (a gate that is
        zero), nor none (the other factor is zero).
        """
        idle = {
            name: p
            for name, p in self.parameters.items()
            if p.requires_grad and p.is_floating_point() and p.numel() and (p.grad is None or not bool(p.grad.any()))
        }
        if not idle:
            return []
        base = self._loss(batch)
        if self._loss(batch) != base:
            return []  # it is another one each time: nothing can be told
        if len(idle) > 1 and self._moved(batch, [*idle.values()], 1.0) == base:
            return []
        found = []
        for name, parameter in idle.items():
            far, near = (self._moved(batch, [parameter], size) - base for size in (1.0, 0.125))
            if abs(far) > 1e-5 * abs(base) and abs(far) < 24 * abs(near):
                found.append(Suspect(name, far, _reach(parameter)))
        return found

    @torch.no_grad()
    def _loss(self, batch: Any) -> float:
        self._restore(0)
        self.session.seed_with("step", 0, 0)
        return float(self.loss_fn(self.model, batch))

    @torch.no_grad()
    def _moved(self, batch: Any, parameters: list[torch.Tensor], size: float) -> float:
        """The loss with these parameters moved in a random direction."""
        kept = [parameter.clone() for parameter in parameters]
        generator = torch.Generator("cpu").manual_seed(self.session.seed)
        try:
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
                parameter.add_(noise, alpha=size * _reach(parameter))
            return self._loss(batch)
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _reach(parameter: torch.Tensor) -> float:
    return 0.02 * max(rms([parameter]), 0.01)


Fact = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Structure:
    """What exists in a model, without values.

    Attributes:
        parameters, buffers: whole shape and dtype, by name.
        ties: names of each parameter that has several.
        trained: names of parameters that require a gradient.
    """

    parameters: dict[str, Fact]
    buffers: dict[str, Fact]
    ties: frozenset[tuple[str, ...]]
    trained: frozenset[str]

    @classmethod
    def of(cls, parts: ModelParts) -> Structure:
        return cls(
            {name: (row.shape, parts.dtype(row)) for name, row in parts.rows.items()},
            {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in parts.buffers.items()},
            frozenset(parts.ties),
            frozenset(name for name, row in parts.rows.items() if row.parameter.requires_grad),
        )


def structure_findings(session: Session, want: Structure, parts: ModelParts) -> list[Finding]:
    """Differences of this rank's model from the unsharded one's structure."""
    got, rank = Structure.of(parts), session.rank
    found: list[Finding] = []

    def add(kind: str, what: str, name: str, expected: object, was: object, cause: str | None = None) -> None:
        found.append(Finding(kind, what, None, name, None, rank, (rank,), str(expected), str(was), cause))

    changed: set[str] = set()  # names whose place in a tie is told already
    broken = ("weights that are tied in the unsharded model are not.", "one tensor", "several tensors", causes.TIE)
    made = (f"{causes.UNTIED}.", "several tensors", "one tensor", causes.UNTIED)
    for ties, others, (text, expected, was, cause) in ((want.ties, got.ties, broken), (got.ties, want.ties, made)):
        for names in sorted(ties - others):
            if not any(set(names) <= set(other) for other in others):
                both = " and ".join(names)
                add("tie", text, names[0], f"{expected}: {both}", f"{was}: {both}", cause)
                changed |= set(names)
    for kind, mine, theirs in (("parameter", got.parameters, want.parameters), ("buffer", got.buffers, want.buffers)):
        for name in [*theirs, *(name for name in mine if name not in theirs)]:
            if name in changed:
                continue
            a, b = theirs.get(name), mine.get(name)
            if a is None or b is None:
                text = ["missing from", "added to"][a is None]
                add("structure", f"a {kind} is {text} the sharded model.", name, _told(a), _told(b))
            elif a[0] != b[0]:
                add("structure", f"a {kind} has another shape.", name, _told(a), _told(b))
            elif a[1] != b[1] and kind == "parameter":
                coarser = unit_roundoff(b[1]) > unit_roundoff(a[1])
                cause = causes.MASTER if coarser else causes.OTHER_DTYPE
                add("dtype", "a parameter is stored in another dtype.", name, a[1], b[1], cause)
    return found


def _told(fact: Fact | None) -> str:
    return "none" if fact is None else f"shape {list(fact[0])}, {str(fact[1]).removeprefix('torch.')}"


def with_causes(findings: list[Finding], session: Session) -> list[Finding]:
    """Structure that differs on some ranks only has another cause than one that differs on all."""
    return [
        one
        if one.cause is not None
        else replace(one, cause=causes.ADAPTER if len(one.ranks) < session.world else causes.OTHER_MODEL)
        for one in findings
    ]


@torch.no_grad()
def copy_values(session: Session, reference: Reference | None, parts: ModelParts) -> None:
    """Write the unsharded model's values into the sharded one. Collective."""
    for name, row in parts.rows.items():
        if parts.comparable(row):
            whole = None if reference is None else reference.parameters[name]
            parts.value(row).copy_(parts.cut(row, session.sent(whole, row.shape, parts.dtype(row))))
    names = session.told(None if reference is None else list(reference.buffers[0]))
    for name in names or []:
        mine = local_part(parts.buffers[name])
        mine.copy_(
            session.sent(None if reference is None else reference.buffers[0][name], tuple(mine.shape), mine.dtype)
        )


def compare_buffers(
    session: Session, reference: Reference | None, parts: ModelParts, step: int | None, allowed: float
) -> tuple[list[Finding], int]:
    """This rank's buffers against those of the reference after this rank's batches; how many. Collective."""
    facts: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    if reference is not None:
        for name, first in reference.buffers[0].items():
            alike = all(torch.equal(own[name], first) for own in reference.buffers[1:])
            facts[name] = (tuple(first.shape), first.dtype, alike)
    found: list[Finding] = []
    facts = session.told(facts)
    for name, (shape, dtype, alike) in facts.items():
        for number in range(1 if alike else session.data_world):
            whole = session.sent(None if reference is None else reference.buffers[number][name], shape, dtype)
            if not alike and number != session.data_rank:
                continue
            mine = local_part(parts.buffers[name])
            rounding = 4 * unit_roundoff(mine.dtype)
            limit = max(allowed, rounding) * rms([whole]) if rounding else 0.0
            gap = difference(mine, whole.to(mine.device), limit)
            if gap is not None:
                cause = causes.UNINITIALISED if step is None else causes.BUFFER
                at = (index_of(gap.at, shape), session.rank, (session.rank,), gap.expected, gap.got, cause)
                found.append(Finding("buffer", f"a buffer differs ({gap}).", step, name, *at))
    return found, len(facts)


def run_whole(session: Session, plan: Plan, copy: bool, check_draws: bool, tolerance: float | None) -> Report:
    """See `verify`. Collective."""
    made = sharded(session, plan)
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
        session, parts = self.session, ModelParts(self.model)
        wanted = session.told(None if self.reference is None else Structure.of(self.reference.parts))
        assert wanted is not None
        self.trained = wanted.trained
        differing = merged(session, structure_findings(session, wanted, parts), parts.rows)
        if differing:
            return with_causes(differing, session)
        if copy:
            copy_values(session, self.reference, parts)

        def allowed(row: Named, want: torch.Tensor) -> float:
            return update_tolerance(parts.dtype(row)) * rms([want])

        template = Finding("value", "a parameter starts from another value")
        cause: Cause = lambda row, mine, want: causes.start_cause(mine)  # noqa: E731
        found, compared = compare(session, parts, template, self.unsharded, parts.value, allowed, cause)
        self.compared += compared
        return found or self._buffers(parts, None)

    def _buffers(self, parts: ModelParts, step: int | None) -> list[Finding]:
        found, compared = compare_buffers(self.session, self.reference, parts, step, self.allowed)
        self.compared += compared
        return merged(self.session, found, parts.buffers)

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
        findings, after = self.updates(step, step.parts.rows, self.unsharded, optimizers)
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
                mine, theirs = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in (a, b))
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
        session, rows = self.session, step.parts.rows
        wrong = [one for one in findings if "None" not in (one.got, one.expected)]
        if not wrong:
            return causes.BACKWARD
        chosen = max(wrong, key=lambda one: rows[one.parameter or ""].parameter.numel())
        row, source = rows[chosen.parameter or ""], chosen.rank or 0
        sample: tuple[torch.Tensor, torch.Tensor] | None = None
        if session.rank == source and (grad := step.seen.gradients[row.name]) is not None:
            whole = (grad.reshape(-1), step.parts.numbers(row, session.device))
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
