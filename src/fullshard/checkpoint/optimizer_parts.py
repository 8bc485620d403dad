"""Optimizer state of wrapper instances by parameter name: gathered from the ranks' slices, and cut into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Comm
from ..errors import CheckpointError
from ..mesh import MeshAxes
from ..shard import Bucket, Member
from .parts import cut_for, whole_of


@dataclass(eq=False)
class Entry:
    """One tensor that an optimizer updates.

    Attributes:
        tensor: the parameter, as the optimizer has it.
        names: of the model's parameters whose state its state is, in order.
        bucket, members: what holds them; None and empty for a parameter that no instance manages.
        comm: of the instance.
        group, index: which of the optimizer's groups it is in, and its number in the optimizer.
        flat: whether `tensor` covers the bucket's whole shard.
    """

    tensor: torch.Tensor
    names: list[str]
    bucket: Bucket | None = None
    members: list[Member] = field(default_factory=list)
    comm: Comm | None = None
    group: int = 0
    index: int = 0
    flat: bool = False


Finish = Callable[[torch.Tensor, tuple[Bucket, Member] | None], Any]
StateOf = Callable[[Entry], dict[str, Any]]
Kinds = dict[str, tuple[str, Any]]  # by state key: what it is ("element", "value" or "other"), and its dtype or value


def _is_whole(entry: Entry) -> bool:
    """Whether the optimizer has the whole parameter, so that state of any shape keeps its meaning."""
    return entry.bucket is None or (entry.bucket.layout.world == 1 and not entry.flat)


def _kinds(entry: Entry, state: dict[str, Any]) -> Kinds:
    found: Kinds = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if tuple(value.shape) != tuple(entry.tensor.shape) and _is_whole(entry):
                found[key] = ("other", None)
                continue
            if tuple(value.shape) != tuple(entry.tensor.shape):
                raise CheckpointError(
                    f"State {key!r} of the optimizer has not one value per element of its parameter; on parts of "
                    "parameters it cannot be told what it stands for.",
                    parameter=", ".join(entry.names),
                    expected=f"shape {tuple(entry.tensor.shape)} or ()",
                    got=f"shape {tuple(value.shape)}",
                    remedy="use NO_SHARD, or an element-wise optimizer (SGD, Adam, AdamW, ...)",
                )
            found[key] = ("element", value.dtype)
        else:
            found[key] = ("value", value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    return found


def collect(
    entries: Iterable[Entry],
    state_of: StateOf,
    finish: Finish,
    axes: MeshAxes,
    wanted: bool,
) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name, whole values passed through `finish`. Collective.

    A bucket's state is gathered key by key, so that at most one is whole at a time besides the result. Scalars
    (steps) come from the first rank that has any; ranks that own nothing of a parameter have no state for it.

    Args:
        entries: the same on every rank.
        state_of: this rank's state of an entry; empty if there is none.
        finish: from a value (in memory that is reused) that is whole but for tensor parallelism, and where it is from,
            what to keep.
        axes: of the root instance, whose ranks compare what state they have.
        wanted: whether this rank keeps a result.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
    """
    entries = list(entries)
    mine: list[Kinds] = []
    error: CheckpointError | None = None
    try:
        mine = [_kinds(entry, state_of(entry)) for entry in entries]
    except CheckpointError as found:
        error = found
    merged = _merge(mine, str(error) if error is not None else None, axes)
    result: dict[str, dict[str, Any]] = {}
    buckets: dict[int, list[int]] = {}
    for i, entry in enumerate(entries):
        if entry.bucket is None:
            if merged[i] and wanted:
                state = state_of(entry)
                result[entry.names[0]] = {k: _plain(v, finish) for k, v in state.items()}
            continue
        buckets.setdefault(id(entry.bucket), []).append(i)
    for indices in buckets.values():
        own = [(entries[i], merged[i], state_of(entries[i])) for i in indices]
        _collect_bucket(own, finish, wanted, result)
    order = [name for entry in entries for name in entry.names]
    return {name: result[name] for name in order if name in result}


