"""Chosen modules against unsharded copies of them, for a model that fits no device.

Each rank records the inputs and outputs of a chosen module in the sharded run, forward and backward. The first rank has
an unsharded copy of that module, runs it on every rank's inputs, and compares outputs, gradients and the parameters
after the step. Memory of the first rank: the chosen modules with gradients and optimizer state, and all ranks' inputs
and outputs of one of them in a step. Not compared: the loss, what lies between chosen modules, initial values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...checkpoint.table import Named
from ...containers import map_tensors, tensors_in
from ...errors import ConfigError
from ...generators import Generators
from ...text import plain_name
from ...torch_private.autograd_task import inside_backward
from . import causes
from .findings import Finding
from .model_parts import ModelParts, buffers_of, modules_of
from .rounding import difference, merged, rms
from .session import Session
from .trial import Trial, TrialPlan, TrialStep, optimizers_in
from .whole_trial import Structure, compare_structures


@dataclass
class ModuleCall:
    """A forward of a chosen module, all tensors on the host.

    Attributes:
        inputs: (args, kwargs) as the module got them.
        buffers: before the call, by name.
        generators: their state before the call.
        outputs: tensors in the module's output.
        output_gradients: of these tensors, by their number.
    """

    inputs: Any
    buffers: dict[str, torch.Tensor]
    generators: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class _CallRecorder:
    """Hooks of one chosen module that record its calls in a step.

    Attributes:
        calls: those whose backward counts, in order.
        without_grad: number of calls that a reentrant checkpoint will repeat in backward, where they count.
        current: the call that is running; None if it does not count.
    """

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.without_grad = 0
        self.current: ModuleCall | None = None

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.current = None
        if not torch.is_grad_enabled():
            self.without_grad += 1
        elif not inside_backward() or self.without_grad:  # otherwise a checkpoint repeats a recorded call
            self.without_grad -= inside_backward()
            buffers = {name: _host_copy(buffer) for name, buffer in buffers_of(module).items()}
            self.current = ModuleCall(map_tensors(_host_copy, (args, kwargs)), buffers, Generators().state_dict())

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, self.current = self.current, None
        if call is None:
            return
        self.calls.append(call)

        def add_gradient(number: int, grad: torch.Tensor) -> None:
            previous = call.output_gradients.get(number)
            call.output_gradients[number] = _host_copy(grad) if previous is None else previous + _host_copy(grad)

        for number, tensor in enumerate(tensors_in(output)):
            call.outputs.append(_host_copy(tensor))
            if tensor.requires_grad:
                tensor.register_hook(partial(add_gradient, number))


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[ModuleCall]]]:
    """The calls of these modules in the block, by name."""
    recorders = {name: _CallRecorder() for name in modules}
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(recorders[name].before_forward, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(recorders[name].after_forward, with_kwargs=True))
        yield {name: recorder.calls for name, recorder in recorders.items()}


def _chosen(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these names, unwrapped."""
    modules = modules_of(model)
    missing = [name for name in names if name not in modules]
    if missing or not names:
        raise ConfigError(
            "modules= must be names of the model's modules.",
            parameter=", ".join(missing) or None,
            expected=f"names of modules, such as {', '.join(name for name in list(modules)[:20] if name)}",
            got=", ".join(names) or "no names",
        )
    return {name: modules[name] for name in names}


class _Copy:
    """An unsharded module without values.

    Attributes:
        parameters: by each of their names in the whole model.
        optimizers: of the parameters.
    """

    def __init__(self, session: Session, plan: TrialPlan, name: str, module: nn.Module) -> None:
        ties = ModelParts(module).ties
        self.module = module.to_empty(device=session.device)
        inside = modules_of(module)
        for names in ties:  # to_empty() has made a tensor for each name
            (first_path, first), *others = (name.rpartition(".")[::2] for name in names)
            for path, other in others:
                setattr(inside[path], other, getattr(inside[first_path], first))
        self.parameters: dict[str, torch.Tensor] = {
            _prefix(name) + inner: row.parameter for row in ModelParts(module).rows.values() for inner in row.names
        }
        self.optimizers = optimizers_in(plan.optimizer_fn(module))

    def parameter_of(self, row: Named) -> torch.Tensor:
        """The copy of one parameter of the sharded model."""
        return next(self.parameters[name] for name in row.names if name in self.parameters)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


