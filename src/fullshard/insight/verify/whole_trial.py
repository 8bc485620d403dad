"""The whole model against an unsharded one on the first rank: phase after phase, up to the first difference.

Memory of that rank besides its own shards: the whole model, its gradients and optimizer state, two copies of its
buffers per data rank (statistics of batch norm differ between ranks), and the batches of one step.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from ...optim.clip import clip_scale
from ...torch_private.local_tensor import local_part
from . import causes
from .causes import Weights
from .draws import compare_draws, recorded_draws
from .findings import Finding
from .model_parts import ModelParts, buffers_of
from .rounding import difference, merged, rms, unit_roundoff, update_tolerance
from .session import Session
from .trial import Trial, TrialPlan, TrialStep, optimizers_in

Batches = list[list[Any]]  # by data rank, its micro-batches of one step


class Reference:
    """The unsharded model, which exists on the first rank only.

    Args:
        session: the ranks.
        plan: what to train.
        model: on the device where ranks compute.

    Attributes:
        parameters: by name.
        optimizers: of the parameters.
        buffers: by data rank and name, at the beginning of the step.
        clipped: by how much the last gradients were multiplied to clip them.
    """

    def __init__(self, session: Session, plan: TrialPlan, model: nn.Module) -> None:
        self.session, self.plan, self.model = session, plan, model
        self.optimizers = optimizers_in(plan.optimizer_fn(model))
        self.parts = ModelParts(model)
        self.parameters = {name: row.parameter for name, row in self.parts.rows.items()}
        self.buffers = [self._copy_of_buffers()] * session.data_world
        self._next_buffers, self.clipped = self.buffers, 1.0

    def run(self, step: int, batches: Batches, weights: Weights, left: Collection[str] = ()) -> list[list[float]]:
        """Forward and backward on every batch; leaves gradients of the weighted sum. Returns the losses.

        Args:
            step: its number.
            batches: of all data ranks.
            weights: how much each loss counts.
            left: names of parameters whose gradients are added to those of earlier steps.
        """
        for name, parameter in self.parameters.items():
            if name not in left:
                parameter.grad = None
        self._next_buffers, losses = [], list[list[float]]()
        for data_rank, micro_batches in enumerate(batches):
            self._rewind(step, data_rank)
            losses.append([])
            for batch, weight in zip(micro_batches, weights[data_rank], strict=True):
                loss = self.plan.loss_fn(self.model, batch)
                (loss * weight).backward()
                losses[-1].append(float(loss.detach()))
            self._next_buffers.append(self._copy_of_buffers())
        if self.plan.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)
            self.clipped = float(clip_scale(norm, self.plan.max_norm))
        return losses

    @torch.no_grad()
    def _rewind(self, step: int, data_rank: int) -> None:
        """Set buffers and generators as a data rank has them at the beginning of a step."""
        for name, buffer in buffers_of(self.model).items():
            buffer.copy_(self.buffers[data_rank][name])
        self.session.seed_with("step", step, data_rank)

    def _copy_of_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in buffers_of(self.model).items()}

    def accept(self) -> None:
        """Begin the next step with the buffers that the last `run` left."""
        self.buffers = self._next_buffers

    def contributions(self, step: int, batches: Batches, name: str, where: torch.Tensor) -> list[list[torch.Tensor]]:
        """The gradient of one parameter that each micro-batch's unweighted loss alone gives; clears all `.grad`s.

        Args:
            step, batches: as for `run`.
            name: of the parameter.
            where: [n], numbers of the elements to return.

        Returns:
            For each data rank and micro-batch, [n] in double precision.
        """
        parameter = self.parameters[name]
        gradients: list[list[torch.Tensor]] = []
        for data_rank, micro_batches in enumerate(batches):
            self._rewind(step, data_rank)
            gradients.append([])
            for batch in micro_batches:
                self.model.zero_grad()
                self.plan.loss_fn(self.model, batch).backward()
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
                gradients[-1].append(grad.reshape(-1)[where.to(grad.device)].to("cpu", torch.float64))
        self.model.zero_grad()
        return gradients

    def dropped_gradients(self, batch: Any) -> list[Finding]:
        """Trained parameters without a gradient, or with one of zeros, on which the loss of the first step depends.

        Costs nothing if every trained parameter has a gradient, else two forwards, and two more for each parameter. A
        loss depends on a parameter if it changes in proportion to a small change of the parameter: not to its square
        (a gate that is zero), and not at all if the other factor is zero.
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
            return []  # it differs each time, and shows nothing
        if len(idle) > 1 and self._loss_moved(batch, [*idle.values()], 1.0) == base:
            return []
        findings = []
        for name, parameter in idle.items():
            far, near = (self._loss_moved(batch, [parameter], size) - base for size in (1.0, 0.125))
            if abs(far) > 1e-5 * abs(base) and abs(far) < 24 * abs(near):
                finding = Finding(
                    "autograd",
                    "the loss depends on a parameter that gets no gradient, in the unsharded model too.",
                    step=0,
                    parameter=name,
                    ranks=tuple(range(self.session.world)),
                    expected="a gradient",
                    got=f"none; the loss changes by {far:.3g} if it is moved by {_reach(parameter):.3g}",
                    cause=causes.DROPPED,
                )
                findings.append(finding)
        return findings

    @torch.no_grad()
    def _loss(self, batch: Any) -> float:
        self._rewind(0, 0)
        return float(self.plan.loss_fn(self.model, batch))

    @torch.no_grad()
    def _loss_moved(self, batch: Any, parameters: list[torch.Tensor], size: float) -> float:
        """The loss with these parameters moved in a random direction."""
        values = [parameter.clone() for parameter in parameters]
        generator = torch.Generator("cpu").manual_seed(self.session.seed)
        try:
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
                parameter.add_(noise, alpha=size * _reach(parameter))
            return self._loss(batch)
        finally:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


