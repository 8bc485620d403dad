"""One forward call of a unit, from its inputs to its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..torch_private.tensor_hooks import on_gradient

if TYPE_CHECKING:
    from .hooks import UnitHooks


class Call:
    """One forward call whose backward is still to come. Held by the autograd graph alone: dies with it."""

    __slots__ = ("done", "hooks")

    def __init__(self, hooks: UnitHooks) -> None:
        self.hooks = hooks
        self.done = False
        hooks.open_calls += 1

    def __del__(self) -> None:
        if not self.done:
            self.hooks.open_calls -= 1

    def before_backward(self, grad: torch.Tensor) -> None:
        self.hooks.before_backward()

    def after_backward(self, grad: torch.Tensor) -> None:
        hooks = self.hooks
        if not self.done:
            self.done = True
            hooks.open_calls -= 1
        if grad.requires_grad:  # create_graph: whoever differentiates this gradient needs the unit's parameters first
            on_gradient(grad, self.before_backward)
        if hooks.in_backward:
            hooks.after_backward()
