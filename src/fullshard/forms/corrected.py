"""Operations on DTensors that torch computes wrongly without an error, computed by others that are right.

Wrong with torch 2.13, for tensors split over ranks (`tests/parity/test_penalties.py` compares with one process):

- the mean of a loss (`mse_loss`, ...): its gradient is multiplied by the number of ranks, and uneven parts count alike;
- the gradient of the largest or smallest element by `amax`, `amin` or `norm(inf)`: NaN; on a rank that has no part of
  the tensor any of these, and `max` and `min`, raise while other ranks wait;
- the sum of norms along the split dimension: parts are summed before they are combined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from ..torch_private.local_tensor import keep_mesh, local_of, plain_access, plain_call, spec_of, with_spec

Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]


def corrected(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of one of these operations; NotImplemented: torch's own is right."""
    correct = _CORRECTIONS.get(func)
    return NotImplemented if correct is None else correct(func, types, args, kwargs)


def _mean_loss(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The mean of an element-wise loss: of the losses of all elements."""
    options = dict(zip(_LOSSES[func], args, strict=False), **kwargs)
    if options.get("reduction", "mean") != "mean" or options.get("weight") is not None:
        return NotImplemented  # weighted losses are computed from other operations
    if options.pop("size_average", None) is False or options.pop("reduce", None) is False:
        return NotImplemented
    return func(**{**options, "reduction": "none"}).mean()


def _norm(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """A norm of all elements by infinity; or norms along a dimension, combined over ranks at once."""
    options = dict(zip(("tensor", "order", "dim", "keepdim"), args, strict=False), **kwargs)
    order, dim = options.get("order", options.get("p", options.get("ord"))), options.get("dim")
    tensor = args[0] if args else None
    if not isinstance(tensor, DTensor):
        return NotImplemented
    if dim is None:
        is_vectors = func is not torch.linalg.norm or tensor.ndim == 1  # else a norm of the matrix
        if order not in (math.inf, -math.inf) or not is_vectors:
            return NotImplemented
        dtype = options.get("dtype")
        return _extreme(tensor.abs() if dtype is None else tensor.to(dtype).abs(), order > 0, of_norm=True)
    norms = plain_call(func, types, args, kwargs)
    return norms + 0 if norms.ndim else norms  # which combines the parts; `redistribute` cannot be differentiated


def _extremes(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The largest or smallest of all elements."""
    named = ("tensor", "dim", "keepdim")
    options = dict(zip(named, args, strict=False), **kwargs)
    tensor, dims = args[0] if args else None, options.get("dim", ())
    if not isinstance(tensor, DTensor) or options.keys() - {*named} or options.get("keepdim"):
        return NotImplemented
    if isinstance(dims, torch.Tensor) or (func in _OF_TWO and "dim" in options):  # of two tensors; with places
        return NotImplemented
    dims = {dim % tensor.ndim for dim in (dims if isinstance(dims, Sequence) else (dims,))} if tensor.ndim else ()
    if len(dims) not in (0, tensor.ndim):
        return NotImplemented
    return _extreme(tensor, "max" in func.__name__)


def _extreme(tensor: Any, largest: bool, of_norm: bool = False) -> Any:
    """The largest or smallest element, whose gradient is divided evenly among equal ones, as those of torch.

    Args:
        of_norm: no element is negative.
    """
    values = tensor.detach()
    if not local_of(values).numel():  # torch refuses these, on this rank only
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        neutral = limits.max if not largest else 0 if of_norm else limits.min
        values = with_spec(local_of(values).new_full((1,), neutral), spec_of(values))
    with plain_access():
        extreme = values.max() if largest else values.min()
        if tensor.is_floating_point():  # collectives may leave out NaN
            extreme = extreme + torch.where(values.isnan(), values, 0).sum()
    keep_mesh(extreme, tensor)
    if not _differentiates(tensor):
        return extreme
    chosen = tensor.detach() == extreme
    mean = torch.where(chosen, tensor, 0).sum() / chosen.sum()
    return mean + (extreme - mean.detach())  # the sum is rounded


def _differentiates(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.mse_loss: ("input", "target", "size_average", "reduce", "reduction", "weight"),
    F.smooth_l1_loss: ("input", "target", "size_average", "reduce", "reduction", "beta"),
    F.soft_margin_loss: ("input", "target", "size_average", "reduce", "reduction"),
    F.huber_loss: ("input", "target", "reduction", "delta", "weight"),
}
_OF_TWO = (torch.max, torch.Tensor.max, torch.min, torch.Tensor.min)
_CORRECTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_LOSSES, _mean_loss),
    **dict.fromkeys((torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), _norm),
    **dict.fromkeys((torch.amax, torch.Tensor.amax, torch.amin, torch.Tensor.amin, *_OF_TWO), _extremes),
}
