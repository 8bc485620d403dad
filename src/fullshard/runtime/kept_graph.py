"""The graph that a backward with `create_graph` leaves, and the backward that differentiates it.

The reduced gradients that it leaves are reduced over ranks outside autograd. They are correct as constants, but a loss
computed from them would silently lose its gradient, so they carry a node that raises when a backward reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ..shard import Unit
from ..torch_private.tensor_hooks import on_gradient
from .messages import second_order
from .trace import Period


class Graph:
    """The graph that a backward of a `Call` left.

    The backward that differentiates it needs the unit's parameters from when a gradient of an input gets its gradient
    until those of all outputs have theirs. Autograd may be done with the forward's own graph before: on an accelerator
    a thread runs the backward that numbers nodes for itself, and nodes run in the order of their numbers.

    Attributes:
        backward: the one that left it.
        outputs: the number of gradients of outputs that have a graph.
    """

    def __init__(self, backward: object) -> None:
        self.backward, self.outputs = backward, 0
        self._within: object = None  # the backward that differentiates it
        self._left = 0  # outputs whose gradients have no gradient in it yet

    def begin(self, call: Any, gradient: torch.Tensor) -> None:
        """A gradient of an input got its gradient."""
        call.before_backward(gradient)
        period, backward = call.period, call.runner.root.backward
        if self.outputs and self._within is not backward:
            self._within, self._left = backward, self.outputs
            count = _count(period, backward)
            period.again = backward, count + 1
            period.closes_late = bool(count) and period.closes_late

    def end(self, call: Any, gradient: torch.Tensor) -> None:
        """A gradient of an output got its gradient."""
        period, root = call.period, call.runner.root
        if root is None or root.backward is None or root.backward is not self._within or not self._left:
            return
        self._left -= 1
        count = _count(period, root.backward)
        if self._left or not count:
            return
        period.again = root.backward, count - 1
        if count == 1 and period.closes_late:
            period.closes_late = False
            call.runner.finish_call(call)


def stays(period: Period, backward: object) -> bool:
    """Whether a unit that would be closed must stay gathered: this backward still differentiates its earlier ones.

    It is closed when that is over.
    """
    if not _count(period, backward):
        return False
    period.closes_late = True
    return True


def _count(period: Period, backward: object) -> int:
    """How many graphs of the period this backward has begun to differentiate and not ended."""
    within, count = getattr(period, "again", (None, 0))
    return count if within is backward else 0


def keep_from(call: Any, backward: object, gradient: torch.Tensor) -> None:
    """Note the gradient of an output of a `Call`, in a backward with `create_graph`."""
    graph = _graph_of(call, backward)
    graph.outputs += 1
    on_gradient(gradient, partial(graph.end, call))


def keep_until(call: Any, backward: object, gradient: torch.Tensor) -> None:
    """Note the gradient of an input."""
    on_gradient(gradient, partial(_graph_of(call, backward).begin, call))


def _graph_of(call: Any, backward: object) -> Graph:
    if call.graph is None or call.graph.backward is not backward:
        call.graph = Graph(backward)  # which does not hold the call: the graph's hooks do
    graph: Graph = call.graph
    return graph


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
