"""Chosen modules against unsharded copies of them, where the whole model fits no device.

Each rank notes what goes into and comes out of a chosen module in the sharded run, forward and backward. The first rank
holds an unsharded copy of that module, runs it on what every rank put in, and compares outputs, gradients and the
parameters after the step. Memory of the first rank: the chosen modules with gradients and optimizer state, and what one
of them was given by all ranks in a step. Not compared: the loss, what lies between chosen modules, initial values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from ...torch_private.autograd_task import inside_backward
from . import causes, start
from .apart import difference, rms
from .compare import Comparison, merged
from .held import Held, plain_name
from .report import Finding, Report
from .session import Session
from .tolerance import gradient_tolerance, update_tolerance
from .training import Plan, Seen, listed, take_step


@dataclass
class Call:
    """One forward of a chosen module, all tensors on the host.

    Attributes:
        inputs: (args, kwargs) as the module got them.
        outputs: tensors in what it gave; `arrived`: their gradients, by number.
        buffers: before the call; `states`: of the generators, by device type.
    """

    inputs: Any
    buffers: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)


def run_parts(session: Session, plan: Plan, names: Sequence[str], tolerance: float | None) -> Report:
    """See `verify` with `modules`. Collective."""
    if plan.max_norm is not None:
        raise ConfigError("verify: max_norm needs the gradients of the whole model, which modules= leaves out")
    session.seed_with("model")
    model = session.required("model_fn", plan.model_fn)
    made, errors = start.sharded(session, plan, model)
    if made is None:
        return Report(tuple(errors), session.world, 0, 0)
    del model
    chosen = session.required("modules", lambda: _chosen(made[0], names))
    copies = session.required("the unsharded modules", lambda: _copies(session, plan, names))
    run = _Run(session, plan, made, chosen, copies, tolerance)
    findings: list[Finding] = []
    done = 0
    while not findings and done < plan.steps:
        findings = run.step(done)
        done += not findings
    allowed = (("outputs and gradients", run.allowed),)
    note = f"compared: {', '.join(names)}; not the loss, nor anything outside of these modules"
    return Report(tuple(findings), session.world, done, session.told(run.compared), allowed, (note,))


def _chosen(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names, inside of what wraps them."""
    known = {plain_name(f"{path}.")[:-1]: module for path, module in model.named_modules()}
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise ConfigError(f"the model has no modules named {missing}; it has {list(known)[:20]} ...")
    return {name: known[name] for name in names}


@dataclass
class _Copy:
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    held: Held


def _copies(session: Session, plan: Plan, names: Sequence[str]) -> dict[str, _Copy]:
    """On the first rank, unsharded modules without values; nothing on the others."""
    if not session.first:
        return {}
    session.seed_with("model")
    with torch.device("meta"):
        whole = plan.model_fn()
    found = {}
    for name in names:
        module = whole.get_submodule(name)
        ties = Held(module).ties
        module.to_empty(device=session.device)
        for first, *others in ties:
            for other in others:
                path, _, key = other.rpartition(".")
                setattr(module.get_submodule(path), key, module.get_parameter(first))
        found[name] = _Copy(module, listed(plan.optimizer_fn(module)), Held(module))
    return found


