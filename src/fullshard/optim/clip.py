"""Gradient norms and clipping over sharded gradients: local norms, one all-reduce per axis, one scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import reduce_value
from ..dtypes import as_real
from ..errors import ArgumentTypeError, ConfigError, NonfiniteError
from ..forms import NAME_KEY, PART_KEY, FlatShard, LocalForm, owner_of
from ..shard import follow_views
from ..torch_private.local_tensor import inside

STEPPED_KEY = "_fullshard_steps_in_backward"
"""Attribute of parameters that an optimizer steps during the backward: its `StepsInBackward`."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; as `torch.nn.utils.clip_grad_norm_`.

    Exact for any mix of sharded (rows, flat) and plain parameters, any norm, and shards that are empty on some
    ranks. Collective: one all-reduce of a scalar per mesh axis in use.

    Args:
        parameters: sharded parameters, `optimizer_view`'s tensors over them, plain ones (whole on every rank), or any
            of these; a parameter that is given with a view over it counts once.
        max_norm: the largest total norm allowed.
        norm_type: 1, 2, ..., or `math.inf`.
        error_if_nonfinite: raise if the total norm is not finite.

    Returns:
        The total norm before clipping, a 0-d float32 tensor (float64 if the gradients are).

    Raises:
        ConfigError: `norm_type` is not positive.
        ArgumentTypeError (a TypeError): `parameters` are no tensors: a module, or pairs of names and parameters.
        NonfiniteError (a RuntimeError): the total norm is not finite and `error_if_nonfinite` is set.
    """
    _check_order(norm_type)
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else _listed(parameters)
    refuse_stepped(tensors, "clip_grad_norm_", "step_in_backward(optimizer, max_norm=...), which clips in two passes")
    follow_views(tensors)
    viewed = {id(p): _under_view(p) for p in tensors if PART_KEY in p.__dict__ and p.grad is not None}
    under = {id(member) for members in viewed.values() for member in members}
    tensors = [p for p in tensors if p.grad is not None and id(p) not in under]
    grads = [p.grad for p in tensors if p.grad is not None]
    total = _norm_of([part for p in tensors for part in _parts_of(p, viewed.get(id(p), []))], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonfiniteError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, not finite",
            topic="nonfinite-gradients",
        )
    scale_gradients(grads, total, max_norm)
    return total


def scale_gradients(grads: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of total norm `total` in place, so that it is at most `max_norm`."""
    _scale_down([as_real(inside(grad)) for grad in grads], total, max_norm)


def refuse_stepped(parameters: Iterable[torch.Tensor], what: str, remedy: str) -> None:
    """Refuse parameters whose gradients are used and gone when the backward ends.

    Raises:
        ConfigError: names the first.
    """
    for parameter in parameters:
        if STEPPED_KEY in parameter.__dict__:
            raise ConfigError(
                f"{what} was given a parameter that is stepped during the backward: it comes too late.",
                parameter=parameter.__dict__.get(NAME_KEY),
                remedy=remedy,
                topic="step-in-backward",
            )


def _check_order(norm_type: float) -> None:
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be positive, got {norm_type}")


