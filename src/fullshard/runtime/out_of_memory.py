"""What holds memory now: for errors, and on demand.

Bytes of units are the engine's own; what the allocator holds beyond them are activations and the program's own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..comm import has_streams
from ..errors import FullshardError
from ..shard import Gradients, State, share_over
from ..torch_private.local_tensor import plain_tensors
from .messages import Account
from .phases import Phase

if TYPE_CHECKING:
    from .runner import Runner

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of this rank failed, on an accelerator or on the host."""
    if isinstance(error, FullshardError):  # it may quote what another rank raised
        return False
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def bytes_asked(text: str) -> int | None:
    """The bytes that the failed allocation asked for, if the error's text says so."""
    asked = _ASKED.search(text)
    return round(float(asked[1]) * _UNITS[asked[2]]) if asked and asked[2] in _UNITS else None


def account(
    runners: Sequence[Runner],
    optimizer: int | None = None,
    asked: int | None = None,
    *,
    optimizer_is_sharded: bool = True,
) -> Account:
    """What holds memory now.

    Args:
        runners: of all units of a model.
        optimizer: bytes of optimizer state; None: not known.
        asked: bytes of the allocation that failed; None: none failed.
        optimizer_is_sharded: whether the state is split like the parameters, not whole on owners.
    """
    kinds: dict[str, list[tuple[str, int]]] = {"running": [], "kept": [], "prefetched": []}
    for runner in runners:
        unit = runner.unit
        if unit.state is State.SHARDED or not unit.buckets:
            continue
        kind = "prefetched" if unit.state is State.GATHERING else "kept" if runner.phase is Phase.IDLE else "running"
        nbytes = unit.gathered.issued_bytes if unit.state is State.GATHERING else unit.gathered.live_bytes
        kinds[kind].append((unit.name or "(root)", nbytes))
    ledger = runners[0].unit.ledger
    buckets = [bucket for runner in runners for bucket in runner.unit.buckets]
    tensors = [plain for bucket in buckets for shard in bucket.shard_tensors for plain in plain_tensors(shard)]
    shards = sum(tensor.nbytes for tensor in _on_device(tensors))
    every = [gradients for runner in runners for gradients in runner.unit.gradients]
    gradients = sum(g.residual_bytes + (g.held_bytes if g.bucket.home is None else 0) for g in every)
    device = next((bucket.axes.device for bucket in buckets), torch.device("cpu"))
    allocated, reserved = _allocator(device)
    known = shards + gradients + ledger.live + (optimizer or 0)
    return Account(
        kinds,
        reducing=ledger.reducing,
        shards=shards,
        gradients=gradients,
        optimizer=optimizer,
        rest=None if allocated is None else max(allocated - known, 0),
        unused=None if allocated is None or reserved is None else reserved - allocated,
        asked=asked,
        ranks=max((bucket.axes.shard.size for bucket in buckets), default=1),
        saved=_saved_by_more_ranks(every, optimizer if optimizer_is_sharded else None),
        reserved=reserved,
        wrapped=is_wrapped(runners[0]),
    )


def is_wrapped(runner: Runner) -> bool:
    """Whether a unit is an instance of `FullyShardedDataParallel`."""
    return any([hasattr(type(module), "sharding_strategy") for module in runner.modules])


def _saved_by_more_ranks(every: Sequence[Gradients], optimizer: int | None) -> int:
    """Bytes of shards, reduced gradients and sharded optimizer state that twice as many ranks would free on this one.

    By the layouts of twice as many ranks, padding included. What error feedback keeps stays.
    """
    before = after = trained = trained_after = 0.0
    for gradients in every:
        bucket = gradients.bucket
        shards = [plain for shard in bucket.shard_tensors for plain in plain_tensors(shard)]
        share = share_over(bucket, 2 * bucket.axes.shard.size)
        nbytes = sum(tensor.nbytes for tensor in _on_device(shards)) if bucket.home is None else 0
        nbytes += gradients.held_bytes if bucket.home is None else 0
        before, after = before + nbytes, after + nbytes * share
        if bucket.trains:
            numel = bucket.layout.shard_numel
            trained, trained_after = trained + numel, trained_after + numel * share
    state = (optimizer or 0) * (1 - trained_after / max(trained, 1))
    return round(before - after + state)


def _on_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out tensors in host memory beside an accelerator's."""
    devices = {tensor.device.type for tensor in tensors}
    return [tensor for tensor in tensors if len(devices) == 1 or tensor.device.type != "cpu"]


def _allocator(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes allocated and reserved by the caching allocator; None if it does not exist or keeps no statistics.

    It never raises: it is called while a user's error is handled, which must not be hidden.
    """
    if not has_streams(device):
        return None, None
    try:
        statistics = torch.accelerator.memory_stats(device)
    except RuntimeError:  # no accelerator is initialized, or its allocator (MPS) has no statistics
        return None, None
    return statistics.get("allocated_bytes.all.current"), statistics.get("reserved_bytes.all.current")
