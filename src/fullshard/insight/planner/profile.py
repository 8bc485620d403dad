"""Profiles one step of an unsharded model, unit by unit, on fake tensors: operations and memory.

A step is divided at these moments:

    enter   a unit's forward begins            back   its backward begins: an output received its gradient
    leave   its forward ended                  done   its backward ended: its input received its gradient

Bytes count whole storages, from their allocation until nothing refers to them. Parameters do not count. Their gradients
count until the unit is done, when a reduction takes them.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from ...forms import Place, as_gathered, is_extension, with_parts
from ...policies import MixedPrecisionPolicy
from ...shard import policy_of
from ...torch_private.autograd_task import inside_backward
from ...torch_private.fake_tensors import Remembered, fake_tensors, forget_value
from ...torch_private.local_tensor import inside, plain_tensors
from ...torch_private.mesh_without_group import mesh_without_group
from .messages import took_too_long

Step = Callable[[nn.Module, int, int], torch.Tensor]
"""`step(model, micro_batch, sequence)` makes a batch, runs the forward, and returns a loss of one element."""


@dataclass(frozen=True)
class Live:
    """Bytes alive.

    Attributes:
        activations: all but `logits`.
        logits: of the model's outputs, and of what is computed after the last unit's forward and before the first's
            backward.
    """

    activations: int = 0
    logits: int = 0


@dataclass(frozen=True)
class Moment:
    """A moment of a step, and the interval until the next one.

    Attributes:
        kind: "enter", "leave", "back" or "done".
        unit: the module's path; "" for the model itself.
        live: alive at the moment.
        peak: alive at the worst moment until the next one.
        flops: floating-point operations until the next moment.
        sent, collectives: bytes that a rank sends to others of its tensor-parallel group, and how often.
    """

    kind: str
    unit: str
    live: Live
    peak: Live
    flops: int
    sent: int
    collectives: int


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
    units: Mapping[str, MixedPrecisionPolicy],
    step: Step,
    micro_batch: int,
    sequence: int,
    *,
    checkpointing: bool = False,
    tensor_parallel: int = 1,
    until: float | None = None,
    most: int | None = None,
) -> Profile:
    """Run one step on fake tensors. Leaves the model unchanged.

    Args:
        model: on any device, including meta; only shapes, dtypes and `requires_grad` are read. Parameters may be
            DTensors, on a mesh without groups.
        units: by path of the modules that are units, dtypes at their boundaries; the root ("") is one.
        step: see `Step`.
        micro_batch, sequence: passed to `step`.
        checkpointing: whether the activations of units other than the root are recomputed in the backward.
        tensor_parallel: ranks of that mesh.
        until: give up at this time of `time.monotonic`; None: never.
        most: give up when more bytes than these are alive; None: never.

    Raises:
        ConfigError: it took longer.
        TooMuch: more bytes than `most` are alive.
        Exception: whatever the model raises.
    """
    modules = {path: model.get_submodule(path) for path in units}
    parameters: dict[str, list[nn.Parameter]] = {}  # by unit, without those of units inside it
    dtypes: dict[int, torch.dtype] = {}  # by id of the parameter
    reduced: dict[int, torch.dtype | None] = {}  # the dtype of its reduced gradient, by id
    policies: dict[int, MixedPrecisionPolicy] = {}
    for path, module in modules.items():
        inner = [m for p, m in modules.items() if p and p != path and (not path or p.startswith(path + "."))]
        inner_parameters = {id(parameter) for m in inner for parameter in m.parameters()}
        named = [(name, p) for name, p in module.named_parameters() if id(p) not in inner_parameters]
        parameters[path] = [parameter for _, parameter in named]
        for name, parameter in named:
            policy = policy_of(name, parameter, units[path])
            dtype, reduced[id(parameter)] = policy.param_dtype, policy.reduce_dtype
            policies[id(parameter)] = units[path]
            dtypes[id(parameter)] = dtype if dtype and parameter.is_floating_point() else parameter.dtype
    alone = mesh_without_group((1,))  # made of values: not on fake tensors
    with fake_tensors() as mode, _faked(model, dtypes, policies, alone) as fakes:
        run = Remembered(mode)
        own = {path: [(fakes[id(p)], reduced[id(p)]) for p in of_unit] for path, of_unit in parameters.items()}
        for _ in range(1 if tensor_parallel == 1 else 2):  # DTensor runs each new operation on whole tensors first
            parts = [part for fake in fakes.values() for part in plain_tensors(fake)]
            tracker = Tracker(parts, tensor_parallel, until, most, run)
            recorder = _Recorder(tracker, own)
            with contextlib.ExitStack() as undo:
                for path, module in modules.items():
                    undo.enter_context(recorder.watch(module, path, checkpointing and bool(path), units[path]))
                undo.enter_context(_whole_sequences(model))
                undo.enter_context(torch.inference_mode(False))
                undo.enter_context(torch.enable_grad())
                with tracker:
                    loss = step(model, micro_batch, sequence)
                    logits = recorder.logits
                    loss.backward()
                    del loss
                    moments = recorder.finish()
    return Profile(moments, logits)


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    """The floating-point tensors among `values` in `dtype`; None: as they are."""
    if dtype is None:
        return values
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


@contextlib.contextmanager
def _faked(
    model: nn.Module,
    dtypes: Mapping[int, torch.dtype],
    policies: Mapping[int, MixedPrecisionPolicy],
    alone: DeviceMesh,
) -> Iterator[dict[int, torch.Tensor]]:
    """Replace parameters and buffers by fake tensors while the block runs; yields these, by id of the real ones.

    Args:
        dtypes, policies: of parameters, by id.
        alone: a mesh of one rank.
    """
    fakes: dict[int, torch.Tensor] = {}
    places: list[tuple[nn.Module, Callable[[Any], object], torch.Tensor]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            places += [(module, Place(module, name).show, parameter)] if parameter is not None else []
        for name, buffer in module._buffers.items():
            places += [(module, partial(module._buffers.__setitem__, name), buffer)] if buffer is not None else []
    for module, show, tensor in places:
        if id(tensor) not in fakes:
            dtype = dtypes.get(id(tensor), tensor.dtype)
            fake: Any
            if is_extension(tensor):
                whole = with_parts(tensor, _empty)
                fake = as_gathered(whole, alone, module, policies.get(id(tensor)), dtype)
            else:
                fake = _empty(inside(tensor), dtype)
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                shape, stride = tensor.shape, tensor.stride()
                fake = DTensor.from_local(fake, mesh, placements, run_check=False, shape=shape, stride=stride)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        show(fakes[id(tensor)])
    try:
        yield fakes
    finally:
        for _, show, tensor in places:
            show(tensor)


@contextlib.contextmanager
def _whole_sequences(model: nn.Module) -> Iterator[None]:
    """Models of Transformers take each row of a batch for one sequence, unless they are called with position ids.

    They look for the limits of packed sequences in the values of position ids that they make themselves, which they
    cannot read from fake tensors; they then build masks of all scores, and repeat the keys of grouped heads. The
    function that looks is private: without it they do so here. Test: test_a_model_of_transformers_is_planned_unpacked.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    are_passed: list[bool] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        are_passed[:] = [kwargs.get("position_ids") is not None]

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    masks.find_packed_sequence_indices = lambda ids: look(ids) if are_passed == [True] else None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = look
        hook.remove()


