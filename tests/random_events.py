"""What a seed chooses to happen to a random model, and how: the plan of a run, and what must leave no trace in it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from random_models import INPUTS, say_who
from ways import synced

POSSIBLE = (
    *("two losses", "no sync", "view", "clip", "errors", "evaluate", "unshard", "load", "copy", "keep"),
    *("toggle", "look first", "input", "penalty", "two backwards", "interleaved"),
)
MORE = ("skip", "change", "hold", "discard", "zero", "memory")  # drawn only where `more` is asked for


class Accumulating(Protocol):
    """A plan of how many micro-batches a step has, and of what happens in it."""

    micro_batches: int
    chosen: set[str]


@dataclass
class Plan:
    """The settings and events that a seed stands for."""

    draw: random.Random
    units: list[str]
    flat_parameters: bool
    more: bool = False
    micro_batches: int = field(init=False)
    chosen: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.micro_batches = self.draw.choice([1, 1, 2])
        self.chosen = {name for name in POSSIBLE if self.draw.random() < 0.3}
        if self.more:
            self.chosen |= {name for name in MORE if self.draw.random() < 0.3}
        if "change" in self.chosen:  # what is written to whole parameters after unshard() is refused by name
            self.chosen.discard("unshard")

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Momentum and decay where a parameter without a gradient is passed over, as it is in one process."""
        if self.flat_parameters or "view" in self.chosen:
            return torch.optim.SGD(params, lr=0.05)
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)

    def leaves_zeros(self) -> bool:
        """Whether gradients may be zeroed instead of dropped; not where the sharded model alone drops them as well."""
        return "zero" in self.chosen and not self.chosen & {"discard", "memory", "errors"}

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss + model(x * 0.5).mean() if "two losses" in self.chosen else loss

    def backward(self, model: nn.Module, x: Tensor, share: float, first: bool = False) -> Tensor:
        """Forward and backward as chosen; returns the loss, of which `share` was differentiated."""
        if "look first" in self.chosen:
            with torch.no_grad():
                model(x)
        x.requires_grad_("input" in self.chosen or "penalty" in self.chosen)
        loss = self.loss(model, x)
        if "zero" in self.chosen and first:  # no gradient is there yet
            model.zero_grad()
        if "penalty" in self.chosen and not any(getattr(module, "reentrant", False) for module in model.modules()):
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        if "two backwards" in self.chosen:
            (share * 0.25 * loss).backward(retain_graph=True)
            (share * 0.75 * loss).backward()
        elif "interleaved" in self.chosen:
            other = self.loss(model, x * 2)
            (share * loss).backward()
            (share * other).backward()
        else:
            (share * loss).backward()
        return loss.detach()

    def toggle(self, *models: nn.Module) -> None:
        """Freeze some of the body's parameters and train others, in all models alike."""
        if (
            "toggle" in self.chosen
            and "view" not in self.chosen
            and not isinstance(models[0], FullyShardedDataParallel)
        ):
            for parameters in zip(*(model.body.parameters() for model in models), strict=True):
                trains = self.draw.random() < 0.6
                for parameter in parameters:
                    parameter.requires_grad_(trains)


def batch(seed: int, step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(((seed * 31 + step) * 7 + number) * 13 + rank)
    return torch.randn(3, INPUTS, generator=generator, dtype=torch.float64)


@contextlib.contextmanager
def failing(module: nn.Module, in_backward: bool) -> Iterator[None]:
    """`module` raises KeyError in its forward, or when its output's gradient comes."""

    def fail(*_: object) -> None:
        raise KeyError("of the user")

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not in_backward:
            fail()
        if output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(hook)
    with contextlib.suppress(KeyError):
        yield
    handle.remove()


@contextlib.contextmanager
def short_of_memory(nth: int) -> Iterator[None]:
    """The nth piece of memory that is asked for (grown, or made empty) is not there; the user sees that error."""
    asked = 0
    resize = torch.UntypedStorage.resize_

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked == nth:
            raise torch.OutOfMemoryError(f"no memory for piece {nth}")

    def growing(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes > storage.nbytes():
            ask()
        return resize(storage, nbytes)

    def making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **keywords: Any) -> Tensor:
            ask()
            return make(*args, **keywords)

        return made

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", growing),
        mock.patch.object(torch, "empty", making(torch.empty)),
        mock.patch.object(torch, "empty_like", making(torch.empty_like)),
        contextlib.suppress(torch.OutOfMemoryError),
    ):
        yield


