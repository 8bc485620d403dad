"""Which dtypes a unit is gathered, computed and reduced in, and the casts at a unit's boundary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError
from ..structure import map_tensors


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Mixed precision at the boundary of a unit (the names and defaults are PyTorch's).

    Attributes:
        param_dtype: dtype of gathers and of forward and backward computation; None keeps each parameter's own.
            The sharded parameters, which the optimizer updates, keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced and, without gradient sync, accumulated; None means
            the dtype of computation (as in PyTorch up to 2.14; from 2.15 on PyTorch's means the parameter's own).
        output_dtype: if given, floating-point outputs of the forward are cast to it.
        cast_forward_inputs: whether floating-point inputs of the forward (arguments, keyword arguments, nested
            containers) are cast to `param_dtype`.

    Raises:
        ConfigError: if a dtype is not a floating-point `torch.dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype, got {dtype!r}")


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; integers and masks stay as they are."""
    return map_tensors(partial(_cast, dtype), value)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
