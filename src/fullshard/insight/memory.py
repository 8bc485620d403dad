"""The memory that this rank uses now, and that one process would use without sharding."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..containers import leaves_in
from ..errors import ConfigError, check_module
from ..forms import Member, owner_of
from ..optim import OwnerOptimizer
from ..optim.guard import stepping
from ..optimizers import as_list, parameters_of
from ..runtime import (
    Account,
    Root,
    account,
    all_roots,
    bytes_asked,
    changes_in_words,
    explained,
    is_out_of_memory,
    memory_in_words,
    runners_in,
)
from ..shard import Bucket, members_of, units_of
from ..text import size
from ..torch_private.local_tensor import inside, plain_tensors
from .planner.live import plan_changes
from .planner.messages import in_few_words, took_too_long
from .planner.optimizer_costs import Optimizers, has_owners
from .planner.profile import Step
from .planner.strategy import check_counts


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on this rank, without activations.

    Attributes:
        parameters: shards, and parameters that no unit shards.
        gradients: reduced gradients, and what error feedback keeps of others.
        optimizer: optimizer state.
        gathered: gathered units, and their staging buffers.
        reducing: reduction buffers.
        peak_transient: the peak of `gathered` and `reducing` together since the root was created.
        single_process: parameters, gradients and optimizer state of one process without sharding. Of an optimizer with
            owners an estimate: state that other ranks own is as large per element as this rank's.
        host: the part of parameters, gradients and optimizer state in host memory (offloaded, parked, or on a CPU).
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reducing: int
    peak_transient: int
    single_process: int
    host: int

    @property
    def total(self) -> int:
        """All bytes on this rank now."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.reducing

    def __str__(self) -> str:
        """A table, with the memory of one process without sharding."""
        rows = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
            ("gathered units", self.gathered),
            ("gradients in reduction", self.reducing),
            ("total on this rank", self.total),
            ("peak of gathered and in reduction", self.peak_transient),
            ("one process without sharding", self.single_process),
        ]
        return "\n".join(f"{name:<34}{size(nbytes):>10}" for name, nbytes in rows)