def give_up(plan: Plan, model: nn.Module, seed: int, step: int) -> None:
    """Micro-batches whose gradients are thrown away: before a step, after a failure, with sync or without."""
    if "skip" in plan.chosen:
        plan.loss(model, batch(seed, 11, step, dist.get_rank()))
    if "discard" in plan.chosen:
        with synced(model, plan.draw.random() >= 0.5):
            plan.backward(model, batch(seed, 12, step, dist.get_rank()), 1.0)
        model.zero_grad()
    if "memory" in plan.chosen:
        say_who(model, step, 0)  # all ranks do the same, so that all fail at the same point
        with short_of_memory(plan.draw.randint(1, 30)):
            plan.loss(model, batch(seed, 13, step, 0)).backward()
        model.zero_grad()
        say_who(model, step, dist.get_rank())


def evaluate(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)
    model.train()


def unshard(model: nn.Module, unit: Any, writeback: bool) -> None:
    """Look at whole parameters: of all of the wrapper's, which are written back or not, or of a unit, which stay so."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
            [parameter.sum() for parameter in model.parameters()]
    else:
        unit.unshard()


def accumulate(plan: Accumulating, model: nn.Module, step: int, backward: Callable[[int], Tensor]) -> list[Tensor]:
    """Forward and backward of this rank's micro-batches of a step, each by its number; their losses."""
    losses = []
    for number in range(plan.micro_batches):
        say_who(model, step + number, dist.get_rank())
        with synced(model, number == plan.micro_batches - 1 or "no sync" not in plan.chosen):
            losses.append(backward(number))
    return losses


def between_steps(plan: Plan, model: nn.Module, seed: int, step: int) -> None:
    """What must leave no trace in the training."""
    if "errors" in plan.chosen and step == 0:
        victim = plan.draw.choice([module for module in model.modules() if isinstance(module, nn.Linear)])
        for in_backward in (False, True):
            with failing(victim, in_backward):
                plan.loss(model, batch(seed, 7, 0, 0)).backward()
            model.zero_grad()
    if "unshard" in plan.chosen:
        units = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
        unshard(model, plan.draw.choice(units) if units else None, writeback=step == 0)
    if "copy" in plan.chosen and step == 1 and not plan.flat_parameters:
        x = batch(seed, 3, 0, 0)
        assert copy.deepcopy(model)(x).equal(model(x))
    if "load" in plan.chosen and step == 1:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(saved)
    if "evaluate" in plan.chosen:
        evaluate(model, batch(seed, 5, 0, 0))


def change(plan: Plan, model: nn.Module, reference: nn.Module) -> None:
    """All weights scaled, in one of the ways in which programs do it; the model computes with the new ones."""
    if "change" not in plan.chosen:
        return
    factor = plan.draw.choice([0.9, 1.1])
    way = plan.draw.choice(["mul_", "detach", "foreach", "local", "copy_", "data", "load"])
    params = list(model.parameters())
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(factor)
        if way == "load":
            model.load_state_dict({name: value.detach().clone() * factor for name, value in model.state_dict().items()})
        elif way == "foreach":
            torch._foreach_mul_(params, factor)
        for parameter in params if way not in ("load", "foreach") else ():
            if way == "mul_":
                parameter.mul_(factor)
            elif way == "detach":
                parameter.detach().mul_(factor)
            elif way == "local":
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(factor)
            elif way == "copy_":
                parameter.copy_(parameter.detach().clone() * factor)
            else:
                parameter.data = parameter.detach().clone() * factor


@dataclass
class Held:
    """Gradients that the user keeps, and what they were."""

    tensors: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def hold(self, model: nn.Module, form: str) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if (grad := parameter.grad) is not None:
                    local = grad.to_local() if hasattr(grad, "to_local") else grad
                    self.tensors.append({"itself": grad, "local": local, "view": local.view(-1)}[form])
                    self.values.append(local.flatten().clone())

    def check(self) -> None:
        for tensor, value in zip(self.tensors, self.values, strict=True):
            now = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            assert now.flatten().equal(value), "a gradient that the user kept has changed"
