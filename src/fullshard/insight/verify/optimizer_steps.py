"""What optimizers do in a training step of the sharded model, and which of them cannot be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...optim.clip import STEPPED_KEY
from ...torch_private.step_hooks import needs_closure
from .model_parts import ModelParts


def check_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse a sharded model's optimizers whose steps cannot be compared.

    Raises:
        ConfigError: names the optimizer.
    """
    for optimizer in optimizers:
        if needs_closure(type(optimizer)):
            raise ConfigError(several_calls(optimizer))
    if any(STEPPED_KEY in stepped.__dict__ for stepped in (*optimizers, *model.parameters())):
        raise ConfigError(
            "verify cannot compare fullshard.step_in_backward(), which frees gradients before they can be read; verify "
            "without it, with optimizer.step() after the backward"
        )


def several_calls(optimizer: torch.optim.Optimizer) -> str:
    """Says that an optimizer's steps cannot be compared, since it calls its closure several times."""
    return (
        f"verify cannot compare steps of {type(optimizer).__name__}, which calls its closure several times in a step; "
        "verify with an optimizer that uses the gradients of one call, such as SGD or AdamW"
    )


class OptimizerSteps:
    """The optimizers' steps within one training step, on this rank.

    Args:
        parts: the model before the step.

    Attributes:
        optimizers: those that stepped, in order.
        gradients: this rank's parts as the first of them got them, by name: after its closure, if it called one.
        refusal: why these steps cannot be compared; None if they can.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: dict[str, torch.Tensor | None] = {}
        self.refusal: str | None = None
        self._parts = parts
        self._closures = 0  # calls that have ended
        self._in_closure = False

    def copy_gradients(self) -> None:
        """Copy the gradients as they are now."""
        for name, row in self._parts.comparable.items():
            grad = self._parts.gradient(row)
            self.gradients[name] = None if grad is None else grad.clone()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A hook before every optimizer's step; replaces a closure by one that copies gradients after it."""
        if not self.optimizers:
            self.copy_gradients()
        self.optimizers.append(optimizer)
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": partial(self._call, optimizer, closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._call, optimizer, args[1]), *args[2:]), kwargs
        return None

    def _call(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        if self._in_closure:  # torch runs hooks again if `step` calls `super().step`
            return closure()
        self._in_closure = True
        try:
            result = closure()
        finally:
            self._in_closure = False
        if self._closures or optimizer is not self.optimizers[0]:  # parameters may have moved before this call
            self.refusal = several_calls(optimizer)
        self._closures += 1
        self.copy_gradients()
        return result