def memory_use(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> MemoryUse:
    """The memory of `model` and its optimizer on this rank now, from the sizes of storages.

    Args:
        model: a model with or without units, or a part of one.
        optimizer: the optimizer, or several, whose state of this model's parameters is counted; None: none.

    Raises:
        ConfigError: `model` is not a module, or `optimizer` is not an optimizer.
    """
    optimizers = [] if optimizer is None else as_list(optimizer)
    _check_arguments("memory_use", model, optimizers)
    units = units_of(model)
    shards = [tensor for unit in units for bucket in unit.buckets for tensor in bucket.shard_tensors]
    plain = [p for p in model.parameters() if owner_of(p) is None]
    plain_gradients = [p.grad for p in plain if p.grad is not None]
    every = [gradients for unit in units for gradients in unit.gradients]
    reduced = [g.delivery.set.flat for g in every if g.delivery.set is not None]
    reduced += [residual for g in every for residual in g.residuals.values()]
    states = [(each, _states_of(model, each)) for each in optimizers]
    members = [(m, _whole_bytes(b, m)) for b, _, m in members_of(model)]
    whole = sum(nbytes for _, nbytes in members)
    trainable = sum(nbytes for m, nbytes in members if m.sharded.requires_grad)
    trainable += _nbytes(p for p in plain if p.requires_grad)
    ratio = whole / max(_nbytes(shards), 1)
    numels = {id(m.sharded): (inside(m.local).numel(), m.slot.numel) for m, _ in members}
    numels |= {id(p): (p.numel(), p.numel()) for p in plain}
    unsharded_state = sum(_unsharded(each, state, numels, ratio) for each, state in states)
    ledgers = {id(unit.ledger): unit.ledger for unit in units}.values()
    state_tensors = [value for _, state in states for _, value in state]
    return MemoryUse(
        parameters=_nbytes([*shards, *plain]),
        gradients=sum(g.held_bytes + g.residual_bytes for g in every) + _nbytes(plain_gradients),
        optimizer=_nbytes(state_tensors),
        gathered=sum(ledger.gathered for ledger in ledgers),
        reducing=sum(ledger.reducing for ledger in ledgers),
        peak_transient=sum(ledger.peak for ledger in ledgers),
        single_process=whole + _nbytes(plain) + trainable + round(unsharded_state),
        host=_host_bytes([*shards, *reduced, *plain, *plain_gradients, *state_tensors]),
    )


def explain_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    build: nn.Module | Callable[[], nn.Module] | None = None,
    step: Step | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    sequence: int = 1,
) -> str:
    """Describe in one paragraph what uses this rank's memory now, and how much each possible change would free.

    Call it where an allocation failed, and the paragraph also says what was asked:

        except torch.OutOfMemoryError:
            print(fullshard.explain_memory(model, optimizer))
            raise

    Activations are all bytes of the accelerator's allocator that nothing else accounts for; unknown on a CPU.

    The effect of each change is planned (see `fullshard.plan`) for the model as it is sharded, at the peak of a step: a
    forward with inputs of the shapes, dtypes and keywords of the last one that built a graph, and the backward of the
    losses that it returns, or else of all outputs. A change of `torch.autocast` or `requires_grad` alone is not
    noticed. Inputs of users' classes other than dataclasses cannot be repeated: pass `step`. Hooks on modules other
    than torch's own are left out, and compiled modules run uncompiled.

    One rank may call it alone. Nothing is communicated (the model's own collectives run on shapes, unless their process
    group is written in Python), nothing is allocated on the device, and Python's, NumPy's and torch's generators are
    restored. It takes as long as the model's Python code for some steps. If a step cannot be planned, the paragraph
    says why, and estimates the changes from the memory in use now: gathered units by the engine's account, more ranks
    by their layouts, and half of the activations.

    Args:
        model: the root; of a part of a model only that part is counted, and nothing planned.
        optimizer: the model's optimizer, or several, whose state is counted; None: not counted.
        build: plan this model in place of a copy of `model`: see `fullshard.plan`.
        step: plan this step: see `fullshard.plan`.
        batch: sequences of an optimizer step, over all micro-batches; None: one micro-batch.
        micro_batch: sequences of a forward; None: `batch`, or as many as in the last forward.
        sequence: passed to `step`.

    Returns:
        The paragraph.

    Raises:
        ConfigError: the model has no units, the optimizers step none of its parameters, or an argument is of another
            class or not positive; with `build` or `step` also what `fullshard.plan` raises.
    """
    optimizers = [] if optimizer is None else [*dict.fromkeys(as_list(optimizer))]
    _check_arguments("explain_memory", model, optimizers)
    if not runners_in(model):
        raise ConfigError(
            "explain_memory() needs a sharded model.",
            expected="a module with units",
            got=type(model).__name__,
            remedy="call fully_shard or FullyShardedDataParallel first; fullshard.plan computes memory before that",
        )
    given = {"batch": batch, "micro_batch": micro_batch, "sequence": sequence}
    check_counts("explain_memory", **{name: value for name, value in given.items() if value is not None})
    is_in = _is_in(model)
    own = [each for each in optimizers if any(map(is_in, parameters_of([each])))]
    if optimizers and not own:
        raise ConfigError(
            "explain_memory(optimizer=) steps none of the model's parameters.",
            remedy="pass the optimizer of this model, built from model.parameters() after it was sharded",
        )
    planned, why = _planned(model, own, build, step=step, batch=batch, micro_batch=micro_batch, sequence=sequence)
    handled = sys.exception()
    asked = bytes_asked(str(handled)) if handled is not None and is_out_of_memory(handled) else None
    return memory_in_words(_account(model, optimizers, asked), planned, why)


def explained_at_the_end(error: BaseException) -> str | None:
    """How much memory each possible change would have freed, after an out-of-memory error that ends the program.

    Plans the model in whose pass the allocation failed; the error's note says what held memory there. If the allocation
    failed elsewhere (in an optimizer's step, say), plans the largest model of this process, and says what holds memory,
    too. Optimizers are planned if they have begun a step. Planning ends after 20 seconds.

    Returns:
        None for any other error, including out-of-memory errors that are not torch's; if no model is sharded; or if the
        pass builds no graph, so that the peak of a step does not apply.
    """
    failed = next((each for each in _chain(error) if is_out_of_memory(each)), None)
    seen = None if failed is None else explained(failed)
    if failed is None or (seen is None and isinstance(failed, MemoryError)) or (seen and not seen.with_grad):
        return None
    runner = seen.runner() if seen is not None else None
    root = runner.root if runner is not None else None
    if root is None:
        root = max([root for root in all_roots() if root.top.modules], key=_shards, default=None)
    if root is None:
        return None
    model = root.top.modules[0]
    optimizers = stepping([runner.unit for runner in root.units])
    held = seen.account if seen is not None else _account(model, optimizers, bytes_asked(str(failed)))
    state = size(memory_use(model, optimizers).optimizer)
    planned, why = _planned_soon(model, optimizers)  # last: a plan that does not end leaves the model without units
    if seen is None:
        return f"This was outside of a pass of the model. {memory_in_words(held, planned, why)}"
    words = changes_in_words(held, planned, why)
    return f"{state} of what this rank held were optimizer state.\n{words}" if optimizers else words


_SECONDS = 20.0