def _scale_down(grads: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale real, local gradients in place by min(1, max_norm / total)."""
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for (dtype, device), tensors in by_kind.items():
        torch._foreach_mul_(tensors, scale.to(device, dtype if dtype == torch.float64 else torch.float32))


def _listed(parameters: Any) -> list[torch.Tensor]:
    """`parameters` as a list of tensors.

    Raises:
        ArgumentTypeError: something else is among them.
    """
    tensors = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            kind = type(parameters if isinstance(parameters, nn.Module) else tensor).__name__
            raise ArgumentTypeError(
                "clip_grad_norm_ takes parameters.",
                expected="a tensor, or tensors",
                got=f"a {kind}",
                remedy="give model.parameters(), not the model, nor named_parameters()",
            )
    return tensors


def total_norm(grads: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements of all gradients together, each element of a sharded one counted once.

    Returns:
        A 0-d tensor, float32 (float64 if a gradient is); zero if there are no gradients.
    """
    return _norm_of([(grad, shard_groups(grad)) for grad in grads], norm_type)


def _norm_of(
    grads: Iterable[tuple[torch.Tensor, list[torch.distributed.ProcessGroup]]], norm_type: float
) -> torch.Tensor:
    """`total_norm` of gradients, each with the groups over which its elements are split."""
    return joined_norm(_local_norms(grads, norm_type), norm_type, torch.get_default_device())


def local_norms(
    parameters: Sequence[torch.Tensor], norm_type: float
) -> list[list[tuple[list[torch.distributed.ProcessGroup], torch.Tensor]]]:
    """For each parameter, norms of this rank's parts of its gradient, for `joined_norm`. No communication."""
    result = []
    for parameter in parameters:
        norms = _local_norms(_parts_of(parameter, []), norm_type)
        holds = parameter.grad is not None and inside(parameter.grad).numel() > 0
        result.append([(groups, norm if holds else norm[:0]) for groups, norm in norms])
    return result


def _local_norms(
    grads: Iterable[tuple[torch.Tensor, list[torch.distributed.ProcessGroup]]], norm_type: float
) -> list[tuple[list[torch.distributed.ProcessGroup], torch.Tensor]]:
    by_groups: dict[tuple[int, ...], tuple[list[torch.distributed.ProcessGroup], list[torch.Tensor]]] = {}
    for grad, groups in grads:
        entry = by_groups.setdefault(tuple(id(group) for group in groups), (groups, []))
        entry[1].append(_magnitudes(inside(grad), norm_type))
    norms: list[tuple[list[torch.distributed.ProcessGroup], torch.Tensor]] = []
    for groups, tensors in by_groups.values():
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        filled = [t for t in tensors if t.numel()]
        if filled:
            norms.append((groups, torch.stack(torch._foreach_norm(filled, norm_type, dtype=dtype))))
        else:
            norms.append((groups, torch.zeros(1, dtype=dtype, device=tensors[0].device)))
    return norms


def joined_norm(
    norms: Iterable[tuple[list[torch.distributed.ProcessGroup], torch.Tensor]], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The norm of everything from 1-D tensors of norms, each summed over its groups. Collective.

    Args:
        device: of the result, if there are no norms.
    """
    infinite = math.isinf(norm_type)
    op = torch.distributed.ReduceOp.MAX if infinite else torch.distributed.ReduceOp.SUM
    parts: list[torch.Tensor] = []
    for groups, local in norms:
        part = local.max() if infinite else torch.linalg.vector_norm(local, norm_type) ** norm_type
        for group in groups:
            reduce_value(part, op, group)
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    return stacked.max() if infinite else stacked.sum() ** (1.0 / norm_type)


def _magnitudes(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Real numbers with the norm of `grad`: of complex ones absolute values, or their parts where that is the same."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad) if norm_type == 2 else grad.abs()


def _under_view(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The sharded parameters that `parameter` is an optimizer view over; none if it is no view."""
    unit = owner_of(parameter)
    for gradients in unit.gradients if unit is not None else ():
        for view in gradients.delivery.views:
            if view.tensor is parameter and not view.alone:
                return [gradients.bucket.members[index].sharded for index in view.members]
    return []


def _parts_of(
    parameter: torch.Tensor, under: list[torch.Tensor]
) -> list[tuple[torch.Tensor, list[torch.distributed.ProcessGroup]]]:
    """A parameter's gradient in parts, each split over groups of its own: of a view, if its members differ in that."""
    assert parameter.grad is not None
    if not under:
        return [(parameter.grad, _groups_of(parameter))]
    _groups_of(parameter)  # refused, if it is the wrapper's
    groups = [shard_groups(one) for one in under]
    if all([list(map(id, one)) == list(map(id, groups[0])) for one in groups]):
        return [(parameter.grad, groups[0])]
    return [(one.grad, group) for one, group in zip(under, groups, strict=True) if one.grad is not None]


def _groups_of(parameter: torch.Tensor) -> list[torch.distributed.ProcessGroup]:
    """The groups over which a parameter's gradient is split; the wrapper's parameters do not say so themselves.

    Raises:
        ConfigError: a part of the wrapper's parameters, whose other parts may be on ranks that pass nothing.
    """
    unit = owner_of(parameter)
    if unit is not None and isinstance(unit.buckets[0].form, LocalForm) and unit.buckets[0].axes.shard.size > 1:
        raise ConfigError(
            "clip_grad_norm_ was given parameters of a FullyShardedDataParallel instance.",
            parameter=parameter.__dict__.get("_fullshard_name"),
            remedy="call model.clip_grad_norm_(max_norm) on the root instance",
        )
    assert parameter.grad is not None
    return shard_groups(parameter.grad)


def shard_groups(grad: torch.Tensor) -> list[torch.distributed.ProcessGroup]:
    """The groups over which a gradient's elements are split."""
    if isinstance(grad, FlatShard):
        axis = grad._run.axis
        return [axis.group] if axis.size > 1 else []
    if isinstance(grad, DTensor):
        for placement in grad.placements:
            if placement.is_partial():
                raise ConfigError("a gradient with a partial placement has no norm yet; redistribute it first")
        mesh = grad.device_mesh
        return [
            mesh.get_group(dim)
            for dim, placement in enumerate(grad.placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        ]
    return []


def clip_local_gradients(
    parts: Sequence[tuple[list[torch.distributed.ProcessGroup], list[torch.Tensor]]],
    grads: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """As `clip_grad_norm_`, of plain tensors, each this rank's part of a gradient.

    Args:
        parts: the groups over which elements are split (none: they are the same on every rank), and parts; the same
            groups in the same order on every rank, whatever parts it has.
        grads: what to scale: the memory that the parts lie in.
        device: where the ranks talk.

    Returns:
        The total norm, in the widest dtype of `grads`; float32 if this rank has none.

    Raises:
        ConfigError: `norm_type` is not positive.
    """
    _check_order(norm_type)
    grads = [as_real(grad) for grad in grads]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms: list[tuple[list[torch.distributed.ProcessGroup], torch.Tensor]] = []
    for groups, tensors in parts:
        filled = [_magnitudes(grad, norm_type) for grad in tensors if grad.numel()]
        # float64 whatever the dtypes here: a rank that holds nothing does not know those of the others
        local = torch._foreach_norm(filled, norm_type, dtype=dtype) if filled else [torch.zeros((), device=device)]
        norms.append((groups, torch.stack([norm.to(device, torch.float64) for norm in local])))
    total = joined_norm(norms, norm_type, device)
    _scale_down(grads, total, max_norm)
    widest = torch.float32
    if grads:
        widest = reduce(torch.promote_types, (grad.dtype for grad in grads))
    return total.to(widest)
