"""Communication hooks of the wrapper front-end: a user's function that replaces the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..mesh import Axis
from .protocol import DONE, Comm, Costs, Pending


class HookComm:
    """A `Comm` whose gradients a user's hook reduces and averages.

    The hook is called as PyTorch documents for `register_comm_hook`: without sharding `hook(state, gradient)`, to
    reduce `gradient` in place; with sharding `hook(state, gradient, slice)`, to reduce the whole padded `gradient`
    [world * S] and write this rank's slice [S].

    Args:
        inner: serves everything else.
        state: passed to the hook.
        hook: the user's.
    """

    scales_itself = True

    def __init__(self, inner: Comm, state: Any, hook: Callable[..., Any]) -> None:
        self.inner, self.state, self.hook = inner, state, hook
        self.kind = f"hook({inner.kind})"
        self.communicates = inner.communicates

    def gather(self, axis: Axis, out: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self.inner.gather(axis, out, shard)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        if axis.size == 1:
            return self.inner.reduce(axis, out, buffer, mean)
        # Hooks may replace a tensor's memory (`tensor.data = ...`), so they get separate tensors over the same memory.
        reduced = out.detach()
        self.hook(self.state, buffer.detach(), reduced)
        if reduced.data_ptr() != out.data_ptr():
            out.copy_(reduced)
        return DONE

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        reduced = tensor.detach()
        self.hook(self.state, reduced)
        if reduced.data_ptr() != tensor.data_ptr():
            tensor.copy_(reduced)
        return DONE

    def broadcast(self, axis: Axis, tensor: torch.Tensor, source: int) -> Pending:
        return self.inner.broadcast(axis, tensor, source)

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return 0

    def costs(self, axis: Axis) -> Costs:
        return self.inner.costs(axis)
