"""The unsharded model on the first rank, trained on the batches of all ranks, one after another.

Memory of that rank besides its own shards: the whole model, its gradients and optimizer state, two copies of its
buffers per data rank (what batch norm counts differs between ranks), and the batches of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .apart import rms
from .causes import Weights
from .held import Held, buffers_of
from .session import Session

Loss = Callable[[nn.Module, Any], torch.Tensor]
Batches = list[list[Any]]  # of each data rank, its micro-batches of one step


@dataclass(frozen=True)
class Suspect:
    """A trained parameter that gets no gradient though the loss depends on it."""

    parameter: str
    change: float  # of the loss
    moved: float  # by which every element was moved, root mean square


class Reference:
    """See the module's docstring.

    Args:
        session: the ranks; this one is the first.
        model: unsharded, on the device where ranks compute.
        optimizers: of its parameters.
        loss_fn: `loss_fn(model, batch)`.
        max_norm: gradients are clipped to this total norm before a step; None: they are not.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss_fn: Loss,
        max_norm: float | None,
    ) -> None:
        self.session, self.model, self.optimizers = session, model, optimizers
        self.loss_fn, self.max_norm = loss_fn, max_norm
        self.held = Held(model)
        self.parameters = {name: row.parameter for name, row in self.held.rows.items()}
        start = self._buffers_now()
        self.buffers = [dict(start) for _ in range(session.data_world)]
        self.after = self.buffers

    def run(self, step: int, batches: Batches, weights: Weights) -> list[list[float]]:
        """Forward and backward on every batch; leaves gradients of the weighted sum. Returns the losses."""
        self.model.zero_grad()
        self.after = []
        losses = []
        for number, (own, weight) in enumerate(zip(batches, weights, strict=True)):
            losses.append([float(loss) for loss in self._one_rank(step, number, own, weight)])
            self.after.append(self._buffers_now())
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return losses

    def _one_rank(self, step: int, number: int, batches: list[Any], weights: list[float]) -> Iterable[torch.Tensor]:
        self._restore(number)
        self.session.seed_with("step", step, number)
        for batch, weight in zip(batches, weights, strict=True):
            loss = self.loss_fn(self.model, batch)
            (loss * weight).backward()
            yield loss.detach()

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in buffers_of(self.model).items()}

    def _restore(self, number: int) -> None:
        with torch.no_grad():
            for name, buffer in buffers_of(self.model).items():
                buffer.copy_(self.buffers[number][name])

    def accept(self) -> None:
        """What the last `run` left in buffers is what the next step begins with."""
        self.buffers = self.after

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Every parameter's gradient."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def contributions(self, step: int, batches: Batches, name: str, where: torch.Tensor) -> list[list[torch.Tensor]]:
        """What each micro-batch's unweighted loss alone gives as a parameter's gradient; `.grad`s are lost.

        Args:
            step, batches: as for `run`.
            name: of the parameter.
            where: [n], numbers of the elements that are wanted.

        Returns:
            For each data rank and micro-batch, [n] in double precision.
        """
        parameter = self.parameters[name]
        found: list[list[torch.Tensor]] = []
        for number, own in enumerate(batches):
            self._restore(number)
            self.session.seed_with("step", step, number)
            found.append([])
            for batch in own:
                self.model.zero_grad()
                self.loss_fn(self.model, batch).backward()
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
                found[-1].append(grad.reshape(-1)[where.to(grad.device)].to("cpu", torch.float64))
        self.model.zero_grad()
        return found

    def without_gradient(self, batch: Any) -> list[Suspect]:
        """Trained parameters without a gradient, or with one of zeros, on which the loss depends.

        Costs nothing if there is no such parameter, else two forwards, and two more for each that is found. What counts
        is a change of the loss in proportion to a small change of the parameter: not one of its square (a gate that is
        zero), nor none (the other factor is zero).
        """
        idle = {
            name: p
            for name, p in self.parameters.items()
            if p.requires_grad and p.is_floating_point() and p.numel() and (p.grad is None or not bool(p.grad.any()))
        }
        if not idle:
            return []
        base = self._loss(batch)
        if self._loss(batch) != base:
            return []  # it is another one each time: nothing can be told
        if len(idle) > 1 and self._moved(batch, [*idle.values()], 1.0) == base:
            return []
        found = []
        for name, parameter in idle.items():
            far, near = (self._moved(batch, [parameter], size) - base for size in (1.0, 0.125))
            if abs(far) > 1e-5 * abs(base) and abs(far) < 24 * abs(near):
                found.append(Suspect(name, far, _reach(parameter)))
        return found

    @torch.no_grad()
    def _loss(self, batch: Any) -> float:
        self._restore(0)
        self.session.seed_with("step", 0, 0)
        return float(self.loss_fn(self.model, batch))

    @torch.no_grad()
    def _moved(self, batch: Any, parameters: list[torch.Tensor], size: float) -> float:
        """The loss with these parameters moved in a random direction."""
        kept = [parameter.clone() for parameter in parameters]
        generator = torch.Generator().manual_seed(self.session.seed)
        try:
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise, alpha=size * _reach(parameter))
            return self._loss(batch)
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _reach(parameter: torch.Tensor) -> float:
    return 0.02 * max(rms([parameter]), 0.01)