class ModuleTrial(Trial):
    """The sharded model and copies of some of its modules. See `verify` with `modules`. Collective."""

    def __init__(self, session: Session, plan: TrialPlan, model: nn.Module, optimizer: Any) -> None:
        assert plan.modules is not None
        names = plan.modules
        self.chosen = session.check(lambda: _chosen(model, names))
        super().__init__(session, plan, model, optimizer, [*map(_prefix, names)], "outputs and gradients")
        self.copies: dict[str, _Copy] = {}  # on the first rank
        self.structure = session.broadcast(session.require("the unsharded modules", self._make_copies))
        assert self.structure is not None
        self.trained = self.structure.trained
        self.notes += (f"compared: {', '.join(names)}; not the loss, nor anything outside of these modules",)

    def _make_copies(self) -> Structure | None:
        """Make the copies, on the first rank, and return their structure."""
        if not self.session.is_first:
            return None
        self.session.seed_with("model")
        with torch.device("meta"):
            model = self.plan.model_fn()
        structure = Structure.of(ModelParts(model), self._prefixes)
        modules = _chosen(model, list(self.chosen))
        self.copies = {name: _Copy(self.session, self.plan, name, module) for name, module in modules.items()}
        return structure

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(map(_prefix, self.chosen))

    def begin(self) -> list[Finding]:
        """Compare names and shapes: the copies have no initial values, and take dtypes as they are. Collective."""
        assert self.structure is not None
        got = Structure.of(ModelParts(self.model), self._prefixes)
        findings = compare_structures(self.session, self.structure, got)
        return [finding for finding in findings if finding.kind == "structure"]

    def step(self, number: int) -> list[Finding]:
        """Train one step of both, and compare module after module. Collective."""
        batches, counts = self.load_batches(number)
        self._fill_copies()
        step = self.train(number, batches, counts, recorded_calls(self.chosen))
        if isinstance(step, list):
            return step
        for name in self.chosen:
            if findings := self._compare_module(step, name):
                return findings
        return []

    @torch.no_grad()
    def _fill_copies(self) -> None:
        """Give the copies the sharded model's values. Collective; one parameter at a time is whole."""
        parts = ModelParts(self.model)
        for name in self.chosen:
            for row in parts.comparable.values():
                if any(inner.startswith(_prefix(name)) for inner in row.names):
                    whole = parts.whole(row, parts.value(row))
                    if name in self.copies:
                        self.copies[name].parameter_of(row).copy_(whole)

    def _compare_module(self, step: TrialStep, name: str) -> list[Finding]:
        """Compare one module's outputs, gradients and updated parameters. Collective."""
        session, copy = self.session, self.copies.get(name)
        # A parameter that is tied to one outside of the module has gradients from there, too.
        rows = [
            row
            for row in step.parts.comparable.values()
            if all(row_name.startswith(_prefix(name)) for row_name in row.names)
        ]
        gathered = session.gather_to_first(step.recorded[name])
        outputs: list[Finding] = []
        if copy is not None:
            copy.module.zero_grad()
            for source in session.sources:
                for call in gathered[source]:
                    outputs += self._replay(step, name, source, copy, call)
        if findings := merged(session, outputs):
            return findings
        unsharded = None if copy is None else {row.name: copy.parameter_of(row) for row in rows}
        if findings := self.compare_gradients(step, unsharded, lambda findings: causes.BACKWARD):
            return findings
        optimizers = [] if copy is None else copy.optimizers
        return self.compare_updates(step, [row.name for row in rows], unsharded, optimizers)

    def _replay(self, step: TrialStep, name: str, source: int, copy: _Copy, call: ModuleCall) -> Iterator[Finding]:
        """Run a copy on one rank's inputs, forward and backward; accumulates gradients. On the first rank."""
        session, module = self.session, copy.module
        with torch.no_grad():
            for inner, buffer in buffers_of(module).items():
                buffer.copy_(call.buffers[inner])
        Generators().load_state_dict(call.generators)
        args, kwargs = map_tensors(lambda t: t.to(session.device), call.inputs)
        parameters = _computed(_prefix(name), module, step.parts)
        outputs = list(tensors_in(torch.func.functional_call(module, parameters, args, kwargs)))
        for number, (expected, got) in enumerate(zip(outputs, call.outputs, strict=True)):
            self.compared += 1
            what = f"output {number} of module {name!r} differs."
            template = Finding("output", what, step.number, name, ranks=(source,), cause=causes.FORWARD)
            finding = difference(template, got, expected.detach(), self.allowed * rms([expected]))
            if finding is not None:
                yield finding
        roots = [(outputs[i], grad.to(session.device)) for i, grad in call.output_gradients.items()]
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g / session.data_world for _, g in roots])


def _computed(prefix: str, module: nn.Module, parts: ModelParts) -> dict[str, torch.Tensor]:
    """A copy's parameters in the dtypes that the sharded model computes with."""
    rows, parameters = {name: row for row in parts.rows.values() for name in row.names}, {}
    for name, parameter in module.named_parameters():
        row = rows.get(prefix + plain_name(name))
        if row is not None and row.bucket is not None and parameter.is_floating_point():
            parameters[name] = parameter.to(row.bucket.compute_dtype)
    return parameters
