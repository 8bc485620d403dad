"""Operations on DTensors that torch computes wrongly without an error, computed by others that are right.

Wrong with torch 2.13, for tensors split over ranks (`tests/parity/test_penalties.py` compares with one process):

- the mean of a loss (`mse_loss`, ...): its gradient is multiplied by the number of ranks, and uneven parts count alike;
- the gradient of the largest or smallest element by `amax`, `amin` or `norm(inf)`: NaN; where a rank's element is NaN,
  the value; on a rank that has no part of the tensor any of these, `max`, `min`, `argmax` and `argmin` raise while
  other ranks wait;
- the sum of norms along the split dimension, or stacked: parts are summed before they are combined;
- what is computed from `any`: each rank's answer counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..torch_private.local_tensor import keep_mesh, local_of, plain_access, plain_call, spec_of, with_spec

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]


def corrected(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of one of these operations; NotImplemented: torch's own is right."""
    correct = _CORRECTIONS.get(func)
    return NotImplemented if correct is None else correct(func, types, args, kwargs)


def covers_all(dims: Any, ndim: int) -> bool:
    """Whether a reduction over `dims`, as users write them, is one over all elements; False if they are invalid."""
    if dims is None or dims in ((), []):
        return True
    listed = [dims] if isinstance(dims, int) else [*dims]
    valid = all([-max(ndim, 1) <= dim < max(ndim, 1) for dim in listed])
    return valid and len({dim % max(ndim, 1) for dim in listed}) == len(listed) == max(ndim, 1)


