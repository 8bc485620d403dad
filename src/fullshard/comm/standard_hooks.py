"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`, under PyTorch's names.

`torch.distributed.algorithms._comm_hooks.default_hooks` works as well, but its compressing hooks run on CUDA only.
All average over the ranks of the state's process group, dividing before and after the sum by factors near its root,
so that float16 neither overflows nor underflows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..errors import ConfigError


class DefaultState:
    """The state that the hooks need: the group and the factors to divide by.

    Args:
        process_group: the ranks to average over, those over which the instances were wrapped.

    Attributes:
        world_size: the number of these ranks.
        gradient_predivide_factor, gradient_postdivide_factor: applied before and after the sum; their product is
            `world_size`.

    Raises:
        ConfigError: no process group was given.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ConfigError(f"Expected to pass in an explicit ProcessGroup to {type(self).__name__}.")
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        factor = 1
        while self.world_size % factor == 0 and self.world_size / factor > factor:
            factor *= 2
        self.gradient_predivide_factor = float(factor)
        self.gradient_postdivide_factor = self.world_size / factor


class LowPrecisionState(DefaultState):
    """`DefaultState` with the dtype to return to after a compressed reduction.

    Args:
        process_group: see `DefaultState`.
        parameter_type: dtype of the parameters. Gradients keep the dtype that they arrive in, which is the same unless
            mixed precision says otherwise.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average `grad` in place over all ranks. For NO_SHARD."""
    grad.div_(state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average `grad` [world * S] over all ranks; this rank's slice goes to `output` [S]. For sharded strategies."""
    grad.div_(state.gradient_predivide_factor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
    reduce_scatter(output, grad, group=state.process_group)
    output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Like the hooks above, but communicate float16: half the bytes of float32."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Like the hooks above, but communicate bfloat16: half the bytes of float32."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    low = grad.to(dtype)
    if output is None:
        allreduce_hook(state, low)
        grad.copy_(low)
    else:
        reduced = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, low, reduced)
        output.copy_(reduced)
