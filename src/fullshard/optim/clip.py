"""Gradient norms and clipping for sharded gradients: local norms, one all-reduce per axis, one scaling."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import largest_value, reduce_value
from ..dtypes import as_real
from ..errors import ArgumentTypeError, ConfigError, NonfiniteError, invalid_argument
from ..forms import NAME_KEY, PART_KEY, FlatShard, LocalForm, Member, owner_of
from ..shard import Bucket, Unit, follow_views
from ..torch_private.local_tensor import inside, local_part, plain_access, read_grad

STEPPED_KEY = "_fullshard_steps_in_backward"
"""Attribute of an optimizer that steps during the backward, and of its parameters: its `StepsInBackward`."""
Groups = Sequence[dist.ProcessGroup]
"""The process groups that the elements of a gradient are split over, one per mesh axis; empty if it is not split."""
Parts = dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]
"""By the groups over which gradients are split, this rank's parts of them."""
KnownGroups = dict[tuple[int, Any], Groups]
"""By the id of a mesh, and placements on it: the groups over which they split elements. Kept for one call."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`, like `torch.nn.utils.clip_grad_norm_`.

    Exact for any mix of sharded (rows, flat) and plain parameters, any norm, and shards that are empty on some
    ranks. Collective: one all-reduce of a scalar per mesh axis in use.

    Args:
        parameters: any mix of sharded parameters, tensors from `optimizer_view`, and plain parameters (whole on every
            rank). A parameter passed together with a view of it counts once.
        max_norm: the largest total norm allowed; `math.inf` only measures finite gradients: if their norm
            is infinite, they become NaN, as in PyTorch.
        norm_type: 1, 2, ..., or `math.inf`.
        error_if_nonfinite: raise if the total norm is not finite.

    Returns:
        The total norm before clipping, a 0-d float32 tensor (float64 if the gradients are).

    Raises:
        ConfigError: an invalid `max_norm` or `norm_type`, see `checked_clipping`.
        ArgumentTypeError (a TypeError): `parameters` is a module or (name, parameter) pairs instead of tensors.
        NonfiniteError (a RuntimeError): the total norm is not finite and `error_if_nonfinite` is set.
    """
    norm_type = checked_clipping(max_norm, norm_type)
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else _as_tensors(parameters)
    refuse_to_clip_stepped(tensors)
    grads, known = distinct_gradients(tensors), KnownGroups()
    parts: Parts = {}
    with plain_access():
        for parameter, grad, members in grads:
            for part, groups in _gradient_parts(parameter, grad, members, known):
                parts.setdefault(tuple(groups), []).append(inside(part))
    device = torch.get_default_device()
    total = joined_norm(_local_norms(parts, norm_type, device), norm_type, device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonfiniteError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, not finite",
            topic="nonfinite-gradients",
        )
    scale_gradients([grad for _, grad, _ in grads], total, max_norm)
    return total


