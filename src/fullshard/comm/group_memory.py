"""Communication buffers in memory that a process group's backend allocates itself.

Private torch API: `ProcessGroup._get_backend`, to reach the backend's `supports_tensor_alloc` and `allocate_tensor`.
The public alternative is `torch.distributed`'s default memory, which is used unless the user requests this.
`tests/test_private_api.py` fails when the API is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import Axis
from ..torch_private.collectives import all_gather, reduce_scatter
from .messages import no_group_memory


class GroupMemory:
    """A collective (`comm.custom.AllGather`, `ReduceScatter`) through the backend's own memory.

    Args:
        axis: whose group communicates.
        device: of the buffers.

    Raises:
        ConfigError: the backend has no such memory.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        backend: Any = None
        if axis.backend != "fake" and hasattr(axis.group, "_get_backend"):
            backend = axis.group._get_backend(device)
        if backend is None or not getattr(backend, "supports_tensor_alloc", lambda _: False)(device):
            raise no_group_memory(axis.backend, device)
        self.backend = backend

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `size` in the backend's memory."""
        numel = math.prod(size)
        buffer: torch.Tensor = self.backend.allocate_tensor(numel, dtype=dtype, device=device)
        return buffer.view(tuple(size))


class GatherInGroupMemory(GroupMemory):
    """The all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return all_gather(output_tensor, input_tensor, group)()


class ReduceInGroupMemory(GroupMemory):
    """The reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return reduce_scatter(output_tensor, input_tensor, group, op == dist.ReduceOp.AVG)()
