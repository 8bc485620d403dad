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


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of an optimizer's groups."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


class OptimizerSteps:
    """The optimizers' steps within one training step, on this rank.

    Args:
        parts: the model before the step.

    Attributes:
        optimizers: those that stepped, in order.
        gradients: this rank's parts as the first of them got them, by name: after its closure, if it called one.
        refusal: why these steps cannot be compared; None if they can.
        rates: learning rates at an optimizer's first step, by its id.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: dict[str, torch.Tensor | None] = {}
        self.refusal: str | None = None
        self.rates: dict[int, list[float]] = {}
        self._parts = parts

    def copy_gradients(self) -> None:
        """Copy the gradients as they are now."""
        for name, row in self._parts.comparable.items():
            grad = self._parts.gradient(row)
            self.gradients[name] = None if grad is None else grad.clone()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A hook before every optimizer's step; replaces a closure by one that copies gradients after it."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if isinstance(closure, _Closure):  # torch runs hooks again if `step` calls `super().step`
            return None
        if is_first := not self.optimizers:
            self.copy_gradients()
        self.optimizers.append(optimizer)
        self.rates.setdefault(id(optimizer), rates_of(optimizer))
        if not callable(closure):
            return None
        replaced = _Closure(closure, partial(self._after_call, optimizer, is_first))
        if "closure" in kwargs:
            return args, {**kwargs, "closure": replaced}
        return (args[0], replaced, *args[2:]), kwargs

    def _after_call(self, optimizer: torch.optim.Optimizer, is_first: bool, calls: int) -> None:
        """Copy the gradients that a closure left for the first step, if it is called once, as by most optimizers."""
        if calls > 1:
            self.refusal = several_calls(optimizer)
        elif is_first:
            self.copy_gradients()
        elif optimizer is not self.optimizers[0]:  # whose step has moved parameters before this backward
            self.refusal = (
                f"verify cannot compare the closure of a second optimizer ({type(optimizer).__name__}), which runs "
                "after the first one's step; verify a step whose backward comes before both"
            )


class _Closure:
    """A closure, and what is done after each call with the number of calls."""

    def __init__(self, closure: Callable[[], Any], after: Callable[[int], None]) -> None:
        self._closure, self._after, self._calls = closure, after, 0

    def __call__(self) -> Any:
        result = self._closure()
        self._calls += 1
        self._after(self._calls)
        return result