def _bound(names: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments by name, under the names of torch's Python functions."""
    renamed = {"input": "tensor", "x": "tensor", "A": "tensor", "p": "order", "ord": "order"}
    return dict(zip(names, args, strict=False), **{renamed.get(name, name): value for name, value in kwargs.items()})


def _mean_loss(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The mean of an element-wise loss: of the losses of all elements."""
    options: dict[str, Any] = dict(zip(_LOSSES[func], args, strict=False), **kwargs)
    reduction, legacy = options.get("reduction", "mean"), [options.pop(name, None) for name in _LEGACY]
    if legacy != [None, None]:  # as torch reads them
        averages, reduces = [value is None or value for value in legacy]
        reduction = "none" if not reduces else "mean" if averages else "sum"
    if reduction != "mean":
        return NotImplemented
    if func in _BY_SUM_OF_WEIGHTS and options.get("weight") is not None:
        return NotImplemented  # computed from other operations
    return func(**{**options, "reduction": "none"}).mean()


def _norm(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """A norm of all elements by infinity; or norms along a dimension, combined over ranks at once."""
    options = _bound(("tensor", "order", "dim", "keepdim"), args, kwargs)
    tensor, order, dim = (options.get(name) for name in ("tensor", "order", "dim"))
    if not isinstance(tensor, DTensor):
        return NotImplemented
    of_matrix = func is torch.linalg.norm and tensor.ndim == 2 and order is not None and not isinstance(dim, int)
    if order in (math.inf, -math.inf) and covers_all(dim, tensor.ndim) and not of_matrix and "out" not in options:
        dtype = options.get("dtype")
        magnitudes = tensor.abs() if dtype is None else tensor.to(dtype).abs()
        return _shaped(_extreme(magnitudes, order > 0, of_norm=True), tensor, options)
    if dim is None:
        return NotImplemented
    norms = plain_call(func, types, args, kwargs)
    return norms + 0 if norms.ndim else norms  # which combines the parts; `redistribute` cannot be differentiated


def _joined(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Norms of which ranks have parts, in one tensor: combined, as DTensor would sum their parts."""
    joined = plain_call(func, types, args, kwargs)
    placements = joined.placements if isinstance(joined, DTensor) else ()
    return joined + 0 if any([p.is_partial() and type(p) is not Partial for p in placements]) else joined


def _distance(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.dist`, the norm of a difference."""
    options = _bound(("tensor", "other", "order"), args, kwargs)
    if not {"tensor", "other"} <= options.keys():
        return NotImplemented  # torch says what is missing
    return (options["tensor"] - options["other"]).norm(options.get("order", 2))


def _extremes(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The largest or smallest of all elements."""
    options = _bound(("tensor", "dim", "keepdim"), args, kwargs)
    tensor, dims = options.get("tensor"), options.get("dim")
    if not isinstance(tensor, DTensor) or options.keys() - {"tensor", "dim", "keepdim"}:
        return NotImplemented
    if isinstance(dims, torch.Tensor) or (func in _OF_TWO and "dim" in options):  # of two tensors; with places
        return NotImplemented
    largest, local = "max" in func.__name__, local_of(tensor)
    if covers_all(dims, tensor.ndim):
        return _shaped(_extreme(tensor, largest), tensor, options)
    if local.numel() or (tensor.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    listed: Any = [dims] if isinstance(dims, int) else dims
    reduced = {dim % tensor.ndim for dim in listed}
    shape = [1 if size == 0 and dim in reduced else size for dim, size in enumerate(local.shape)]
    values = local.new_full(shape, _neutral(tensor, largest))
    del options["tensor"]
    return plain_call(func, types, (with_spec(values, spec_of(tensor)),), options)


def _any(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Whether not all elements are zero."""
    options = {"input": args[0], **kwargs} if args else {**kwargs}
    tensor = options.pop("input")
    if "out" in options or not isinstance(tensor, DTensor):
        return NotImplemented
    found = ~(tensor == 0).all(*args[1:], **options)
    return found.to(torch.uint8) if tensor.dtype is torch.uint8 else found


def _place(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Where the largest or smallest element is; from the whole tensor, on every rank."""
    options = {"input": args[0], **kwargs} if args else {**kwargs}
    tensor: Any = options.pop("input")
    if not isinstance(tensor, DTensor):
        return NotImplemented
    place = getattr(torch, func.__name__)(tensor.detach().full_tensor(), *args[1:], **options)  # type: ignore[attr-defined]
    return DTensor.from_local(place, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False)


def _allclose(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> bool:
    """`torch.allclose`, for which DTensor has no rule."""
    return bool(torch.isclose(*args, **kwargs).all())


def _shaped(value: Any, tensor: torch.Tensor, options: Kwargs) -> Any:
    return value.reshape([1] * tensor.ndim) if options.get("keepdim") else value


def _extreme(tensor: Any, largest: bool, of_norm: bool = False) -> Any:
    """The largest or smallest element of all ranks, NaN if any is.

    Args:
        of_norm: no element is negative.
    """
    values, local = tensor, local_of(tensor)
    if not local.numel():  # torch refuses these, on this rank only
        values = with_spec(local.new_full((1,), _neutral(tensor, largest, of_norm)), spec_of(tensor))
    with torch.no_grad(), plain_access():
        extreme = values.max() if largest else values.min()
        if tensor.is_floating_point():  # collectives may leave out NaN
            extreme = extreme + torch.where(values.isnan(), values, 0).sum()
    keep_mesh(extreme, tensor)
    return _Extreme.apply(tensor, extreme) if tensor.requires_grad and torch.is_grad_enabled() else extreme


def _neutral(tensor: torch.Tensor, largest: bool, of_norm: bool = False) -> float:
    """What a rank without elements contributes to an extreme."""
    if tensor.is_floating_point():
        return (0.0 if of_norm else -math.inf) if largest else math.inf
    limits = torch.iinfo(torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)
    return limits.min if largest else limits.max


class _Extreme(torch.autograd.Function):
    """The extreme element of a tensor; its gradient is divided evenly among equal elements, as torch divides it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, extreme: Any) -> Any:
        ctx.save_for_backward(tensor, extreme)
        return extreme.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        tensor, extreme = ctx.saved_tensors
        chosen = (tensor == extreme).to(grad.dtype)
        return grad * (chosen / chosen.sum()), None


_LEGACY = ("size_average", "reduce")
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.mse_loss: ("input", "target", *_LEGACY, "reduction", "weight"),
    F.smooth_l1_loss: ("input", "target", *_LEGACY, "reduction", "beta"),
    F.soft_margin_loss: ("input", "target", *_LEGACY, "reduction"),
    F.huber_loss: ("input", "target", "reduction", "delta", "weight"),
    F.binary_cross_entropy: ("input", "target", "weight", *_LEGACY, "reduction"),
    F.binary_cross_entropy_with_logits: ("input", "target", "weight", *_LEGACY, "reduction", "pos_weight"),
}
_BY_SUM_OF_WEIGHTS = (F.mse_loss, F.huber_loss)
"""Losses whose mean is divided by the sum of the weights."""
_OF_TWO = (torch.max, torch.Tensor.max, torch.min, torch.Tensor.min)
_CORRECTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_LOSSES, _mean_loss),
    **dict.fromkeys((torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), _norm),
    **dict.fromkeys((torch.stack, torch.cat, torch.hstack, torch.vstack), _joined),
    **dict.fromkeys((torch.dist, torch.Tensor.dist), _distance),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), _allclose),
    **dict.fromkeys((torch.any, torch.Tensor.any), _any),
    **dict.fromkeys((torch.argmax, torch.Tensor.argmax, torch.argmin, torch.Tensor.argmin), _place),
    **dict.fromkeys((torch.amax, torch.Tensor.amax, torch.amin, torch.Tensor.amin, *_OF_TWO), _extremes),
}
