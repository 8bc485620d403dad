"""Communication hooks: a user's function that replaces the reduction of gradients, or that between replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..mesh import Axis
from .power_sgd import GradientSlice, PowerSGDState, Residuals
from .protocol import DONE, Comm, Forwarding, Pending


class HookComm(Forwarding):
    """A `Comm` whose gradients a user's hook reduces and averages.

    The hook is called as PyTorch documents for `register_comm_hook`: without sharding `hook(state, gradient)`, to
    reduce `gradient` in place; with sharding `hook(state, gradient, slice)`, to reduce the whole padded `gradient`
    [world * S] and write this rank's slice [S].

    With a `PowerSGDState` it is called as `hook(state, gradient)` with a `GradientSlice`, in place of the all-reduce
    between replicas alone.

    Args:
        inner: serves everything else.
        state: passed to the hook.
        hook: the user's.

    Attributes:
        between: whether the hook only reduces between replicas.
    """

    scales_itself = True

    def __init__(self, inner: Comm, state: Any, hook: Callable[..., Any]) -> None:
        super().__init__(inner)
        self.state, self.hook = state, hook
        self.kind = f"hook({inner.kind})"
        self.between = isinstance(state, PowerSGDState)

    def reduce(self, axis: Axis, out: torch.Tensor, buffer: torch.Tensor, mean: bool) -> Pending:
        if axis.size == 1 or self.between:
            return self.inner.reduce(axis, out, buffer, mean)
        # Hooks may replace a tensor's memory (`tensor.data = ...`), so they get separate tensors over the same memory.
        reduced = out.detach()
        self.hook(self.state, buffer.detach(), reduced)
        if reduced.data_ptr() != out.data_ptr():
            out.copy_(reduced)
        return DONE

    def plan_all_reduce(
        self,
        axis: Axis,
        tensor: torch.Tensor,
        mean: bool,
        matrices: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        kept: Residuals,
    ) -> Callable[[], Pending]:
        """A function that reduces a slice between replicas at each call; see `GradientSlice`."""
        if not self.between or axis.size == 1:
            return partial(self.all_reduce, axis, tensor, mean)
        return partial(self._call, GradientSlice(tensor, matrices, others, kept, partial(self._average, axis)))

    def _call(self, gradient: GradientSlice) -> Pending:
        self.hook(self.state, gradient)
        return DONE

    def _average(self, axis: Axis, tensor: torch.Tensor) -> Pending:
        return self.inner.all_reduce(axis, tensor, True)

    def all_reduce(self, axis: Axis, tensor: torch.Tensor, mean: bool) -> Pending:
        if self.between:  # this sum is not of a slice
            return self.inner.all_reduce(axis, tensor, mean)
        reduced = tensor.detach()
        self.hook(self.state, reduced)
        if reduced.data_ptr() != tensor.data_ptr():
            tensor.copy_(reduced)
        return DONE

    def scratch_bytes(self, axis: Axis, buffer: torch.Tensor) -> int:
        return self.inner.scratch_bytes(axis, buffer) if self.between else 0
