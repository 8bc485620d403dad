"""How the sharded model is trained: by the user's step or verify's own, watched from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ConfigError
from ...events import record_events
from ...optim import clip_grad_norm_
from .causes import Evidence, Weights
from .held import Held
from .session import Session


@dataclass(frozen=True)
class Plan:
    """`verify`'s arguments that say what is trained and how. See there."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int, int, int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    shard_fn: Callable[[nn.Module], Any]
    optimizer_fn: Callable[[nn.Module], Any]
    train_step_fn: Callable[[nn.Module, Any, list[Any]], Any] | None
    steps: int
    micro_batches: int
    no_sync: bool
    reduction: str
    tokens_fn: Callable[[Any], float] | None
    max_norm: float | None

    def check(self) -> None:
        """Raise for what cannot work, before anything is made.

        Raises:
            ConfigError: names the argument.
        """
        for name in ("model_fn", "batch_fn", "loss_fn", "shard_fn", "optimizer_fn"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"verify: {name} must be callable, got {getattr(self, name)!r}")
        if self.train_step_fn is not None and not callable(self.train_step_fn):
            raise ConfigError(f"verify: train_step_fn must be callable, got {self.train_step_fn!r}")
        for name in ("steps", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"verify: {name} must be an int of at least 1, got {value!r}")
        if self.reduction not in ("mean", "sum", "tokens"):
            raise ConfigError(f'verify: reduction must be "mean", "sum" or "tokens", got {self.reduction!r}')
        if (self.reduction == "tokens") != (self.tokens_fn is not None):
            raise ConfigError(
                'verify: reduction="tokens" and tokens_fn go together; one was given without the other',
                got=f"reduction={self.reduction!r}, {'no tokens_fn' if self.tokens_fn is None else 'a tokens_fn'}",
            )
        if self.train_step_fn is not None and self.no_sync:
            raise ConfigError(
                "verify: no_sync is for verify's own loop; the train_step_fn decides itself when to reduce"
            )

    def weights(self, counts: Weights) -> Weights:
        """How much each micro-batch's loss counts in the reference, by data rank."""
        total = {"mean": float(len(counts) * self.micro_batches), "sum": 1.0}.get(self.reduction)
        if total is not None:
            return [[1.0 / total] * self.micro_batches for _ in counts]
        every = sum(map(sum, counts))
        return [[n / every for n in row] for row in counts]


@dataclass
class Seen:
    """What a step left, on this rank.

    Attributes:
        losses: of each micro-batch, or one mean of them; None if the step told none.
        gradients: this rank's parts when an optimizer first stepped (or at the end), by name.
        evidence: see there.
    """

    losses: list[float] | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=lambda: Evidence(0, frozenset(), 0, None))


def take_step(
    session: Session, plan: Plan, model: nn.Module, optimizer: Any, batches: list[Any], weights: list[float], held: Held
) -> Seen:
    """One training step of the sharded model. What it raises is the user's to know."""
    seen = Seen()
    with record_events() as events, _watched(held, seen) as stepped:
        if plan.train_step_fn is not None:
            seen.losses = _told(plan.train_step_fn(model, optimizer, batches))
        else:
            seen.losses = _own_step(session, plan, model, optimizer, batches, weights)
        if not stepped:
            seen.gradients = _gradients(held)
    known = held.tensors()
    tensors = {id(p) for one in stepped for group in one.param_groups for p in group["params"]}
    names = frozenset(name for tensor in tensors for name in known.get(tensor, ()))
    reduced = sum(event.verb == "reduce" for event in events) if held.table.sharded else None
    seen.evidence = Evidence(len(stepped), names, len(tensors - known.keys()), reduced)
    return seen


def _told(value: Any) -> list[float] | None:
    if value is None:
        return None
    return [float(one) for one in value] if isinstance(value, (list, tuple)) else [float(value)]


def _gradients(held: Held) -> dict[str, torch.Tensor | None]:
    found = {name: held.gradient(row) for name, row in held.rows.items() if held.comparable(row)}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


@contextmanager
def _watched(held: Held, seen: Seen) -> Iterator[list[torch.optim.Optimizer]]:
    """Copies gradients when the first optimizer steps; yields the optimizers that stepped, each time they did.

    Nothing here talks to other ranks: one that does not step must not leave the others waiting.
    """
    stepped: list[torch.optim.Optimizer] = []

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not stepped:
            seen.gradients = _gradients(held)
        stepped.append(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield stepped
    finally:
        handle.remove()


def _own_step(
    session: Session, plan: Plan, model: Any, optimizer: Any, batches: list[Any], weights: list[float]
) -> list[float]:
    """The usual loop, for an engine that averages gradients over ranks."""
    losses = []
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with _synchronised(model, not plan.no_sync or number == len(batches) - 1):
            loss = plan.loss_fn(model, batch)
            (loss * (weight * session.data_world)).backward()
        losses.append(float(loss.detach()))
    if plan.max_norm is not None:
        own = getattr(model, "clip_grad_norm_", None)
        if own is not None:
            own(plan.max_norm)
        else:
            clip_grad_norm_(model.parameters(), plan.max_norm)
    for one in listed(optimizer):
        one.step()
        one.zero_grad()
    return losses


@contextmanager
def _synchronised(model: Any, wanted: bool) -> Iterator[None]:
    """Whether gradients of the backwards in here are reduced."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
        yield
    elif not wanted and hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


def listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, as a list.

    Raises:
        ConfigError: it is something else.
    """
    found: Iterable[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for one in found:
        if not hasattr(one, "step") or not hasattr(one, "param_groups"):
            raise ConfigError(f"verify: optimizer_fn must return an optimizer or a list of them, got {one!r}")
    return list(found)
