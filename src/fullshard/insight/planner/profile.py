"""Profiles one step of an unsharded model, unit by unit, on fake tensors: operations and memory.

A step is divided at these moments:

    enter   a unit's forward begins            back   its backward begins: an output received its gradient
    leave   its forward ended                  done   its backward ended: its input received its gradient

Bytes count whole storages, from their allocation until nothing refers to them. Parameters do not count. Their gradients
count until the unit is done, when a reduction takes them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ...torch_private.fake_tensors import fake_tensors
from ...watcher import unobserved

Step = Callable[[nn.Module, int, int], torch.Tensor]
"""`step(model, micro_batch, sequence)` makes a batch, runs the forward, and returns a loss of one element."""


@dataclass(frozen=True)
class Moment:
    """A moment of a step, and the interval until the next one.

    Attributes:
        kind: "enter", "leave", "back" or "done".
        unit: the module's path; "" for the model itself.
        live: bytes alive at the moment.
        peak: most bytes alive until the next moment.
        flops: floating-point operations until the next moment.
    """

    kind: str
    unit: str
    live: int
    peak: int
    flops: int


@dataclass(frozen=True)
class Profile:
    """A step's moments.

    Attributes:
        moments: in order, from the model's "enter" to its "done".
        logits: bytes of the model's largest output.
    """

    moments: tuple[Moment, ...]
    logits: int

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step, including recomputation."""
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
) -> Profile:
    """Run one step on fake tensors. Leaves the model unchanged.

    Args:
        model: on any device, including meta; only shapes, dtypes and `requires_grad` are read.
        units: paths of the modules that are units.
        step: see `Step`.
        micro_batch, sequence: passed to `step`.
        dtype: in which floating-point parameters are computed with; None: their own.
        casts_inputs: whether floating-point inputs of units are cast to `dtype`.
        checkpointing: whether the units' activations are recomputed in the backward.

    Raises:
        Exception: whatever the model raises.
    """
    modules = {path: model.get_submodule(path) for path in units if path}
    with fake_tensors(), contextlib.ExitStack() as undo:
        fakes = undo.enter_context(_faked(model, dtype))
        tracker = Tracker(fakes)
        recorder = _Recorder(tracker)
        cast = None if dtype is None or not casts_inputs else partial(_cast, dtype)
        for path, module in {**modules, "": model}.items():
            inner = [m for p, m in modules.items() if p != path and (not path or p.startswith(path + "."))]
            inner_parameters = {id(parameter) for m in inner for parameter in m.parameters()}
            parameters = [p for p in module.parameters() if id(p) not in inner_parameters]
            undo.enter_context(recorder.watch(module, path, parameters, checkpointing and bool(path), cast))
        with unobserved(), tracker:  # a watcher that looked at frames would keep their activations alive
            loss = step(model, micro_batch, sequence)
            logits = recorder.logits
            loss.backward()
            del loss
            recorder.finish()
    return Profile(tuple(recorder.moments()), logits)


Cast = Callable[[torch.Tensor], torch.Tensor]


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _faked(model: nn.Module, dtype: torch.dtype | None) -> Iterator[list[torch.Tensor]]:
    """Replace parameters and buffers by fake tensors while the block runs; yields these."""
    fakes: dict[int, torch.Tensor] = {}  # by id of the real tensor
    places: list[tuple[Any, str, torch.Tensor]] = [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    for table, name, tensor in places:
        if id(tensor) not in fakes:
            is_parameter = isinstance(tensor, nn.Parameter)
            fake_dtype = dtype if dtype is not None and is_parameter and tensor.is_floating_point() else tensor.dtype
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=fake_dtype, device="cpu")
            fakes[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        table[name] = fakes[id(tensor)]
    try:
        yield list(fakes.values())
    finally:
        for table, name, tensor in places:
            table[name] = tensor


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as anything refers to them.

    Args:
        uncounted: tensors that exist already and do not count.

    Attributes:
        live, peak: bytes alive now; most since `restart`.
        flops: floating-point operations so far, by torch's formulas (`torch.utils.flop_counter`). FlopCounterMode is
            not used: it keeps tensors alive that checkpointing recomputes.
    """

    def __init__(self, uncounted: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in uncounted}

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
        self._storages[key] = weakref.ref(storage, partial(self._remove, key, nbytes))
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int, nbytes: int, reference: object) -> None:
        del self._storages[key]
        self.live -= nbytes

    def restart(self) -> int:
        """Start a new peak; returns the previous one."""
        peak, self.peak = self.peak, self.live
        return peak


class _Recorder:
    """Records the moments of a step."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._marks: list[tuple[str, str, int, int, int]] = []  # kind, unit, live, peak before, flops so far
        self._parameters: dict[str, list[nn.Parameter]] = {}  # by unit, without those of units inside it
        self._in_backward: set[str] = set()
        self._calls: Counter[str] = Counter()  # forwards whose backward has not ended
        self.logits = 0

    def mark(self, kind: str, unit: str) -> None:
        self._marks.append((kind, unit, self._tracker.live, self._tracker.restart(), self._tracker.flops))

    @contextlib.contextmanager
    def watch(
        self, module: nn.Module, path: str, parameters: list[nn.Parameter], recompute: bool, cast: Cast | None
    ) -> Iterator[None]:
        """Record the moments of one unit while the block runs.

        Args:
            parameters: of the unit, without those of units inside it.
            recompute: whether its activations are recomputed in its backward.
            cast: applied to its inputs first.
        """
        forward, self._parameters[path] = module.forward, parameters

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.mark("enter", path)
            self._calls[path] += 1
            if cast is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            args, kwargs = self._watch_inputs(args, kwargs, path)
            if recompute and torch.is_grad_enabled():
                output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            else:
                output = forward(*args, **kwargs)
            self._watch_outputs(output, path)
            self.mark("leave", path)
            return output

        module.forward = watched
        try:
            yield
        finally:
            del module.forward  # reveals the class's method again

    def _watch_inputs(self, args: Any, kwargs: Mapping[str, Any], path: str) -> tuple[Any, Any]:
        """Replace the first differentiable input by a view; the backward ends when the view gets its gradient."""
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
        if path not in self._in_backward:
            self._in_backward.add(path)
            self.mark("back", path)

    def done(self, path: str) -> None:
        if path in self._in_backward:
            self.mark("done", path)
            self._calls[path] -= 1
            self._in_backward.remove(path)
            for parameter in self._parameters[path] if not self._calls[path] else ():
                parameter.grad = None
            self._tracker.restart()

    def finish(self) -> None:
        """The backward ended: units whose inputs received no gradient are done, the model last."""
        for path in sorted(self._in_backward, reverse=True):
            self.done(path)
        self.mark("end", "")

    def moments(self) -> Iterator[Moment]:
        for (kind, unit, live, _, flops), (_, _, _, peak, total) in pairwise(self._marks):
            yield Moment(kind, unit, live, peak, total - flops)
