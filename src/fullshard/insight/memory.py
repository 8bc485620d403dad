"""What this rank holds now, and what one process would hold without sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..containers import leaves_in
from ..errors import ConfigError
from ..forms import owner_of
from ..names import size
from ..runtime import explain, runners_in
from ..shard import Unit, members_of, units_of
from ..torch_private.local_tensor import inside, plain_tensors


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on this rank. Activations are not among them: they are the model's own.

    Attributes:
        parameters: shards, and parameters that no unit shards.
        gradients: reduced gradients.
        optimizer: optimizer state.
        gathered: gathered units, and their staging.
        reducing: reduction buffers.
        peak_transient: the most that `gathered` and `reducing` came to together since the root was made.
        single_process: parameters, gradients and optimizer state of one process without sharding.
        host: of parameters, gradients and optimizer state, what lies in host memory (offloaded, parked, or on a CPU).
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
        """All that is held now."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.reducing

    def __str__(self) -> str:
        """A table, in units that people read, beside what one process would hold."""
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


def memory_use(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryUse:
    """What this rank holds of `model` and its optimizer now; from sizes of storages, no allocator asked.

    Args:
        model: a model, with units or without.
        optimizer: counted if given.
    """
    units = units_of(model)
    plain = [p for p in model.parameters() if owner_of(p) is None]
    plain_bytes = sum(_nbytes(p) for p in plain)
    shard_bytes = sum(_nbytes(tensor) for unit in units for bucket in unit.buckets for tensor in bucket.shard_tensors)
    gradients = sum(g.held_bytes for unit in units for g in unit.gradients)
    gradients += sum(_nbytes(p.grad) for p in plain if p.grad is not None)
    whole = sum(m.slot.numel * b.storage_dtype.itemsize for b, _, m in members_of(model)) + plain_bytes
    trainable = sum(m.slot.numel * b.storage_dtype.itemsize for b, _, m in members_of(model) if m.sharded.requires_grad)
    trainable += sum(_nbytes(p) for p in plain if p.requires_grad)
    held, unsharded = _optimizer_bytes(optimizer, (whole - plain_bytes) / max(shard_bytes, 1), {id(p) for p in plain})
    ledgers = {id(unit.ledger): unit.ledger for unit in units}.values()
    return MemoryUse(
        parameters=shard_bytes + plain_bytes,
        gradients=gradients,
        optimizer=held,
        gathered=sum(ledger.gathered for ledger in ledgers),
        reducing=sum(ledger.reducing for ledger in ledgers),
        peak_transient=sum(ledger.peak for ledger in ledgers),
        single_process=whole + trainable + unsharded,
        host=_host_bytes(units, plain, optimizer),
    )


def explain_memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Say in one paragraph what holds this rank's memory now, and which changes would free how much.

    The paragraph of an allocation that fails in a forward or a backward is a note of its error. Where one fails in the
    optimizer's step, catch it and ask:

        except torch.OutOfMemoryError:
            print(fullshard.explain_memory(model, optimizer))
            raise

    Activations are what the accelerator's allocator holds beyond the rest; on a CPU they are not known.

    Args:
        model: sharded; part of a model counts as the part.
        optimizer: of the model; its state counts if given.

    Raises:
        ConfigError: the model has no units.
    """
    runners = runners_in(model)
    if not runners:
        raise ConfigError(
            "explain_memory() needs a sharded model.",
            expected="a module with units",
            got=type(model).__name__,
            remedy="call fully_shard or FullyShardedDataParallel first; fullshard.plan computes memory before that",
        )
    use = memory_use(model, optimizer)
    return explain(runners, use.optimizer if optimizer is not None else None)


def _host_bytes(units: list[Unit], plain: list[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> int:
    """Of what is held between steps, the bytes in host memory."""
    held = [tensor for unit in units for bucket in unit.buckets for tensor in bucket.shard_tensors]
    held += [g.delivery.set.flat for unit in units for g in unit.gradients if g.delivery.set is not None]
    held += [tensor for p in plain for tensor in (p, p.grad) if tensor is not None]
    states = optimizer.state.values() if optimizer is not None else ()
    held += [value for state in states for value in leaves_in(state) if isinstance(value, torch.Tensor)]
    parts = [one for tensor in held for one in plain_tensors(tensor) if one.device.type == "cpu"]
    return sum(one.numel() * one.element_size() if one.untyped_storage().nbytes() else 0 for one in parts)


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None, ratio: float, plain: set[int]) -> tuple[int, int]:
    """Bytes of optimizer state here, and what it would be unsharded (`ratio` times, for state of sharded tensors)."""
    held, whole = 0, 0.0
    if optimizer is None:
        return 0, 0
    for parameter, state in optimizer.state.items():
        for value in leaves_in(state):
            if isinstance(value, torch.Tensor):
                nbytes = _nbytes(value)
                held += nbytes
                whole += nbytes if value.dim() == 0 or id(parameter) in plain else nbytes * ratio
    return held, round(whole)


def _nbytes(tensor: torch.Tensor) -> int:
    local = inside(tensor)
    return local.numel() * local.element_size()


def live_bytes(units: list[Unit]) -> int:
    """Bytes of gathered units, staging and reduction buffers, counted from the storages themselves.

    The ledger's counters must agree with this at every event; tests hold them to it.
    """
    total = 0
    for unit in units:
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
            if bucket.full is not None:
                total += bucket.full.live_bytes
            total += gradients.live_bytes + bucket.kept_bytes
    return total
