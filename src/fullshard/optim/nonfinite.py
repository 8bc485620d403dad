"""Gradients that are not finite: which parameter, which unit, and which rank brought it in.

After a reduction every rank that holds a slice of a parameter sees the NaN of any of them. Which rank it came from is
known only from before, and noted there on request (`Gradients.own`, `set_check_nonfinite`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..comm import objects_of_all, reduce_value
from ..dtypes import as_real
from ..errors import ConfigError
from ..forms import owner_of
from ..names import clean_name
from ..runtime import Runner, runners_in
from ..shard import Bucket, Gradients
from ..torch_private.local_tensor import local_part


@dataclass(frozen=True)
class NonfiniteGradient:
    """A parameter whose gradient is not finite.

    Attributes:
        parameter: its name.
        unit: the unit that holds it, "(root)" for the root's own; None: no unit, it was told to be left alone.
        kind: "nan" or "inf": of what the ranks contributed, where that is known; of the reduced gradient else. "nan"
            where both occur.
        ranks: the ranks, in the default group, whose own contribution was not finite. Empty: none was, so that the sum
            over ranks has overflowed in the dtype of the reduction, a hook changed it, or (`scatter_dtype`) it shares a
            block with a gradient that is not finite. None: not known, as
            `set_check_nonfinite` was not called.
    """

    parameter: str
    unit: str | None
    kind: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        where = f"{self.parameter} (unit {self.unit})" if self.unit is not None else f"{self.parameter} (in no unit)"
        if self.ranks is None:
            return f"{where}: {self.kind}, of which rank is not known: call set_check_nonfinite(model, True)"
        if not self.ranks:
            cause = (
                "the sum over ranks overflowed, a hook changed it, or (scatter_dtype) it shares a block with another"
            )
            return f"{where}: {self.kind} that no rank contributed: {cause}"
        return f"{where}: {self.kind} from rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class _Seen:
    """What one rank sees of a parameter. `own` is of its contribution: None if finite or not noted."""

    order: int
    reduced: str | None
    own: str | None


_Key = tuple[str | None, str]  # unit and parameter


def nonfinite_gradients(model: nn.Module) -> list[NonfiniteGradient]:
    """The parameters whose gradients hold NaN or inf, the same list on all ranks. Collective.

    To be called after a step's last backward and before `optimizer.step()`, on every rank: as all get the same answer,
    a step that is skipped is skipped on all.

        if found := fullshard.nonfinite_gradients(model):
            print(*found, sep="\\n")
            optimizer.zero_grad()
        else:
            optimizer.step()

    Looks at `.grad` as it is: gradients that were accumulated without sync are looked at once they are reduced, and
    scaled ones (`ShardedGradScaler`) before or after `unscale_`. Parameters that no unit holds are looked at too.
    The ranks that a NaN came from are known if `set_check_nonfinite(model, True)` was called before the backward.

    Costs one pass over this rank's gradients, a copy of one number per parameter to the host, which waits for it, and
    an all-reduce of one number per mesh axis; where something was found, another exchange.

    Args:
        model: a module with units, usually the root.

    Returns:
        One finding per parameter, in the model's order; empty if all gradients are finite.

    Raises:
        ConfigError: the model has no units.
    """
    runners = runners_in(model)
    if not runners:
        raise ConfigError(f"{type(model).__name__} has no units: neither front-end was applied to it", topic="no-units")
    groups = _groups(runners)
    seen = _seen(model, runners)
    flag = torch.tensor([any(one.reduced for one in seen.values())], dtype=torch.int32, device="cpu")
    for group in groups:
        reduce_value(flag, dist.ReduceOp.MAX, group)
    everyone = _exchange({dist.get_rank(): seen}, groups) if bool(flag) else {}
    noted = all(runner.settings.reduce.check_nonfinite for runner in runners)
    found = _merged(everyone, noted)
    _forget(runners, {(finding.unit, finding.parameter) for finding in found})
    return found


def _merged(everyone: dict[int, dict[_Key, _Seen]], noted: bool) -> list[NonfiniteGradient]:
    """The findings of all ranks together."""
    by_key: dict[_Key, dict[int, _Seen]] = {}
    for rank in sorted(everyone):
        for key, one in everyone[rank].items():
            by_key.setdefault(key, {})[rank] = one
    bad = {key: ranks for key, ranks in by_key.items() if any(one.reduced for one in ranks.values())}
    found = []
    for (unit, name), ranks in sorted(bad.items(), key=lambda item: min(one.order for one in item[1].values())):
        sources = tuple(rank for rank, one in ranks.items() if one.own)
        kinds = {one.own for one in ranks.values()} if sources else {one.reduced for one in ranks.values()}
        kind = "nan" if "nan" in kinds else "inf"
        found.append(NonfiniteGradient(name, unit, kind, sources if noted or unit is None else None))
    return found


def _seen(model: nn.Module, runners: list[Runner]) -> dict[_Key, _Seen]:
    """What this rank sees that is not finite, in gradients and in its own contributions to them."""
    keys: list[_Key] = []
    locals_: list[torch.Tensor] = []
    for runner, gradients in _all_gradients(runners):
        for name, local in _local_gradients(gradients.bucket):
            keys.append((_name_of(runner), name))
            locals_.append(local)
    for path, parameter in model.named_parameters():
        if owner_of(parameter) is None and parameter.grad is not None:
            keys.append((None, clean_name(path)))
            locals_.append(local_part(parameter.grad))
    reduced = dict(zip(keys, _kinds(locals_), strict=True))
    own: dict[_Key, str] = {key: kind for key, kind in reduced.items() if key[0] is None and kind is not None}
    for runner, gradients in _all_gradients(runners):
        for name, kind in _own_kinds(gradients):
            key = (_name_of(runner), name)
            own[key] = "nan" if "nan" in (kind, own.get(key)) else kind
    order = {key: at for at, key in enumerate(_order(model, runners))}
    bad = [key for key in order if reduced.get(key) or key in own]
    return {key: _Seen(order[key], reduced.get(key), own.get(key)) for key in bad}


def _order(model: nn.Module, runners: list[Runner]) -> list[_Key]:
    """Every parameter that may be found, the same list on every rank that holds the same model."""
    held: list[_Key] = [(_name_of(runner), member.name) for runner in runners for member in runner.unit.members]
    free = [(None, clean_name(path)) for path, p in model.named_parameters() if owner_of(p) is None]
    return [*held, *free]


def _name_of(runner: Runner) -> str:
    return runner.unit.name or "(root)"


def _all_gradients(runners: list[Runner]) -> Iterator[tuple[Runner, Gradients]]:
    return ((runner, gradients) for runner in runners for gradients in runner.unit.gradients)


def _local_gradients(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """By name, this rank's parts of the gradients that there are."""
    flat = bucket.flat_parameter
    for member in bucket.members:
        shown = flat.grad if flat is not None else member.sharded.grad
        if shown is not None:
            yield member.name, bucket.part(shown, member) if flat is not None else bucket.local(shown, member)