def _planned_soon(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[tuple[int, list[tuple[int, str]]] | None, str | None]:
    """Like `_planned`, but within 20 seconds even if the forward exits, or waits for something that has ended."""
    planned: list[Any] = []

    def plan() -> None:
        try:
            planned.append(_planned(model, optimizers, None, until=time.monotonic() + _SECONDS))
        except BaseException as error:
            planned.append((None, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=plan, name="fullshard-last-words", daemon=True)
    thread.start()
    thread.join(_SECONDS + 1.0)
    return planned[0] if planned else (None, in_few_words(took_too_long()))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _shards(root: Root) -> int:
    return _nbytes(shard for unit in root.units for bucket in unit.unit.buckets for shard in bucket.shard_tensors)


def _planned(
    model: nn.Module, optimizer: Optimizers | None, build: nn.Module | Callable[[], nn.Module] | None, **how: Any
) -> tuple[tuple[int, list[tuple[int, str]]] | None, str | None]:
    """The peak of a step and how much of it each change would free; and which changes cannot be planned, and why."""
    try:
        now, changes, failed = plan_changes(model, optimizer, build, **how)
    except Exception as error:  # whatever the copy's code raises on fake tensors: the account remains
        if build is not None or how.get("step") is not None:
            raise
        return None, in_few_words(error)
    planned = [(saved, words) for words, saved in changes.items() if saved > 0]
    return (now.peak, planned), "; ".join(f"{words}: {reason}" for words, reason in failed.items()) or None


def _account(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], asked: int | None) -> Account:
    is_sharded = not any(isinstance(each, OwnerOptimizer) for each in optimizers)
    state = memory_use(model, optimizers).optimizer if optimizers else None
    return account(runners_in(model), state, asked, optimizer_is_sharded=is_sharded)


def _is_in(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """A function that returns whether a parameter or a view is of this model, which may be a part of one."""
    units, parameters = set(map(id, units_of(model))), set(map(id, model.parameters()))
    return lambda parameter: id(parameter) in parameters or id(owner_of(parameter)) in units


def _check_arguments(function: str, model: object, optimizers: Sequence[object]) -> None:
    check_module(function, model)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"{function}(optimizer=) is not an optimizer.", got=type(optimizer).__name__)


def _states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Any, torch.Tensor]]:
    """Tensors of the state with their parameters, without those outside of the model."""
    is_in = _is_in(model)
    others = {id(parameter) for parameter in parameters_of([optimizer]) if not is_in(parameter)}
    states = [(parameter, values) for parameter, values in optimizer.state.items() if id(parameter) not in others]
    return [(p, value) for p, values in states for value in leaves_in(values) if isinstance(value, torch.Tensor)]


def _unsharded(
    optimizer: torch.optim.Optimizer,
    state: Sequence[tuple[Any, torch.Tensor]],
    numels: Mapping[int, tuple[int, int]],
    ratio: float,
) -> float:
    """Bytes that an optimizer's state would have in one process.

    Args:
        numels: by id of the parameter, elements of this rank and of all.
        ratio: whole bytes over this rank's, for plain tensors with neither number of elements.
    """
    nbytes = 0.0
    for parameter, value in state:
        own, every = numels.get(id(parameter), (-1, 0))  # an optimizer view or a FlatParameter: use `ratio`
        if isinstance(value, DTensor):  # it has the whole shape
            nbytes += value.numel() * value.element_size()
        elif own == every or value.dim() == 0 or value.numel() == every:
            nbytes += _nbytes([value])
        else:
            nbytes += every * value.element_size() if value.numel() == own else ratio * _nbytes([value])
    # Only other ranks have state of what they own, and of parameters of which this rank has no elements.
    here = {id(parameter) for parameter, _ in state}
    elements = {id(p): numels.get(id(p), (-1, 0)) for p in parameters_of([optimizer]) if p.requires_grad}
    counted = sum(elements[key][1] for key in here & elements.keys())
    owners = has_owners(optimizer)
    others = sum(every for key, (own, every) in elements.items() if key not in here and (owners or own == 0))
    return nbytes * (1 + others / counted) if counted else nbytes


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(part.nbytes for tensor in tensors for part in plain_tensors(tensor))


def _host_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these that are allocated in host memory."""
    parts = [part for tensor in tensors for part in plain_tensors(tensor) if part.device.type == "cpu"]
    return sum(part.nbytes for part in parts if part.untyped_storage().nbytes())


def _whole_bytes(bucket: Bucket, member: Member) -> int:
    """Bytes of a parameter on all ranks together."""
    if bucket.form.plain:
        return member.slot.numel * bucket.storage_dtype.itemsize
    return _nbytes([member.local]) * member.slot.numel // max(member.local.numel(), 1)