def distinct_gradients(
    parameters: Sequence[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """The parameters that have gradients, with these, and the members of each optimizer view.

    Omits the members, whose gradients lie inside the view's.
    """
    follow_views(parameters)
    with plain_access():
        grads = {id(p): (p, grad, _members_of_view(p)) for p in parameters if (grad := read_grad(p)) is not None}
    covered = {id(member) for *_, members in grads.values() for member in members}
    return [entry for key, entry in grads.items() if key not in covered]


def scale_gradients(grads: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float | torch.Tensor) -> None:
    """Scale gradients in place by min(1, max_norm / total), where `total` is their total norm."""
    scale = clip_scale(total, max_norm)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        local = as_real(inside(grad))
        by_kind.setdefault((local.dtype, local.device), []).append(local)
    for (dtype, device), tensors in by_kind.items():
        torch._foreach_mul_(tensors, scale.to(device, dtype if dtype == torch.float64 else torch.float32))


def clip_scale(total: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """The factor for gradients of this total norm: 0-d, 1 if they are not clipped, NaN if the norm is NaN."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_


def refuse_to_clip_stepped(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to clip gradients of parameters that step during the backward.

    Raises:
        ConfigError: names the first such parameter.
    """
    refuse_stepped(parameters, "clip_grad_norm_", "step_in_backward(optimizer, max_norm=...), which clips")


def refuse_stepped(parameters: Iterable[torch.Tensor], caller: str, remedy: str) -> None:
    """Refuse parameters that step during the backward: their gradients are gone when it ends.

    Raises:
        ConfigError: names the first such parameter.
    """
    for parameter in parameters:
        if STEPPED_KEY in parameter.__dict__:
            raise ConfigError(
                f"{caller} cannot be used on a parameter that steps during the backward: its gradient is already gone.",
                parameter=parameter.__dict__.get(NAME_KEY),
                remedy=remedy,
                topic="step-in-backward",
            )


def checked_clipping(max_norm: Any, norm_type: Any) -> float:
    """Check the arguments of `clip_grad_norm_`; returns `norm_type` as a float. Does not wait for `max_norm`.

    Raises:
        ConfigError: `max_norm` is not a number of at least 0, or a 0-dim tensor of one (of tensors on a device the
            value is not checked, for which the host would wait); `norm_type` is not positive as a float ("inf" is).
    """
    if isinstance(max_norm, torch.Tensor):
        fits = not max_norm.dim() and not max_norm.is_complex() and max_norm.dtype is not torch.bool
        readable = max_norm.device.type == "cpu"
    else:
        fits, readable = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool), True
    if not fits or (readable and not max_norm >= 0):
        expected, kind = "a number of at least 0, or a 0-dim tensor of one", ConfigError if fits else ArgumentTypeError
        raise invalid_argument("clip_grad_norm_(max_norm=)", max_norm, expected, "pass math.inf to measure only", kind)
    kind = ConfigError
    try:
        order = float(norm_type)
    except (TypeError, ValueError) as error:
        order, kind = math.nan, ArgumentTypeError if isinstance(error, TypeError) else ConfigError
    if not order > 0:
        remedy = "pass 2.0 for the Euclidean norm, or math.inf for the largest absolute value"
        raise invalid_argument("clip_grad_norm_(norm_type=)", norm_type, "a positive number, or inf", remedy, kind)
    return order


def _as_tensors(parameters: Any) -> list[torch.Tensor]:
    """`parameters` as a list of tensors.

    Raises:
        ArgumentTypeError: an item is not a tensor.
    """
    tensors = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            kind = type(parameters if isinstance(parameters, nn.Module) else tensor).__name__
            raise ArgumentTypeError(
                "clip_grad_norm_ takes parameters.",
                expected="a tensor or an iterable of tensors",
                got=f"a {kind}",
                remedy="pass model.parameters(), not the model or named_parameters()",
            )
    return tensors


def local_norms(parameters: Sequence[torch.Tensor], norm_type: float) -> list[tuple[Groups, torch.Tensor]]:
    """For each parameter, the norm of this rank's part of its gradient, for `joined_norm`. No communication.

    A norm is a tensor of one element, or of none where this rank's part is empty.
    """
    result: list[tuple[Groups, torch.Tensor]] = []
    known: KnownGroups = {}
    for parameter in parameters:
        assert parameter.grad is not None
        ((grad, groups),) = _gradient_parts(parameter, parameter.grad, [], known)
        local = inside(grad)
        ((_, norm),) = _local_norms({tuple(groups): [local]}, norm_type, local.device)
        result.append((groups, norm if local.numel() else norm[:0]))
    return result


def _local_norms(parts: Parts, norm_type: float, device: torch.device) -> list[tuple[Groups, torch.Tensor]]:
    """The norms of this rank's parts of gradients, for `joined_norm`: a 1-D tensor for each set of groups.

    Args:
        device: of the norm of no tensors.
    """
    norms: list[tuple[Groups, torch.Tensor]] = []
    for groups, tensors in parts.items():
        real = [_magnitudes(tensor, norm_type) for tensor in tensors]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in real) else torch.float32
        if filled := [tensor for tensor in real if tensor.numel()]:
            norms.append((groups, torch.stack(on_one_device(torch._foreach_norm(filled, norm_type, dtype=dtype)))))
        else:
            norms.append((groups, torch.zeros(1, dtype=dtype, device=tensors[0].device if tensors else device)))
    return norms


def on_one_device(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring norms to one device: to the accelerator, if some gradients are offloaded."""
    devices = {norm.device for norm in norms}
    if len(devices) == 1:
        return [*norms]
    home = next(device for device in devices if device.type != "cpu")
    return [norm.to(home) for norm in norms]


def joined_norm(norms: Iterable[tuple[Groups, torch.Tensor]], norm_type: float, device: torch.device) -> torch.Tensor:
    """The total norm, from 1-D tensors of local norms, each reduced over its groups. Collective.

    Args:
        device: the result's device, if there are no norms.
    """
    infinite = math.isinf(norm_type)
    parts: list[torch.Tensor] = []
    for groups, local in norms:
        part = local.max() if infinite else torch.linalg.vector_norm(local, norm_type) ** norm_type
        for group in groups:
            part = largest_value(part, group) if infinite else reduce_value(part, dist.ReduceOp.SUM, group)
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    return stacked.max() if infinite else stacked.sum() ** (1.0 / norm_type)


def _magnitudes(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """A real tensor with the same norm as `grad`: for complex numbers their absolute values, or both parts if p = 2."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad) if norm_type == 2 else grad.abs()


def _members_of_view(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The sharded parameters that an optimizer view covers; empty if `parameter` is not a view."""
    unit = owner_of(parameter) if PART_KEY in parameter.__dict__ else None
    for gradients in unit.gradients if unit is not None else ():
        for view in gradients.delivery.views:
            if view.tensor is parameter and not view.alone:
                return [gradients.bucket.members[index].sharded for index in view.members]
    return []


def _gradient_parts(
    parameter: torch.Tensor, grad: torch.Tensor, members: list[torch.Tensor], known: KnownGroups
) -> list[tuple[torch.Tensor, Groups]]:
    """A parameter's gradient with its groups; for a view whose `members` have different groups, those of each."""
    groups = _groups_of(parameter, grad, known)
    if not members:
        return [(grad, groups)]
    member_groups = [shard_groups(member, known) for member in members]
    if all(groups == member_groups[0] for groups in member_groups):
        return [(grad, member_groups[0])]
    return [(g, groups) for m, groups in zip(members, member_groups, strict=True) if (g := read_grad(m)) is not None]


def _groups_of(parameter: torch.Tensor, grad: torch.Tensor, known: KnownGroups) -> Groups:
    """The groups over which a parameter's gradient is split.

    Raises:
        ConfigError: it is a parameter of FullyShardedDataParallel; other ranks may have no part of it to pass.
    """
    unit = owner_of(parameter)
    if unit is not None and isinstance(unit.buckets[0].form, LocalForm) and unit.buckets[0].axes.shard.size > 1:
        raise ConfigError(
            "clip_grad_norm_ does not take parameters of a FullyShardedDataParallel instance.",
            parameter=parameter.__dict__.get(NAME_KEY),
            remedy="call model.clip_grad_norm_(max_norm) on the root instance",
        )
    return shard_groups(grad, known)


def shard_groups(grad: torch.Tensor, known: KnownGroups) -> Groups:
    """The groups over which a gradient's elements are split."""
    if isinstance(grad, FlatShard):
        axis = grad._run.axis
        return [axis.group] if axis.size > 1 else []
    if not isinstance(grad, DTensor):
        return []
    mesh, placements = grad.device_mesh, grad.placements
    groups = known.get((id(mesh), placements))
    if groups is None:
        if any(placement.is_partial() for placement in placements):
            raise ConfigError("cannot take the norm of a gradient with a partial placement; redistribute it first")
        groups = known[id(mesh), placements] = [
            mesh.get_group(dim)
            for dim, placement in enumerate(placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        ]
    return groups


def local_gradients(bucket: Bucket) -> Iterator[tuple[Member, torch.Tensor]]:
    """The parameters of a bucket that have a gradient, each with this rank's part of it, in one dim for runs."""
    flat = bucket.flat_parameter
    for member in bucket.members:
        grad = read_grad(member.sharded if flat is None else flat)
        if grad is not None:
            yield member, bucket.local(grad, member) if flat is None else bucket.part(grad, member)


def _split_over(bucket: Bucket, member: Member) -> tuple[dist.ProcessGroup, ...]:
    axis, parallel = bucket.axes.shard, member.split
    return (*([axis.group] if axis.size > 1 else []), *(parallel.groups() if parallel is not None else []))


def clip_units(
    units: Iterable[Unit], others: Iterable[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Like `clip_grad_norm_`, for all parameters of units, even if this rank holds nothing of them. Collective.

    Args:
        units: units of the wrapper, the same on all ranks.
        others: parameters in no unit.
        device: where the collectives run.

    Returns:
        The total norm, in the widest dtype of the gradients; float32 if this rank has none.
    """
    # This rank's parts by the groups that they are split over: the same groups in the same order on all ranks.
    parts: Parts = {(): []}
    by_id: dict[int, torch.Tensor] = {}  # the gradients that the parts are in
    known: KnownGroups = {}
    for bucket in [bucket for unit in units for bucket in unit.buckets]:
        for member in bucket.members:
            parts.setdefault(_split_over(bucket, member), [])
        for member, part in local_gradients(bucket):
            parts[_split_over(bucket, member)].append(part)
            grad: Any = (member.sharded if bucket.flat_parameter is None else bucket.flat_parameter).grad
            by_id[id(grad)] = grad
    for parameter in others:
        tensors = parts.setdefault(tuple(shard_groups(parameter, known)), [])
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            tensors.append(local)
            by_id[id(local)] = local
    grads = [as_real(grad) for grad in by_id.values()]
    # always float64: a rank without gradients does not know the dtypes on other ranks
    norms = [(groups, norm.to(device, torch.float64)) for groups, norm in _local_norms(parts, norm_type, device)]
    total = joined_norm(norms, norm_type, device)
    scale_gradients(grads, total, max_norm)
    return total.to(reduce(torch.promote_types, [grad.dtype for grad in grads]) if grads else torch.float32)