class _Run:
    """The sharded model and copies of some of its modules."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        made: tuple[nn.Module, Any],
        chosen: dict[str, nn.Module],
        copies: dict[str, _Copy],
        tolerance: float | None,
    ) -> None:
        self.session, self.plan, self.chosen, self.copies = session, plan, chosen, copies
        self.model, self.optimizer = made
        self.compared = 0
        held = Held(self.model)
        shapes = [row.shape for row in held.rows.values()]
        depth = max(sum(1 for m in module.modules() if m._parameters) for module in chosen.values())
        longest = max([session.data_world * plan.micro_batches, *(size for shape in shapes for size in shape)])
        self.allowed = tolerance or session.told(gradient_tolerance(held.dtypes(), depth, longest))

    def step(self, step: int) -> list[Finding]:
        """One step. Collective."""
        session, plan = self.session, self.plan
        batches = []
        for index in range(step * plan.micro_batches, (step + 1) * plan.micro_batches):
            session.seed_with("batch", index, session.data_rank)
            batches.append(plan.batch_fn(index, session.data_rank, session.data_world))
        count = plan.tokens_fn or (lambda batch: 1.0)
        counts = session.all([float(count(batch)) for batch in batches])
        weights = plan.weights([counts[source] for source in session.sources])
        held = Held(self.model)
        before = {name: held.value(row).clone() for name, row in held.rows.items() if held.comparable(row)}
        self._fill(held)
        session.seed_with("step", step, session.data_rank)

        def sharded() -> tuple[Seen, dict[str, list[Call]]]:
            with _noted(self.chosen) as calls:
                own = weights[session.data_rank]
                return take_step(session, plan, self.model, self.optimizer, batches, own, held), calls

        result, failed = session.attempt(sharded)
        if failed:
            return start.error_findings(failed, step, "the training step of the sharded model raised")
        assert result is not None
        seen, calls = result
        for name in self.chosen:
            if found := self._one(step, name, held, seen, before, calls[name]):
                return found
        return []

    def _one(
        self, step: int, name: str, held: Held, seen: Seen, before: dict[str, torch.Tensor], calls: list[Call]
    ) -> list[Finding]:
        """One module's outputs, gradients and step. Collective."""
        session, copy = self.session, self.copies.get(name)
        prefix = f"{name}." if name else ""
        rows = {
            key: row for key, row in held.rows.items() if key in before and all(n.startswith(prefix) for n in row.names)
        }
        gathered = session.to_first(calls)
        outputs: list[Finding] = []
        if copy is not None and gathered is not None:
            copy.module.zero_grad()
            for source in session.sources:
                for call in gathered[source]:
                    outputs += self._replayed(step, name, source, copy, call, held)
        if found := merged(session, outputs):
            return found
        wanted = None
        if copy is not None:
            wanted = {key: self._parameter(copy, prefix, row).grad for key, row in rows.items()}
        scale = session.told(rms(g for g in wanted.values() if g is not None) if wanted is not None else 0.0)
        comparison = Comparison(session, held, "gradient", "the gradient that the optimizer is given differs", step)
        allowed = lambda row: lambda want: self.allowed * (rms([want]) + scale)  # noqa: E731
        comparison.run(wanted, lambda row: seen.gradients.get(row.name), allowed)
        self.compared += comparison.compared
        findings = merged(session, comparison.findings, held.rows)
        if findings:
            evidence = session.all(seen.evidence)
            text = {"None": causes.missing_gradient_cause(evidence, False)}
            return [replace(one, cause=text.get(one.got or "", causes.BACKWARD)) for one in findings]
        return self._stepped(step, prefix, rows, seen, before, copy)

    @staticmethod
    def _parameter(copy: _Copy, prefix: str, row: Named) -> torch.Tensor:
        own = next(name for name in row.names if name.startswith(prefix))
        return copy.module.get_parameter(own.removeprefix(prefix))

    def _fill(self, held: Held) -> None:
        """Give the copies the values that the sharded model has. Collective; one parameter at a time is whole."""
        for name in self.chosen:
            prefix, copy = f"{name}." if name else "", self.copies.get(name)
            for row in held.rows.values():
                if held.comparable(row) and any(own.startswith(prefix) for own in row.names):
                    whole = held.whole(row, held.value(row))
                    if copy is not None:
                        with torch.no_grad():
                            self._parameter(copy, prefix, row).copy_(whole)

    def _replayed(self, step: int, name: str, source: int, copy: _Copy, call: Call, held: Held) -> Iterator[Finding]:
        """Run a copy on what one rank's module was given; adds to its gradients. On the first rank."""
        session, module = self.session, copy.module
        with torch.no_grad():
            for own, buffer in module.named_buffers():
                buffer.copy_(call.buffers[own])
        for kind, state in call.states.items():
            torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(kind).set_rng_state(state)
        args, kwargs = map_tensors(lambda t: t.to(session.device), call.inputs)
        outputs = list(tensors_in(torch.func.functional_call(module, self._computed(name, copy, held), args, kwargs)))
        for number, (want, got) in enumerate(zip(outputs, call.outputs, strict=True)):
            self.compared += 1
            gap = difference(got, want.detach(), self.allowed * rms([want]))
            if gap is not None:
                element = (
                    tuple(int(i) for i in torch.unravel_index(torch.tensor(gap.at), want.shape)) if want.dim() else ()
                )
                what = f"output {number} of module {name!r} differs ({gap})."
                at = (source, (source,), gap.expected, gap.got, causes.FORWARD)
                yield Finding("output", what, step, name, element, *at)
        roots = [(outputs[i], grad.to(session.device)) for i, grad in call.arrived.items()]
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g / session.data_world for _, g in roots])

    def _computed(self, name: str, copy: _Copy, held: Held) -> dict[str, torch.Tensor]:
        """A copy's parameters in the dtypes that the sharded model computes with."""
        prefix, found = f"{name}." if name else "", {}
        for own, parameter in copy.module.named_parameters():
            row = next((row for row in held.rows.values() if prefix + own in row.names), None)
            if row is not None and row.bucket is not None and parameter.is_floating_point():
                found[own] = parameter.to(row.bucket.compute_dtype)
        return found

    def _stepped(
        self,
        step: int,
        prefix: str,
        rows: dict[str, Named],
        seen: Seen,
        before: dict[str, torch.Tensor],
        copy: _Copy | None,
    ) -> list[Finding]:
        """Step a copy with the sharded model's gradients, and compare its parameters. Collective."""
        session, after = self.session, Held(self.model)
        have = set().union(*session.all({name for name, grad in seen.gradients.items() if grad is not None}))
        for name, row in rows.items():
            if name in have:
                grad = seen.gradients[name]
                whole = after.whole(after.rows[name], torch.zeros_like(before[name]) if grad is None else grad)
                if copy is not None:
                    parameter = self._parameter(copy, prefix, row)
                    parameter.grad = whole.to(parameter.device, parameter.dtype).clone()
        wanted, trained = None, {name: row.parameter.requires_grad for name, row in rows.items()}
        if copy is not None:
            for optimizer in copy.optimizers:
                optimizer.step()
            wanted = {name: self._parameter(copy, prefix, row).detach() for name, row in rows.items()}
        parts: dict[str, torch.Tensor] = {}

        def allowed(row: Named) -> Any:
            def of(want: torch.Tensor) -> float:
                parts[row.name] = want.cpu()
                moved = rms([want - before[row.name].reshape(-1).to(want)])
                return update_tolerance(after.dtype(row)) * (rms([want]) + 16 * moved)

            return of

        comparison = Comparison(session, after, "parameter", "a parameter after the optimizer's step differs", step)
        comparison.run(wanted, after.value, allowed)
        self.compared += comparison.compared
        found = []
        for one in comparison.findings:
            name = one.parameter or ""
            was, now = (tensor.reshape(-1).cpu() for tensor in (before[name], after.value(after.rows[name])))
            cause = causes.parameter_cause(was, now, parts[name], trained[name], name, seen.evidence)
            found.append(replace(one, cause=cause))
        return merged(session, found, after.rows)


