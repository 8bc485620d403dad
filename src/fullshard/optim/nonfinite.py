"""Find nonfinite gradients: which parameter, which unit, and which rank they came from.

After a reduction, a NaN from any rank appears on every rank that has a slice of the parameter. Its source can only be
recorded before the reduction, on request (`Gradients.own`, `set_check_nonfinite`).
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
from ..errors import ConfigError, check_module
from ..forms import owner_of
from ..runtime import Runner, runners_in
from ..shard import Gradients
from ..text import clean_name
from ..torch_private.local_tensor import local_part
from .clip import local_gradients


@dataclass(frozen=True)
class NonfiniteGradient:
    """A parameter whose gradient is not finite.

    Attributes:
        parameter: its name.
        unit: its unit, "(root)" for the root unit; None for an ignored parameter, which is in no unit.
        kind: "nan" or "inf", "nan" if both occur: in the contributions of the ranks if recorded, else in the reduced
            gradient.
        ranks: the ranks, in the default group, whose contribution was not finite. Empty: all were finite, so the sum
            over ranks overflowed in the reduction dtype, a hook changed it, or it shares a block of an 8-bit reduction
            with a gradient that is not finite. None: unknown because `set_check_nonfinite` was not called.
    """

    parameter: str
    unit: str | None
    kind: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        where = f"{self.parameter} (unit {self.unit})" if self.unit is not None else f"{self.parameter} (in no unit)"
        if self.ranks is None:
            return f"{where}: {self.kind}, rank unknown: call set_check_nonfinite(model, True)"
        if not self.ranks:
            causes = "the sum over ranks overflowed, a hook changed it, or an 8-bit reduction spread it in a block"
            return f"{where}: {self.kind} that no rank contributed: {causes}"
        return f"{where}: {self.kind} from rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class _NonfiniteValues:
    """Nonfinite values of one parameter on one rank, "nan" or "inf"."""

    order: int  # position of the parameter in the model
    reduced: str | None  # in the reduced gradient; None: finite
    own: str | None  # in this rank's contribution; None: finite or not recorded


_Key = tuple[str | None, str]  # unit and parameter


def nonfinite_gradients(model: nn.Module) -> list[NonfiniteGradient]:
    """The parameters whose gradients hold NaN or inf, the same list on all ranks. Collective.

    Call it on every rank after the last backward of a step and before `optimizer.step()`. All ranks get the same
    result, so they all skip the same steps.

        if nonfinite := fullshard.nonfinite_gradients(model):
            print(*nonfinite, sep="\\n")
            optimizer.zero_grad()
        else:
            optimizer.step()

    Checks `.grad` as it is: gradients that accumulate without sync are checked once they are reduced, and scaled
    gradients (`ShardedGradScaler`) before or after `unscale_`. Parameters in no unit are checked, too. The ranks that a
    NaN came from are known if `set_check_nonfinite(model, True)` was called before the backward.

    Cost: one pass over this rank's gradients, a copy of one number per parameter to the host, which waits for it, and
    an all-reduce of one number per mesh axis; one more exchange if a gradient is not finite.

    Args:
        model: a module with units, usually the root.

    Returns:
        One entry per parameter with nonfinite gradients, in the order of the model.

    Raises:
        ConfigError: not a module, or one without units.
    """
    check_module("nonfinite_gradients", model)
    runners = runners_in(model)
    if not runners:
        raise ConfigError(f"{type(model).__name__} has no units: neither front-end was applied to it", topic="no-units")
    groups = _groups(runners)
    local = _local_values(model, runners)
    flag = torch.tensor([any(values.reduced for values in local.values())], dtype=torch.int32, device="cpu")
    for group in groups:
        reduce_value(flag, dist.ReduceOp.MAX, group)
    by_rank = {dist.get_rank(): local} if bool(flag) else {}
    for group in groups if by_rank else ():
        for received in objects_of_all(by_rank, group, "values of all ranks"):
            by_rank = by_rank | received
    recorded = all(runner.settings.reduce.check_nonfinite for runner in runners)
    nonfinite = _merged(by_rank, recorded)
    _forget(runners, {(gradient.unit, gradient.parameter) for gradient in nonfinite})
    return nonfinite


def _merged(values_by_rank: dict[int, dict[_Key, _NonfiniteValues]], recorded: bool) -> list[NonfiniteGradient]:
    """The nonfinite gradients of all ranks, in the order of the model."""
    by_key: dict[_Key, dict[int, _NonfiniteValues]] = {}
    for rank in sorted(values_by_rank):
        for key, values in values_by_rank[rank].items():
            by_key.setdefault(key, {})[rank] = values
    bad = {key: ranks for key, ranks in by_key.items() if any(values.reduced for values in ranks.values())}
    nonfinite = []
    for (unit, name), ranks in sorted(bad.items(), key=lambda item: min(values.order for values in item[1].values())):
        sources = tuple(rank for rank, values in ranks.items() if values.own)
        kinds = {values.own if sources else values.reduced for values in ranks.values()}
        kind = "nan" if "nan" in kinds else "inf"
        nonfinite.append(NonfiniteGradient(name, unit, kind, sources if recorded or unit is None else None))
    return nonfinite


def _local_values(model: nn.Module, runners: list[Runner]) -> dict[_Key, _NonfiniteValues]:
    """Nonfinite values on this rank, in reduced gradients and in its own contributions to them."""
    keys: list[_Key] = []
    locals_: list[torch.Tensor] = []
    for runner, gradients in _all_gradients(runners):
        for member, local in local_gradients(gradients.bucket):
            keys.append((_name_of(runner), member.name))
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
    keys = [(_name_of(runner), member.name) for runner in runners for member in runner.unit.members]
    keys += [(None, clean_name(path)) for path, p in model.named_parameters() if owner_of(p) is None]
    order = {key: index for index, key in enumerate(keys)}  # the same on all ranks of the same model
    bad = [key for key in order if reduced.get(key) or key in own]
    return {key: _NonfiniteValues(order[key], reduced.get(key), own.get(key)) for key in bad}


def _name_of(runner: Runner) -> str:
    return runner.unit.name or "(root)"


def _all_gradients(runners: list[Runner]) -> Iterator[tuple[Runner, Gradients]]:
    return ((runner, gradients) for runner in runners for gradients in runner.unit.gradients)


def _kinds(tensors: list[torch.Tensor]) -> list[str | None]:
    """For each tensor, "nan" or "inf" if it has one, else None. The host waits once per dtype and device."""
    kinds: list[str | None] = [None] * len(tensors)
    by_dtype: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            by_dtype.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in by_dtype.values():
        largest = torch.stack(torch._foreach_norm([as_real(tensors[i].detach()) for i in indices], math.inf))
        for index, value in zip(indices, largest.tolist(), strict=True):
            kinds[index] = _kind(value)
    return kinds


def _kind(value: float) -> str | None:
    return None if math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _own_kinds(gradients: Gradients) -> Iterator[tuple[str, str]]:
    """Names with "nan" or "inf" recorded in this rank's contribution; a name may occur more than once."""
    if gradients.own is None or gradients.buffer is None:
        return
    for index, value in zip(gradients.buffer.owners, gradients.own.tolist(), strict=True):
        if (kind := _kind(value)) is not None:
            yield gradients.bucket.members[index].name, kind


def _forget(runners: list[Runner], nonfinite: set[_Key]) -> None:
    """Drop records for finite gradients: they are from an earlier step, whose gradients were zeroed in place."""
    for runner, gradients in _all_gradients(runners):
        if not any((_name_of(runner), member.name) in nonfinite for member in gradients.bucket.members):
            gradients.own = None


def _groups(runners: list[Runner]) -> list[dist.ProcessGroup]:
    """The groups of all axes, and of tensor parallelism: exchanging over each in turn reaches all ranks."""
    groups: list[dist.ProcessGroup] = []
    for runner in runners:
        if runner.settings.comm.communicates:
            for axes in [runner.settings.axes, *(bucket.axes for bucket in runner.unit.buckets)]:
                groups += [axis.group for axis in axes.all if axis.size > 1 and axis.backend != "fake"]
            for member in runner.unit.members:
                groups += member.split.groups() if member.split is not None else []
    return list(dict.fromkeys(groups))