def _reach(parameter: torch.Tensor) -> float:
    """The root mean square by which a parameter's elements are moved."""
    return 0.02 * max(rms([parameter]), 0.01)


Fact = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Structure:
    """The names, shapes and dtypes in a model, without values.

    Attributes:
        tensors: whole shape and dtype of each parameter and buffer, by kind and name.
        ties: names of each parameter that has several.
        trained: names of parameters that require a gradient.
    """

    tensors: dict[tuple[str, str], Fact]
    ties: set[tuple[str, ...]]
    trained: frozenset[str]

    @classmethod
    def of(cls, parts: ModelParts, prefixes: tuple[str, ...] = ("",)) -> Structure:
        """The part whose names begin with one of `prefixes`."""
        rows = {name: row for name, row in parts.rows.items() if name.startswith(prefixes)}
        buffers = {name: buffer for name, buffer in parts.buffers.items() if name.startswith(prefixes)}
        return cls(
            {("parameter", name): (row.shape, parts.dtype(row)) for name, row in rows.items()}
            | {("buffer", name): (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()},
            {names for names in parts.ties if all(name.startswith(prefixes) for name in names)},
            frozenset(name for name, row in rows.items() if row.parameter.requires_grad),
        )


def compare_structures(session: Session, expected: Structure, got: Structure) -> list[Finding]:
    """Differences between all ranks' models and the unsharded one. Collective."""
    findings: list[Finding] = []

    def add(kind: str, what: str, name: str, expected_text: str, text: str, cause: str) -> None:
        findings.append(Finding(kind, what, None, name, None, (session.rank,), expected_text, text, cause))

    one, several = "one tensor", "several tensors"
    broken = "weights that are tied in the unsharded model are not."
    tied = set[str]()
    for ties, others, what, before, after, cause in (
        (expected.ties, got.ties, broken, one, several, causes.TIE),
        (got.ties, expected.ties, f"{causes.UNTIED}.", several, one, causes.UNTIED),
    ):
        for names in sorted(ties):
            if not any(set(names) <= set(other) for other in others):
                text = " and ".join(names)
                add("tie", what, names[0], f"{before}: {text}", f"{after}: {text}", cause)
                tied.update(names)
    for kind, name in {**expected.tensors, **got.tensors}:
        fact, got_fact = (structure.tensors.get((kind, name)) for structure in (expected, got))
        if fact == got_fact or name in tied:
            continue
        texts = _text_of(fact), _text_of(got_fact)
        if fact is None or got_fact is None:
            what = f"a {kind} is {'added to' if fact is None else 'missing from'} the sharded model."
            add("structure", what, name, *texts, causes.OTHER_MODEL)
        elif fact[0] != got_fact[0]:
            add("structure", f"a {kind} has a different shape.", name, *texts, causes.OTHER_MODEL)
        elif kind == "parameter":
            cause = causes.MASTER if unit_roundoff(got_fact[1]) > unit_roundoff(fact[1]) else causes.OTHER_DTYPE
            add("dtype", "a parameter is stored in a different dtype.", name, str(fact[1]), str(got_fact[1]), cause)
    return [
        replace(finding, cause=causes.ADAPTER)
        if finding.kind == "structure" and len(finding.ranks) < session.world
        else finding
        for finding in merged(session, findings, [name for _, name in got.tensors])
    ]


def _text_of(fact: Fact | None) -> str:
    return "none" if fact is None else f"shape {list(fact[0])}, {str(fact[1]).removeprefix('torch.')}"


class WholeTrial(Trial):
    """A sharded model and its reference. See `verify`. Collective."""

    def __init__(self, session: Session, plan: TrialPlan, model: nn.Module, optimizer: Any) -> None:
        super().__init__(session, plan, model, optimizer, [""], "losses and gradients")
        self.reference = session.require("the unsharded model", self._make_reference)
        self.unsharded = None if self.reference is None else self.reference.parameters

    def _make_reference(self) -> Reference | None:
        session, plan = self.session, self.plan
        if not session.is_first:
            return None
        session.seed_with("model")
        model = plan.model_fn()
        if not isinstance(model, nn.Module) or model is self.model:
            raise ConfigError("model_fn must make a new module at each call")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError(
                "model_fn returned parameters on the meta device: return values, and use meta in shard_fn"
            )
        return Reference(session, plan, model.to(session.device))

    # Before the first step.

    def begin(self) -> list[Finding]:
        """Compare structure, ties, dtypes, values and buffers. Collective."""
        session, parts = self.session, ModelParts(self.model)
        structure = session.broadcast(None if self.reference is None else Structure.of(self.reference.parts))
        assert structure is not None
        self.trained = structure.trained
        if findings := compare_structures(session, structure, Structure.of(parts)):
            return findings
        if self.plan.initial == "copy":
            self._copy_values(parts)
        return self.compare(
            parts,
            Finding("value", "a parameter starts from a different value."),
            self.unsharded,
            parts.value,
            lambda row, expected: update_tolerance(parts.dtype(row)) * rms([expected]),
            lambda row, got, expected: causes.start_cause(got),
        ) or self._compare_buffers(parts, None)

    @torch.no_grad()
    def _copy_values(self, parts: ModelParts) -> None:
        """Write the unsharded model's values into the sharded one. Collective."""
        session, reference = self.session, self.reference
        for name, row in parts.comparable.items():
            whole = None if reference is None else reference.parameters[name]
            parts.value(row).copy_(parts.cut(row, session.broadcast_tensor(whole, row.shape, parts.dtype(row))))
        for name in sorted(parts.buffers):
            local = local_part(parts.buffers[name])
            whole = None if reference is None else reference.buffers[0][name]
            local.copy_(session.broadcast_tensor(whole, tuple(local.shape), local.dtype))

    def _compare_buffers(self, parts: ModelParts, step: int | None) -> list[Finding]:
        """Compare buffers with those of the reference after this rank's batches. Collective."""
        session, reference = self.session, self.reference
        facts: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
        if reference is not None:
            for name, first in reference.buffers[0].items():
                alike = all(torch.equal(buffers[name], first) for buffers in reference.buffers[1:])
                facts[name] = (tuple(first.shape), first.dtype, alike)
        facts = session.broadcast(facts)
        findings = []
        for name, (shape, dtype, alike) in facts.items():
            for data_rank in range(1 if alike else session.data_world):
                whole = None if reference is None else reference.buffers[data_rank][name]
                expected = session.broadcast_tensor(whole, shape, dtype)
                if not alike and data_rank != session.data_rank:
                    continue
                got = local_part(parts.buffers[name])
                rounding = 4 * unit_roundoff(got.dtype)
                allowed = max(self.allowed, rounding) * rms([expected]) if rounding else 0.0
                cause = causes.UNINITIALIZED if step is None else causes.BUFFER
                template = Finding("buffer", "a buffer differs.", step, name, ranks=(session.rank,), cause=cause)
                finding = difference(template, got, expected.to(got.device), allowed)
                if finding is not None:
                    findings.append(finding)
        self.compared += len(facts)
        return merged(session, findings, parts.buffers)

    # A step.

    def step(self, number: int) -> list[Finding]:
        """Train one step of both, and compare. Collective."""
        session, reference = self.session, self.reference
        check_draws = self.plan.check_draws and session.world > 1 and number == 0
        local_batches, counts = self.load_batches(number)
        batches = self._global_batches(local_batches)
        step = self.train(number, local_batches, counts, recorded_draws(self.model) if check_draws else nullcontext([]))
        weights = self.plan.weights(counts)
        step_left = step.left if isinstance(step, TrialStep) else ()
        losses = session.broadcast(
            session.require(
                "the unsharded model",
                lambda: None if reference is None else reference.run(number, batches, weights, step_left),
            )
        )
        assert losses is not None
        if isinstance(step, list):
            return step
        findings = compare_draws(session, number, step.recorded) if check_draws else []
        findings = findings or self._compare_losses(step, losses)
        findings = findings or self.compare_gradients(
            step, self.unsharded, lambda findings: self._gradient_cause(step, findings, batches)
        )
        findings = findings or self._missing_step(step)
        if not findings and number == 0:
            findings = session.broadcast([] if reference is None else reference.dropped_gradients(batches[0][0]))
        if findings:
            return findings
        optimizers = [] if reference is None else reference.optimizers
        findings = self.compare_updates(step, step.parts.rows, self.unsharded, optimizers)
        if reference is not None:
            reference.accept()
        return findings or self._compare_buffers(ModelParts(self.model), number)

    def _global_batches(self, local_batches: list[Any]) -> Batches:
        """The micro-batches of all data ranks, on the first rank; on its device unless on the CPU. Collective."""
        session = self.session
        on_device = any(tensor.device.type != "cpu" for tensor in tensors_in(local_batches))
        gathered = session.gather_to_first(map_tensors(lambda tensor: tensor.detach().cpu(), local_batches))
        batches = [gathered[source] for source in session.sources] if gathered else []
        return map_tensors(lambda tensor: tensor.to(session.device), batches) if on_device else batches

    def _compare_losses(self, step: TrialStep, losses: list[list[float]]) -> list[Finding]:
        """Compare every rank's losses with the reference's, by data rank and micro-batch. Collective."""
        session, findings = self.session, []
        for rank, got in enumerate(session.gather(step.losses)):
            expected = losses[session.data_ranks[rank]]
            if got is None:
                continue
            others: list[tuple[float, str]] = []
            if self.plan.train_step_fn is not None and len(got) == 1:
                every = [loss for of_rank in losses for loss in of_rank]
                others += [(sum(every) / len(every), "the mean over all ranks")] if len(losses) > 1 else []
                others += [(expected[-1], "the loss of its last micro-batch")] if len(expected) > 1 else []
            if len(got) != len(expected):
                got, expected = [sum(got) / max(len(got), 1)], [sum(expected) / len(expected)]
            for number, (a, b) in enumerate(zip(got, expected, strict=True)):
                self.compared += 1
                which = f" of micro-batch {number}" if len(got) > 1 else ""
                template = Finding("loss", f"the loss{which} differs.", step.number, ranks=(rank,))
                got_loss, loss = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in (a, b))
                finding = difference(template, got_loss, loss, self.allowed * (rms([loss]) + 1e-3))
                if finding is not None:
                    sizes = session.data_world, self.plan.micro_batches
                    cause = causes.loss_cause(a, b, *sizes, bool(step.recorded), others)
                    if self.plan.train_step_fn is not None and cause in (causes.FORWARD, causes.DRAWN):
                        cause += ". Or the training step returns a number other than the mean of its losses"
                    findings.append(replace(finding, element=None, cause=cause))
        return merged(session, findings)

    def _gradient_cause(self, step: TrialStep, findings: list[Finding], batches: Batches) -> str:
        """The cause for the largest wrong gradient, which is the most significant. Collective."""
        session, rows = self.session, step.parts.rows
        wrong = [finding for finding in findings if "None" not in (finding.got, finding.expected)]
        if not wrong:
            return causes.BACKWARD
        largest = max(wrong, key=lambda finding: rows[finding.parameter or ""].parameter.numel())
        row, rank = rows[largest.parameter or ""], largest.ranks[0]
        sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        if session.rank == rank:
            grad = step.gradients[row.name]
            assert grad is not None
            earlier = step.earlier.get(row.name)
            grad, numbers = (part.reshape(-1)[: causes.SAMPLE].cpu() for part in (grad, step.parts.numbers(row)))
            sample = grad, numbers, None if earlier is None else earlier.reshape(-1)[: causes.SAMPLE].cpu().double()
        sample = session.broadcast(sample, rank)
        assert sample is not None
        cause = None
        if self.reference is not None and not sample[0].is_complex():
            contributions = self.reference.contributions(step.number, batches, row.name, sample[1])
            data_rank = session.data_ranks[rank]
            cause = causes.gradient_cause(
                sample[0].double(),
                contributions,
                step.weights,
                step.counts,
                data_rank,
                earlier=sample[2],
                clipped=self.reference.clipped,
            )
        return session.broadcast(cause) or causes.BACKWARD

    def _missing_step(self, step: TrialStep) -> list[Finding]:
        """Ranks on which no optimizer stepped. Collective."""
        finding = Finding(
            "step",
            "no optimizer stepped.",
            step.number,
            ranks=(self.session.rank,),
            expected="optimizer.step()",
            got="no call",
            cause=causes.NOT_CALLED,
        )
        return merged(self.session, [] if step.observations.stepped else [finding])