class _Noting:
    """Hooks of one chosen module: notes its calls of a step.

    Attributes:
        calls: those whose backward counts, in order.
        without_grad: calls of which a reentrant checkpoint will do the one that counts in backward.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.without_grad = 0
        self.now: Call | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.now = None
        if not torch.is_grad_enabled():
            self.without_grad += 1
        elif not inside_backward() or self.without_grad:  # otherwise a checkpoint's second run of a noted call
            self.without_grad -= inside_backward()
            buffers = {plain_name(name): _kept(buffer) for name, buffer in module.named_buffers()}
            states = {"cpu": torch.get_rng_state()}
            if torch.accelerator.is_available() and (device := torch.accelerator.current_accelerator()) is not None:
                states[device.type] = torch.get_device_module(device.type).get_rng_state()
            self.now = Call(map_tensors(_kept, (args, kwargs)), buffers, states)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, self.now = self.now, None
        if call is None:
            return
        self.calls.append(call)
        for number, tensor in enumerate(tensors_in(output)):
            call.outputs.append(_kept(tensor))
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, number=number: _arrive(call, number, grad))


def _arrive(call: Call, number: int, grad: torch.Tensor) -> None:
    call.arrived[number] = call.arrived[number] + _kept(grad) if number in call.arrived else _kept(grad)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def _noted(chosen: dict[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """What happens to the chosen modules while the block runs."""
    noting = {name: _Noting() for name in chosen}
    handles = [
        handle
        for name, module in chosen.items()
        for handle in (
            module.register_forward_pre_hook(noting[name].before, with_kwargs=True),
            module.register_forward_hook(noting[name].after, with_kwargs=True),
        )
    ]
    try:
        yield {name: one.calls for name, one in noting.items()}
    finally:
        for handle in handles:
            handle.remove()
