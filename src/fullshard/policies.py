"""Settings of a unit besides its layout: dtypes at its boundary, and where sharded state is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .dtypes import LARGEST_OF_8_BITS
from .errors import ConfigError, check_switch, invalid_argument

Check = Literal["first", "step", "every"]
"""When ranks compare what they issue: only if it is new; also at the start of every pass; before every collective."""

Unused = Literal["error", "zeros"]
"""How units that only some ranks run are handled: as an error; or other ranks take part, with zeros as gradients."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Mixed precision at the boundary of a unit (the names and defaults are PyTorch's).

    Attributes:
        param_dtype: dtype of gathers and of forward and backward computation; None keeps each parameter's own dtype.
            The sharded parameters, which the optimizer updates, keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced and, without gradient sync, accumulated; None for the
            parameter's `grad_dtype`, which is its own dtype unless set (PyTorch's rule from 2.15 on, and ours on every
            version; PyTorch used `param_dtype` before). `grad_dtype = None` means the dtype in which the gradient
            arrives. Parameters of one unit with different dtypes here are reduced in the promoted dtype.
        output_dtype: if set, floating-point outputs of the forward are cast to it.
        cast_forward_inputs: whether floating-point inputs of the forward (arguments, keyword arguments, nested
            containers) are cast to `param_dtype`.
        param_dtype_override_fn: called once for each parameter of a unit, with the parameter before it is sharded.
            Returns the parameter's own dtype, in which it is then gathered and used for computation, or `param_dtype`
            or None, which both mean `param_dtype`. Must return the same on every rank.
        gather_dtype: 8-bit dtype (int8, float8_e4m3fn or float8_e5m2) in which parameters are gathered, with a float32
            scale for every 256 elements; the unit computes with them in `param_dtype`. The sharded parameters keep
            their values. None: they are gathered in `param_dtype`. Tensor subclasses that define their own gather keep
            it.
        scatter_dtype: 8-bit dtype in which the ranks of the shard axis send each other their gradients, with scales as
            above; sums are made in float32. None: they are sent in `reduce_dtype`.
        all_reduce_dtype: the same between the replicas of a hybrid mesh (or of `NO_SHARD`), where the sum is rounded a
            second time, on its way back; all replicas get the same bits. None: slices are sent in `reduce_dtype`.
        error_feedback: whether what 8-bit rounding takes from a gradient is kept on this rank and added to the next
            one, so that nothing is lost but delayed (Seide et al. 2014, "1-Bit Stochastic Gradient Descent", section 2;
            Karimireddy et al. 2019, arXiv:1901.09847). Every rank then keeps, for good, one byte for each element of
            the gradients that it sends: of all parameters with `scatter_dtype`, of its slices with `all_reduce_dtype`,
            and a scale for every 256. It is not saved in checkpoints, and starts anew when a unit is copied, moved to
            another device or given new storage (`to_empty`). Only with one of these two dtypes.

    Raises:
        ConfigError: a dtype is not a floating-point `torch.dtype` (or an 8-bit one, respectively), the override is not
            callable, a switch is not a bool, `reduce_dtype` has 8 bits, or `error_feedback` is set without an 8-bit
            reduction.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    gather_dtype: torch.dtype | None = field(default=None, kw_only=True)
    scatter_dtype: torch.dtype | None = field(default=None, kw_only=True)
    all_reduce_dtype: torch.dtype | None = field(default=None, kw_only=True)
    error_feedback: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                remedy = "pass torch.bfloat16, for example, or None to keep the parameters' own dtypes"
                raise invalid_argument(f"MixedPrecisionPolicy.{name}", dtype, "a floating-point torch.dtype", remedy)
        check_reduce_dtype("MixedPrecisionPolicy.reduce_dtype", self.reduce_dtype)
        for name in ("cast_forward_inputs", "error_feedback"):
            check_switch(f"MixedPrecisionPolicy.{name}", getattr(self, name))
        for name in ("gather_dtype", "scatter_dtype", "all_reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in LARGEST_OF_8_BITS:
                expected = " or ".join(map(str, LARGEST_OF_8_BITS))
                remedy = "pass torch.int8, for example; or None, and set param_dtype and reduce_dtype"
                raise invalid_argument(f"MixedPrecisionPolicy.{name}", dtype, expected, remedy)
        if self.error_feedback and self.scatter_dtype is None and self.all_reduce_dtype is None:
            raise ConfigError(
                "MixedPrecisionPolicy(error_feedback=True) needs gradients that are sent in 8 bits.",
                expected="scatter_dtype or all_reduce_dtype",
                got="None for both",
                remedy="pass scatter_dtype=torch.int8, for example; other dtypes are rounded without feedback",
            )
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise ConfigError(
                "MixedPrecisionPolicy.param_dtype_override_fn must be callable.",
                expected="a function of a parameter that returns a dtype or None",
                got=repr(self.param_dtype_override_fn),
            )


def check_reduce_dtype(argument: str, dtype: torch.dtype | None) -> None:
    """Raise for a dtype in which gradients cannot be added: torch has no sums of 8-bit floats."""
    if dtype is not None and dtype.itemsize == 1:
        remedy = "to send gradients in 8 bits, use fully_shard with MixedPrecisionPolicy(scatter_dtype=...)"
        raise invalid_argument(argument, dtype, "a floating-point dtype of at least 16 bits, or None", remedy)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: sharded parameters, gradients and optimizer state stay on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state are stored in host memory; gathers go through the device.

    For parameters of every kind. Shards are copied to the device beside the computation. Of a tensor subclass that
    defines its own gather each tensor is copied, and its `fsdp_pre_all_gather` runs beside the computation too.

    Attributes:
        pin_memory: whether the host memory is page-locked, which makes copies faster and asynchronous.

    Raises:
        ConfigError: not a bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_switch("CPUOffloadPolicy.pin_memory", self.pin_memory)