def _plain(value: Any, finish: Finish) -> Any:
    return finish(value, None) if isinstance(value, torch.Tensor) and value.dim() > 0 else _copied(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _merge(mine: list[Kinds], error: str | None, axes: MeshAxes) -> list[Kinds]:
    """What state there is anywhere: a rank that owns nothing of a parameter learns it from the others.

    Raises:
        CheckpointError: the first rank's `error`, on every rank.
    """
    everyone: list[Any] = [(mine, error)]
    if axes.shard.size > 1:
        everyone = [None] * axes.shard.size
        dist.all_gather_object(everyone, (mine, error), group=axes.shard.group)
    for _, found in everyone:
        if found is not None:
            raise CheckpointError(found)
    merged: list[Kinds] = [{} for _ in mine]
    for theirs, _ in everyone:
        for known, kinds in zip(merged, theirs, strict=True):
            for key, kind in kinds.items():
                known.setdefault(key, kind)
    return merged


def _collect_bucket(
    own: list[tuple[Entry, Kinds, dict[str, Any]]],
    finish: Finish,
    wanted: bool,
    result: dict[str, dict[str, Any]],
) -> None:
    bucket, comm = own[0][0].bucket, own[0][0].comm
    assert bucket is not None and comm is not None
    keys: dict[str, torch.dtype | None] = {}
    for _, kinds, _ in own:
        for key, (kind, detail) in kinds.items():
            if kind == "element":
                keys[key] = detail
            else:
                keys.setdefault(key, None)
    for key, dtype in keys.items():
        views: dict[int, torch.Tensor] = {}
        if dtype is not None:
            local = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=bucket.device)
            for entry, kinds, state in own:
                if key in state and kinds[key][0] == "element":
                    _place(bucket, entry, state[key], local)
            whole = bucket.gather_whole(comm, local.to(bucket.axes.device))
            views = {id(m): v for m, v in zip(bucket.members, bucket.whole_views(whole), strict=True)}
        if not wanted:
            continue
        for entry, kinds, state in [one for one in own if key in one[1]]:
            kind, detail = kinds[key]
            if kind == "other":
                result.setdefault(entry.names[0], {})[key] = finish(state[key], None)
                continue
            for name, member in zip(entry.names, entry.members, strict=True):
                kept = finish(views[id(member)], (bucket, member)) if kind == "element" else _copied(detail)
                result.setdefault(name, {})[key] = kept


def _place(bucket: Bucket, entry: Entry, value: torch.Tensor, local: torch.Tensor) -> None:
    """Put state of an entry where its elements lie in the shard."""
    if entry.flat:
        local.copy_(value)
    else:
        part = bucket.local(value, entry.members[0])
        bucket.part(local, entry.members[0]).copy_(part)


def cut_state(entry: Entry, by_name: dict[str, dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The state of one optimizer tensor from that of its parameters, as this rank holds it. Collective if split.

    Args:
        by_name: per parameter, whole or sharded values and scalars.
        device: where ranks communicate.

    Returns:
        Empty if none of the parameters has state, or this rank owns nothing of them.

    Raises:
        CheckpointError: a shape that is not the parameter's, or parameters of one tensor with different scalars.
    """
    present = [name for name in entry.names if name in by_name]
    if not present:
        return {}
    if entry.bucket is None:
        return {
            key: whole_of(value, device).clone() if _is_array(value) else _copied(value)
            for key, value in by_name[present[0]].items()
        }
    bucket, result = entry.bucket, {}
    scalars: dict[str, tuple[str, Any]] = {}
    for name, member in zip(entry.names, entry.members, strict=True):
        for key, value in by_name.get(name, {}).items():
            if not _is_array(value):
                known = scalars.setdefault(key, (name, value))
                if not _same(known[1], value):
                    raise CheckpointError(
                        f"State {key!r} differs between parameters of one FlatParameter.",
                        parameter=name,
                        expected=f"{known[1]}, as {known[0]}",
                        got=value,
                        remedy="load it with use_orig_params=True, where each parameter has state of its own",
                    )
                result[key] = _copied(value)
                continue
            whole = whole_of(value, device)
            if tuple(whole.shape) != member.shape and _is_whole(entry):
                result[key] = whole.clone().to(bucket.device)
                continue
            if tuple(whole.shape) != member.shape:
                raise CheckpointError(
                    f"State {key!r} has another shape than its parameter.",
                    parameter=name,
                    expected=member.shape,
                    got=tuple(whole.shape),
                )
            part = cut_for(bucket, member, whole)
            if entry.flat:
                flat = result.get(key)
                if flat is None:
                    flat = result[key] = torch.zeros(bucket.layout.shard_numel, dtype=whole.dtype, device=bucket.device)
                bucket.part(flat, member).copy_(part)
            else:
                result[key] = part.clone().to(bucket.device).view(entry.tensor.shape) if part.numel() else part.clone()
                if part.numel() and bucket.layout.world == 1:
                    result[key] = bucket.shown(part.clone().to(bucket.device), member)
    return result if entry.tensor.numel() else {}


def _is_array(value: Any) -> bool:
    return not isinstance(value, (int, float, bool, str)) and hasattr(value, "dim") and value.dim() > 0


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first.cpu(), second.cpu())
    return bool(first == second)
