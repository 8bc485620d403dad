"""`requires_grad` switched between a forward and its backward: gradients are those of the unsharded model.

An adapter in preference training does this every step:

    policy = model(x)                    with gradients
    adapter.requires_grad_(False)        switched off
    with no_grad(): reference = model(x)
    adapter.requires_grad_(True)         and on again
    loss(policy, reference).backward()   the policy's forward has gradients to give
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training import assert_same
from ways import (
    LAYOUTS,
    batch,
    but_last,
    every_way,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    shard,
    value_problems,
)


def switch(model: nn.Module, which: str, on: bool) -> None:
    """Of all parameters, of one unit's, of the weights; or of the root's own, which stay gathered after forward."""
    if which == "all":
        model.requires_grad_(on)
    elif which == "a unit":
        inner(model)[0].requires_grad_(on)
    elif which == "the root's own":
        for name, parameter in inner(model).named_parameters():
            if name.startswith("2.") or name == "_flat_param":
                parameter.requires_grad_(on)
    else:
        for name, parameter in model.named_parameters():
            if "weight" in name:
                parameter.requires_grad_(on)


WHICH = ("all", "a unit", "the root's own", "weights")


def which_of(way: str) -> list[str]:
    """A `FlatParameter` is switched as one."""
    return [which for which in WHICH if which != "weights" or way != "wrapper"]


# What happens between a forward with gradients and its backward. `other` is another batch.


def nothing(model: nn.Module, which: str, other: Tensor) -> None:
    switch(model, which, False)
    switch(model, which, True)


def a_reference_forward(model: nn.Module, which: str, other: Tensor) -> None:
    switch(model, which, False)
    with torch.no_grad():
        model(other)
    switch(model, which, True)


def a_reference_forward_in_inference_mode(model: nn.Module, which: str, other: Tensor) -> None:
    switch(model, which, False)
    with torch.inference_mode():
        model(other)
    switch(model, which, True)


def a_forward_with_gradients(model: nn.Module, which: str, other: Tensor) -> None:
    """Nothing is done with what it returns."""
    switch(model, which, False)
    model(other)
    switch(model, which, True)


def a_backward_of_another_batch(model: nn.Module, which: str, other: Tensor) -> None:
    """To the batch itself: all that needs a gradient, where all parameters are switched off."""
    switch(model, which, False)
    loss_of(model, other.clone().requires_grad_()).backward()
    switch(model, which, True)


def left_off(model: nn.Module, which: str, other: Tensor) -> None:
    """Plain PyTorch then gives these parameters nothing."""
    switch(model, which, False)


def left_off_over_a_forward(model: nn.Module, which: str, other: Tensor) -> None:
    switch(model, which, False)
    with torch.no_grad():
        model(other)


BETWEEN: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    f.__name__: f
    for f in (
        nothing,
        a_reference_forward,
        a_reference_forward_in_inference_mode,
        a_forward_with_gradients,
        a_backward_of_another_batch,
        left_off,
        left_off_over_a_forward,
    )
}


KEPT = [(name, False) for name in BETWEEN] + [("a_reference_forward", True), ("left_off", True)]


@every_way
@pytest.mark.parametrize(("between", "keep"), KEPT, ids=[name + "_kept" * keep for name, keep in KEPT])
def test_switched_between_forward_and_backward(run_ranks, between, keep, way):
    assert_same(run_ranks(switched, between, keep, way))


def switched(between: str, keep: bool, way: str) -> list[str]:
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    for step, which in enumerate([*which_of(way), "all"]):  # one model for all, as long as nothing went wrong
        try:
            found = switched_step(BETWEEN[between], which, step, model, reference)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            problems.append(f"{which}: {found[0]}")
            model, reference = shard(layers(), way, but_last, keep=keep), layers()
    return problems


def switched_step(between: Callable, which: str, step: int, model: nn.Module, reference: nn.Module) -> list[str]:
    for each in (model, reference):
        one, other = (mine(step), mine(9)) if each is model else (batch(step), batch(9))
        loss = loss_of(each, one)
        between(each, which, other)
        loss.backward()
    found = gradient_problems("gradients", model, reference)
    for each in (model, reference):
        each.requires_grad_(True)
        each.zero_grad()
    return found


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["default", "kept"])
def test_switched_on_between_forward_and_backward(run_ranks, keep, way):
    """What was frozen in the forward has no gradient from it; the rest has, and the next step's are complete."""
    assert_same(run_ranks(switched_on, keep, way))