def _kinds(tensors: list[torch.Tensor]) -> list[str | None]:
    """Of each tensor, "nan" or "inf" if there is one in it. The host waits, once per dtype and device."""
    found: list[str | None] = [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in alike.values():
        largest = torch.stack(torch._foreach_norm([as_real(tensors[i].detach()) for i in indices], math.inf))
        for index, value in zip(indices, largest.tolist(), strict=True):
            found[index] = _kind(value)
    return found


def _kind(value: float) -> str | None:
    return None if math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _own_kinds(gradients: Gradients) -> Iterator[tuple[str, str]]:
    """By name, "nan" or "inf" of what this rank contributed and noted; a name may come more than once."""
    if gradients.own is None or gradients.buffer is None:
        return
    for index, value in zip(gradients.buffer.owners, gradients.own.tolist(), strict=True):
        if (kind := _kind(value)) is not None:
            yield gradients.bucket.members[index].name, kind


def _forget(runners: list[Runner], found: set[_Key]) -> None:
    """What was noted of gradients that are finite is of an earlier step, whose gradients were zeroed in place."""
    for runner, gradients in _all_gradients(runners):
        if not any((_name_of(runner), member.name) in found for member in gradients.bucket.members):
            gradients.own = None


def _groups(runners: list[Runner]) -> list[dist.ProcessGroup]:
    """Over which ranks tell each other, one after the other, until all know: of all axes and of tensor parallelism."""
    groups: dict[int, dist.ProcessGroup] = {}
    for runner in runners:
        axes = [runner.settings.axes, *(bucket.axes for bucket in runner.unit.buckets)]
        over = [axis.group for one in axes for axis in one.all if axis.size > 1 and axis.backend != "fake"]
        for member in runner.unit.members:
            over += member.split.groups() if member.split is not None else []
        if runner.settings.comm.communicates:
            groups |= {id(group): group for group in over}
    return list(groups.values())


def _exchange(known: dict[int, dict[_Key, _Seen]], groups: list[dist.ProcessGroup]) -> dict[int, dict[_Key, _Seen]]:
    """By rank, what each saw."""
    for group in groups:
        for one in objects_of_all(known, group, "values of all ranks"):
            known = known | one
    return known
