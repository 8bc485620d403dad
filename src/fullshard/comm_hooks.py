"""Communication hooks for `register_comm_hook`, under PyTorch's names."""

from .comm.power_sgd import GradientSlice, PowerSGDState, powerSGD_hook
from .comm.standard_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

__all__ = [
    "DefaultState",
    "GradientSlice",
    "LowPrecisionState",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "powerSGD_hook",
    "reduce_scatter_hook",
]