def switched_on(keep: bool, way: str) -> list[str]:
    problems: list[str] = []
    for which in which_of(way):
        if which == "all":
            continue  # then there is nothing to differentiate
        model, reference = shard(layers(), way, but_last, keep=keep), layers()
        for each in (model, reference):
            switch(each, which, False)
            loss = loss_of(each, mine(0) if each is model else batch(0))
            switch(each, which, True)
            loss.backward()
        problems += gradient_problems(f"{which} thawed", model, reference)[:1]
        for each in (model, reference):
            each.zero_grad()
            loss_of(each, mine(1) if each is model else batch(1)).backward()
        problems += gradient_problems(f"{which}, the step after", model, reference)[:1]
    return problems


# Preference training with adapters.


class Adapted(nn.Module):
    """A frozen layer and a trained low-rank adapter, which can be switched off. `[n, 5]` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.adapts = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return torch.tanh(y + self.up(self.down(x)) if self.adapts else y)


class Checkpointed(Adapted):
    """Recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def adapted(kind: type[Adapted]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), kind()).double()


@contextmanager
def adapters_off(model: nn.Module, freeze: bool) -> Iterator[None]:
    """As PEFT's `disable_adapter()`, which switches `requires_grad`, too."""
    blocks = [module for module in model.modules() if isinstance(module, Adapted)]
    for block in blocks:
        block.adapts = False
        if freeze:
            block.down.requires_grad_(False), block.up.requires_grad_(False)
    yield
    for block in blocks:
        block.adapts = True
        if freeze:
            block.down.requires_grad_(True), block.up.requires_grad_(True)


def preference_loss(model: nn.Module, inputs: Tensor, freeze: bool) -> Tensor:
    chosen, rejected = model(inputs), model(inputs.flip(1))
    with adapters_off(model, freeze), torch.no_grad():
        chosen_before, rejected_before = model(inputs), model(inputs.flip(1))
    margin = (chosen - chosen_before).sum(1) - (rejected - rejected_before).sum(1)
    return -torch.nn.functional.logsigmoid(margin).mean()


@pytest.mark.parametrize("way", [*LAYOUTS, "originals"])
@pytest.mark.parametrize("kind", [Adapted, Checkpointed])
@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "switched"])
def test_preference_training_with_adapters(run_ranks, freeze, kind, way):
    assert_same(run_ranks(preferences, freeze, kind, way))


def preferences(freeze: bool, kind: type[Adapted], way: str) -> list[str]:
    model, reference = shard(adapted(kind), way, but_last), adapted(kind)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (model, reference)]
    problems: list[str] = []
    for step in range(3):
        for each in (model, reference):
            preference_loss(each, mine(step) if each is model else batch(step), freeze).backward()
        problems += gradient_problems(f"step {step}", model, reference)[:1]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return problems + value_problems("after three steps", model, reference)[:1]


@every_way
def test_alternating_players(run_ranks, way):
    """As in adversarial training: one half is frozen while the other's loss goes through it, then the other way."""
    assert_same(run_ranks(alternating, way))


def alternating(way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(4):
            one = loss_of(each, mine(step) if each is model else batch(step))
            inner(each)[step % 2].requires_grad_(False)
            two = loss_of(each, mine(20 + step) if each is model else batch(20 + step))
            inner(each)[step % 2].requires_grad_(True)
            two.backward()
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
    return value_problems("after four steps", model, reference)
