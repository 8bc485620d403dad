"""Refuses second derivatives of the reduced gradients that a backward with `create_graph` leaves.

These gradients are reduced over ranks outside autograd. They are correct as constants, but a loss computed from them
would silently lose its gradient, so they carry a node that raises when a backward reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..shard import Unit
from .messages import second_order


class _Reduced(torch.autograd.Function):
    """A reduced gradient as an autograd node whose backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise second_order(ctx.name)


def refuse_second_derivatives(units: Iterable[Unit]) -> None:
    """Make differentiating the current `.grad` of these units raise `PhaseError`. Call with gradients enabled."""
    anchor = torch.zeros((), device="cpu", requires_grad=True)
    for unit in units:
        for bucket in unit.buckets:
            flat = bucket.flat_parameter
            shown = [member.sharded for member in bucket.members] if flat is None else [flat]
            for parameter in shown:
                gradient = parameter.grad
                if gradient is not None and not gradient.requires_grad:
                    name = ", ".join(
                        member.name for member in bucket.members if flat is not None or member.sharded is parameter
                    )
                    parameter.grad = _Reduced.apply(anchor, gradient, name)
