"""Chosen modules against unsharded copies of them, where the whole model fits no device.

Each rank notes what goes into and comes out of a chosen module in the sharded run, forward and backward. The first rank
holds an unsharded copy of that module, runs it on what every rank put in, and compares outputs, gradients and the
parameters after the step. Memory of the first rank: the chosen modules with gradients and optimizer state, and what one
of them was given by all ranks in a step. Not compared: the loss, what lies between chosen modules, initial values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...checkpoint.names import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from ...names import plain_name
from ...torch_private.autograd_task import inside_backward
from . import causes
from .compare import difference, index_of, merged, rms
from .model_parts import ModelParts, buffers_of, modules_of
from .report import Finding, Report
from .session import Session, generator_states, restore_generators
from .trial import Plan, Step, Trial, listed, sharded


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
            buffers = {name: _kept(buffer) for name, buffer in buffers_of(module).items()}
            self.now = Call(map_tensors(_kept, (args, kwargs)), buffers, generator_states())

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
def calls_of(chosen: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """The calls of the chosen modules while the block runs, by name."""
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


def run_parts(session: Session, plan: Plan, names: Sequence[str], tolerance: float | None) -> Report:
    """See `verify` with `modules`. Collective."""
    if plan.max_norm is not None:
        raise ConfigError("verify: max_norm needs the gradients of the whole model, which modules= leaves out")
    made = sharded(session, plan)
    if isinstance(made, list):
        return Report(tuple(made), session.world, 0, 0)
    chosen = session.required("modules", lambda: _chosen(made[0], names))
    copies = session.required("the unsharded modules", lambda: _copies(session, plan, names))
    return _Parts(session, plan, made, chosen, copies, tolerance).report([])


def _chosen(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names, inside of what wraps them."""
    known = modules_of(model)
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise ConfigError(
            "modules= names what the model does not have.",
            parameter=", ".join(missing) or None,
            expected=f"names of modules, such as {', '.join(name for name in list(known)[:20] if name)}",
            got=", ".join(names) or "no names",
        )
    return {name: known[name] for name in names}


class _Copy:
    """An unsharded module without values.

    Attributes:
        parameters: by every name that they have in the whole model.
        optimizers: of them.
    """

    def __init__(self, session: Session, plan: Plan, name: str, module: nn.Module) -> None:
        ties = ModelParts(module).ties
        self.module = module.to_empty(device=session.device)
        inside = modules_of(module)
        for names in ties:
            (first, key), *others = (name.rpartition(".")[::2] for name in names)
            for path, other in others:
                setattr(inside[path], other, getattr(inside[first], key))
        self.parameters: dict[str, torch.Tensor] = {
            _prefix(name) + own: row.parameter for row in ModelParts(module).rows.values() for own in row.names
        }
        self.optimizers = listed(plan.optimizer_fn(module))

    def of(self, row: Named) -> torch.Tensor:
        """The parameter that stands for one of the sharded model."""
        return next(self.parameters[name] for name in row.names if name in self.parameters)


def _copies(session: Session, plan: Plan, names: Sequence[str]) -> dict[str, _Copy]:
    """On the first rank, copies of the chosen modules; nothing on the others."""
    if not session.first:
        return {}
    session.seed_with("model")
    with torch.device("meta"):
        whole = plan.model_fn()
    return {name: _Copy(session, plan, name, module) for name, module in _chosen(whole, names).items()}


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


class _Parts(Trial):
    """The sharded model and copies of some of its modules, which the first rank has."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        made: tuple[nn.Module, Any],
        chosen: dict[str, nn.Module],
        copies: dict[str, _Copy],
        given: float | None,
    ) -> None:
        super().__init__(session, plan, made, given, [*map(_prefix, chosen)], "outputs and gradients")
        self.chosen, self.copies = chosen, copies
        parameters = {name: p for copy in copies.values() for name, p in copy.parameters.items()}
        self.trained = session.told(frozenset(name for name, p in parameters.items() if p.requires_grad))
        self.notes += (f"compared: {', '.join(chosen)}; not the loss, nor anything outside of these modules",)

    def step(self, number: int) -> list[Finding]:
        """One step. Collective."""
        batches, counts = self.batches(number)
        self._fill()
        step = self.take(number, batches, counts, calls_of(self.chosen))
        if isinstance(step, list):
            return step
        for name in self.chosen:
            if found := self._one(step, name):
                return found
        return []

    @torch.no_grad()
    def _fill(self) -> None:
        """Give the copies the values that the sharded model has. Collective; one parameter at a time is whole."""
        parts = ModelParts(self.model)
        for name in self.chosen:
            for row in parts.rows.values():
                if parts.comparable(row) and any(own.startswith(_prefix(name)) for own in row.names):
                    whole = parts.whole(row, parts.value(row))
                    if name in self.copies:
                        self.copies[name].of(row).copy_(whole)

    def _one(self, step: Step, name: str) -> list[Finding]:
        """One module's outputs, gradients and step. Collective."""
        session, copy = self.session, self.copies.get(name)
        # A parameter that is tied to one outside of the module has gradients from there, too.
        rows = [
            row
            for own, row in step.parts.rows.items()
            if own in step.before and all(each.startswith(_prefix(name)) for each in row.names)
        ]
        gathered = session.to_first(step.noted[name])
        outputs: list[Finding] = []
        if copy is not None and gathered is not None:
            copy.module.zero_grad()
            for source in session.sources:
                for call in gathered[source]:
                    outputs += self._replayed(step, name, source, copy, call)
        if found := merged(session, outputs):
            return found
        unsharded = None if copy is None else {row.name: copy.of(row) for row in rows}
        gradients = None if unsharded is None else {own: p.grad for own, p in unsharded.items()}
        if found := self.gradients(step, gradients, lambda findings: causes.BACKWARD):
            return found
        optimizers = [] if copy is None else copy.optimizers
        return self.updates(step, [row.name for row in rows], unsharded, optimizers)[0]

    def _replayed(self, step: Step, name: str, source: int, copy: _Copy, call: Call) -> Iterator[Finding]:
        """Run a copy on what one rank's module was given; adds to its gradients. On the first rank."""
        session, module = self.session, copy.module
        with torch.no_grad():
            for own, buffer in buffers_of(module).items():
                buffer.copy_(call.buffers[own])
        restore_generators(call.states)
        args, kwargs = map_tensors(lambda t: t.to(session.device), call.inputs)
        computed = _computed(_prefix(name), module, step.parts)
        outputs = list(tensors_in(torch.func.functional_call(module, computed, args, kwargs)))
        for number, (want, got) in enumerate(zip(outputs, call.outputs, strict=True)):
            self.compared += 1
            gap = difference(got, want.detach(), self.allowed * rms([want]))
            if gap is not None:
                what = f"output {number} of module {name!r} differs ({gap})."
                at = (index_of(gap.at, want.shape), source, (source,), gap.expected, gap.got, causes.FORWARD)
                yield Finding("output", what, step.number, name, *at)
        roots = [(outputs[i], grad.to(session.device)) for i, grad in call.arrived.items()]
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g / session.data_world for _, g in roots])


def _computed(prefix: str, module: nn.Module, parts: ModelParts) -> dict[str, torch.Tensor]:
    """A copy's parameters in the dtypes that the sharded model computes with."""
    rows, found = {name: row for row in parts.rows.values() for name in row.names}, {}
    for own, parameter in module.named_parameters():
        row = rows.get(prefix + plain_name(own))
        if row is not None and row.bucket is not None and parameter.is_floating_point():
            found[own] = parameter.to(row.bucket.compute_dtype)
    return found
