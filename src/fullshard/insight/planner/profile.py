"""What one step of a model computes and keeps, without sharding: run once on fake tensors, unit by unit.

A step is cut at its moments, in the order in which they happen:

    enter   a unit's forward begins            back   its backward begins: an output got its gradient
    leave   its forward ended                  done   its backward ended: its input got its gradient

Bytes count whole storages, from the operation that allocates to the moment when nothing refers to them. Parameters are
not among them; their gradients are, until the unit is done, which is when a reduction takes them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ...torch_private.fake_tensors import fake_tensors

Step = Callable[[nn.Module, int, int], torch.Tensor]
"""`step(model, micro_batch, sequence)` makes a batch, runs the forward, and returns a loss of one element."""


@dataclass(frozen=True)
class Moment:
    """A moment, and the stretch of the step that follows it.

    Attributes:
        what: "enter", "leave", "back" or "done".
        unit: the module's path; "" for the model itself.
        held: bytes alive at the moment.
        peak: most bytes alive until the next moment.
        flops: floating-point operations until the next moment.
    """

    what: str
    unit: str
    held: int
    peak: int
    flops: int


@dataclass(frozen=True)
class Profile:
    """A step's moments.

    Attributes:
        moments: in order, from the model's "enter" to its "done".
        tokens: micro-batch times sequence.
        logits: bytes of the model's largest output.
    """

    moments: tuple[Moment, ...]
    tokens: int
    logits: int

    @property
    def flops(self) -> int:
        """Of the whole step, recomputation included."""
        return sum(moment.flops for moment in self.moments)


def profile(
    model: nn.Module,
    units: Sequence[str],
    step: Step,
    micro_batch: int,
    sequence: int,
    *,
    dtype: torch.dtype | None = None,
    casts_inputs: bool = True,
    checkpointing: bool = False,
    device: str = "cpu",
) -> Profile:
    """Run one step on fake tensors. The model is left as it was.

    Args:
        model: on any device, meta included; nothing of it is read but shapes, dtypes and `requires_grad`.
        units: paths of the modules that are units.
        step: see `Step`.
        micro_batch, sequence: passed to `step`.
        dtype: of floating-point parameters while they are computed with; None: their own.
        casts_inputs: whether floating-point inputs of units are cast to `dtype`.
        checkpointing: whether the units' activations are recomputed in the backward.
        device: on which the fake tensors are.

    Raises:
        Exception: whatever the model raises.
    """
    modules = {path: model.get_submodule(path) for path in units if path}
    with fake_tensors(), contextlib.ExitStack() as undo:
        fakes = undo.enter_context(_faked(model, dtype, device))
        tracker = Tracker(fakes)
        recorder = _Recorder(tracker)
        cast = None if dtype is None or not casts_inputs else partial(_cast, dtype)
        for path, module in {**modules, "": model}.items():
            inner = [m for p, m in modules.items() if p != path and (not path or p.startswith(path + "."))]
            below = {id(parameter) for m in inner for parameter in m.parameters()}
            own = [p for p in module.parameters() if id(p) not in below]
            undo.enter_context(recorder.watch(module, path, own, checkpointing and bool(path), cast))
        with tracker:
            loss = step(model, micro_batch, sequence)
            logits = recorder.logits
            loss.backward()
            del loss
            recorder.finish()
    return Profile(tuple(recorder.moments()), micro_batch * sequence, logits)


Cast = Callable[[torch.Tensor], torch.Tensor]


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _faked(model: nn.Module, dtype: torch.dtype | None, device: str) -> Iterator[list[torch.Tensor]]:
    """Put fake tensors in the places of parameters and buffers, for a while; yields them."""
    fakes: dict[int, torch.Tensor] = {}
    places: list[tuple[Any, str, Any]] = []

    def fake(tensor: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
        made = fakes.get(id(tensor))
        if made is None:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = made
        return made

    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    casts = dtype is not None and tensor.is_floating_point() and table is module._parameters
                    places.append((table, name, tensor))
                    table[name] = fake(tensor, dtype if casts else tensor.dtype)
    try:
        yield list(fakes.values())
    finally:
        for table, name, tensor in places:
            table[name] = tensor


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, while anything refers to them.

    Args:
        others: tensors that exist already and do not count.

    Attributes:
        live, peak: bytes alive now; most since `restart`.
        flops: floating-point operations so far, by torch's formulas (`torch.utils.flop_counter`). Its own mode is not
            used: it keeps what a checkpoint recomputes alive.
    """

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = storage.nbytes()
        self._storages[key] = weakref.ref(storage, partial(self._gone, key, nbytes))
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, nbytes: int, reference: object) -> None:
        del self._storages[key]
        self.live -= nbytes

    def restart(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.live
        return peak


class _Recorder:
    """Notes the moments of a step."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._marks: list[tuple[str, str, int, int, int]] = []  # what, unit, held, peak before, flops so far
        self._open: dict[str, list[nn.Parameter]] = {}  # units whose backward runs, and their own parameters
        self._own: dict[str, list[nn.Parameter]] = {}
        self._calls: Counter[str] = Counter()  # forwards whose backward is not over
        self.logits = 0

    def mark(self, what: str, unit: str) -> None:
        self._marks.append((what, unit, self._tracker.live, self._tracker.restart(), self._tracker.flops))

    @contextlib.contextmanager
    def watch(
        self, module: nn.Module, path: str, own: list[nn.Parameter], recompute: bool, cast: Cast | None
    ) -> Iterator[None]:
        """Note the moments of one unit, which is recomputed in its backward if `recompute`; `cast` its inputs first."""
        forward, self._own[path] = module.forward, own
        running: list[bool] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            if running:  # recomputed: the moments of this unit are noted already
                return forward(*args, **kwargs)
            self.mark("enter", path)
            self._calls[path] += 1
            if cast is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            args, kwargs = self._watch_inputs(args, kwargs, path)
            if recompute and torch.is_grad_enabled():
                again: list[bool] = []

                def recomputed(*args: Any, **kwargs: Any) -> Any:
                    running.extend(again)
                    again.append(True)
                    try:
                        return forward(*args, **kwargs)
                    finally:
                        running.clear()

                output = checkpoint(recomputed, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            else:
                output = forward(*args, **kwargs)
            self._watch_outputs(output, path)
            self.mark("leave", path)
            return output

        module.forward = watched
        try:
            yield
        finally:
            del module.forward  # the class's own shows again

    def _watch_inputs(self, args: Any, kwargs: Mapping[str, Any], path: str) -> tuple[Any, Any]:
        """Put a view of its own in the place of the first differentiable input; its gradient ends the backward."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                leaves[index] = leaf.view_as(leaf)
                leaves[index].register_hook(lambda gradient: self.done(path))
                break
        watched: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
        return watched

    def _watch_outputs(self, output: Any, path: str) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not path:
            self.logits = max([0, *[tensor.untyped_storage().nbytes() for tensor in tensors]])
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self.back(path))

    def back(self, path: str) -> None:
        if path not in self._open:
            self._open[path] = self._own[path]
            self.mark("back", path)

    def done(self, path: str) -> None:
        if path in self._open:
            self.mark("done", path)
            self._calls[path] -= 1
            parameters = self._open.pop(path)
            for parameter in parameters if not self._calls[path] else ():
                parameter.grad = None
            self._tracker.restart()

    def finish(self) -> None:
        """The backward is over: units whose inputs got no gradient are done, the model last."""
        for path in sorted(self._open, reverse=True):
            self.done(path)
        self.mark("end", "")

    def moments(self) -> Iterator[Moment]:
        for (what, unit, held, _, flops), (_, _, _, peak, total) in zip(self._marks, self._marks[1:], strict=False):
            yield Moment(what, unit, held, peak, total - flops)