def sent_around(nbytes: int, ranks: int, rounds: int = 1) -> int:
    """The bytes that a rank sends while a buffer goes around a ring: once in a gather or a reduction, twice in an
    all-reduce (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005, section 4)."""
    return rounds * nbytes * (ranks - 1) // ranks


SENT: dict[str, Callable[[int, int], int]] = {
    "all_reduce": partial(sent_around, rounds=2),
    "all_gather_into_tensor": lambda nbytes, ranks: sent_around(nbytes * ranks, ranks),
    "reduce_scatter_tensor": sent_around,
    "all_to_all_single": sent_around,
    "broadcast": lambda nbytes, ranks: nbytes,
}
"""The bytes that a rank sends in a functional collective, from those of its input and the number of ranks."""


HOST = torch.device("cpu", 1)
"""The device of fake tensors in host memory. Ranks that do not exist compute on the device "cpu".

No other device type would do: torch copies between "cpu" and it, and runs optimizers on both, without an accelerator.
"""


DEVICE = torch.ops.prim.device.default
"""torch asks fake tensors for their device three times as often as it calls operations."""


class TooMuch(BaseException):
    """More bytes are alive than fit. Not an `Exception`, which a model may catch."""


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate on the device, as long as anything refers to them.

    Collectives that a model calls itself are run on shapes alone, and reach no other rank.

    Args:
        uncounted: tensors that exist already and do not count.
        ranks: of the group over which functional collectives run.
        until: raise an error in operations after this time of `time.monotonic`; None: never.
        most: raise an error in operations when more bytes are alive; None: never.
        run: runs an operation.

    Attributes:
        live, logits: bytes alive now; of these, those that count as logits.
        peak, peak_logits: the same, at the worst moment since `restart`.
        in_loss: whether what is allocated counts as logits.
        flops: floating-point operations since then, by torch's formulas (`torch.utils.flop_counter`). FlopCounterMode
            is not used: it keeps tensors alive that checkpointing recomputes.
        sent, collectives: bytes that a rank sends in functional collectives since then, and their number.
    """

    def __init__(
        self,
        uncounted: Sequence[torch.Tensor],
        ranks: int = 1,
        until: float | None = None,
        most: int | None = None,
        run: Callable[..., Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()
        self.live = self.logits = self.peak = self.peak_logits = self.flops = self.sent = self.collectives = 0
        self.in_loss = False
        self._ranks, self._until, self._most, self._run = ranks, until, most, run
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in uncounted}
        self._logits: dict[int, int] = {}  # bytes, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensors and the like call operations on their parts, which come here
        if func is DEVICE:
            return args[0].device
        if self._until is not None and time.monotonic() > self._until:
            raise took_too_long()
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # the model's own: of known values it would be issued, by one rank alone
            for leaf in pytree.tree_leaves((args, kwargs)):
                forget_value(leaf)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            result = _grouped_product(*args, **kwargs)
        else:
            result = self._run(func, args, kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        if func.namespace == "_c10d_functional":
            share = SENT.get(func.overloadpacket.__name__)
            if share is not None:
                self.sent += share(args[0].nbytes, self._ranks)
                self.collectives += 1
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device != HOST:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = storage.nbytes()
        self._storages[key] = weakref.ref(storage, partial(self._remove, key, nbytes))
        self.live += nbytes
        if self._most is not None and self.live > self._most:
            raise TooMuch
        if self.in_loss:
            self.count_as_logits(storage)
        if self.live > self.peak:
            self.peak, self.peak_logits = self.live, self.logits

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that exists already, until it is freed."""
        self._add(tensor.untyped_storage())

    def _remove(self, key: int, nbytes: int, reference: object) -> None:
        del self._storages[key]
        self.live -= nbytes
        self.logits -= self._logits.pop(key, 0)

    def count_as_logits(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, if it counts, as logits."""
        key = storage._cdata
        if isinstance(self._storages.get(key), weakref.ref) and key not in self._logits:
            self._logits[key] = storage.nbytes()
            self.logits += storage.nbytes()

    def count_as_activations(self) -> None:
        """Count no storage as logits."""
        self._logits.clear()
        self.logits = 0

    def restart(self) -> tuple[Live, int, int, int]:
        """Start a new interval; returns the worst moment of the last one, and its `flops`, `sent` and `collectives`."""
        interval = Live(self.peak - self.peak_logits, self.peak_logits), self.flops, self.sent, self.collectives
        self.peak, self.peak_logits = self.live, self.logits
        self.flops = self.sent = self.collectives = 0
        return interval


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The output of `torch.nn.functional.grouped_mm`. torch runs it in any dtype, but on fake tensors in bfloat16."""
    if first.dim() == second.dim():
        groups = first.size(0) if offs is None else offs.size(0)
        shape: tuple[int, ...] = groups, first.size(-2), second.size(-1)
    else:
        shape = first.size(-2), second.size(-1)
    return torch.empty(shape, dtype=out_dtype or first.dtype, device=first.device)


class _Recorder:
    """Records the moments of a step.

    Args:
        tracker: counts bytes.
        parameters: by unit, without those of units inside it; each with the dtype in which its gradient is reduced,
            None: its own.
    """

    def __init__(
        self, tracker: Tracker, parameters: Mapping[str, Sequence[tuple[torch.Tensor, torch.dtype | None]]]
    ) -> None:
        self._tracker, self._parameters = tracker, parameters
        self._moments: list[Moment] = []
        self._begun: tuple[str, str, Live] | None = None  # the moment whose interval goes on
        self._in_backward: set[str] = set()
        self._calls: Counter[str] = Counter()  # forwards whose backward has not ended
        self.logits = 0

    def mark(self, kind: str, unit: str) -> None:
        """Note a moment; ends the interval of the previous one."""
        tracker = self._tracker
        peak, flops, sent, collectives = tracker.restart()
        if self._begun is not None:
            self._moments.append(Moment(*self._begun, peak, flops, sent, collectives))
        self._begun = kind, unit, Live(tracker.live - tracker.logits, tracker.logits)

    @contextlib.contextmanager
    def watch(self, module: nn.Module, path: str, recompute: bool, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Record the moments of one unit while the block runs.

        Args:
            recompute: whether its activations are recomputed in its backward.
            policy: dtypes of its inputs and outputs.
        """
        forward, own, tracker = module.forward, module.__dict__.get("forward"), self._tracker

        def watched(*args: Any, **kwargs: Any) -> Any:
            again = inside_backward()  # recomputed by the model's own checkpoint around the unit
            if again:
                self.back(path)
            else:
                if path:  # nothing before it was the loss
                    tracker.count_as_activations()
                    tracker.in_loss = False
                self.mark("enter", path)
                self._calls[path] += 1
            args, kwargs = _cast(policy.param_dtype if policy.cast_forward_inputs else None, (args, kwargs))
            args, kwargs = self._watch_inputs(args, kwargs, path)
            if recompute and torch.is_grad_enabled():
                output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            else:
                output = forward(*args, **kwargs)
            output = _cast(policy.output_dtype, output)
            self._watch_outputs(output, path)
            if not again:
                tracker.in_loss = True
                self.mark("leave", path)
            return output

        module.forward = watched
        try:
            yield
        finally:
            del module.forward  # reveals the class's method again
            if own is not None:
                module.forward = own

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
            storages = [inside(tensor).untyped_storage() for tensor in tensors]
            self.logits = max([0, *[storage.nbytes() for storage in storages]])
            for storage in storages:
                self._tracker.count_as_logits(storage)
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self.back(path))

    def back(self, path: str) -> None:
        if path not in self._in_backward:
            self._in_backward.add(path)
            if path or len(self._parameters) == 1:
                self._tracker.in_loss = False
            self.mark("back", path)

    def done(self, path: str) -> None:
        if path in self._in_backward:
            if self._calls[path] == 1:
                self._sum_gradients(path)
            self.mark("done", path)
            self._calls[path] -= 1
            self._in_backward.remove(path)
            for parameter, _ in self._parameters[path] if not self._calls[path] else ():
                parameter.grad = None
            self._tracker.restart()

    def _sum_gradients(self, path: str) -> None:
        """Sum partial gradients over tensor-parallel ranks, as the engine does when it collects them."""
        for parameter, dtype in self._parameters[path]:
            gradient: Any = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                if gradient.placements != parameter.placements:
                    cast: Any = gradient.to(dtype or gradient.dtype)
                    cast.redistribute(parameter.device_mesh, parameter.placements)

    def finish(self) -> tuple[Moment, ...]:
        """All moments. The backward ended: units whose inputs received no gradient are done, the model last."""
        for path in sorted(self._in_backward, reverse=True):
            self.done(path)
        self.mark("end", "")
        leaves = [index for index, moment in enumerate(self._moments) if moment.kind == "leave" and moment.unit]
        for index in range(leaves[-1] if leaves else 0):  # a unit follows: it was not the loss yet
            moment = self._moments[index]
            live, peak = (Live(alive.activations + alive.logits) for alive in (moment.live, moment.peak))
            self._moments[index] = replace(moment, live=live, peak=peak)
        return tuple(self._moments)
