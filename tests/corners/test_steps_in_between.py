"""What happens between a forward and its backward: steps that change weights, and `requires_grad` that is switched.

    loss = model(x)      saves the weights that backward needs
    optimizer.step()     changes them
    loss.backward()      has no right answer: an error, on every rank, before any gradient is delivered

Plain PyTorch raises where a changed weight is needed, and so do we; what is not needed by that backward may change.
Preference training switches an adapter off for the reference's forward and on again. And `backward(inputs=...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ways import (
    WIDTH,
    batch,
    but_last,
    error_of,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named,
    named_error,
    on_ranks,
    shard,
    value_problems,
    whole_gradients,
)

LATE = "refused at once on a CPU; the host of a device reads what ranks agreed on two backwards later"
three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])


def pair(way: str, keep: bool = False) -> tuple[nn.Module, nn.Sequential]:
    return shard(layers(), way, but_last, keep=keep), layers()


def inputs_of(model: nn.Module, reference: nn.Module, seed: int) -> Tensor:
    return batch(seed) if model is reference else mine(seed)


def problems_of_a_step(model: nn.Module, reference: nn.Module, where: str, seed: int) -> list[str]:
    """That an ordinary one is right."""
    for each in (model, reference):
        each.requires_grad_(True)
        each.zero_grad()
        loss_of(each, inputs_of(each, reference, seed)).backward()
    return value_problems(where, model, reference) + gradient_problems(where, model, reference)


# Steps that change what a backward still needs.


def halve(model: nn.Module, name: str = "") -> None:
    with torch.no_grad():
        for parameter in (inner(model).get_submodule(name) if name else model).parameters():
            parameter.mul_(0.5)


def by_data(model: nn.Module) -> None:
    """Plain PyTorch says nothing, and computes with the new values; what is gathered may be of the old ones."""
    for parameter in inner(model)[1].parameters():
        parameter.data = parameter.data * 0.5


CHANGES: dict[str, tuple[Callable[[nn.Module], object], bool]] = {  # and whether units stay gathered after forward
    "foreach": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step(), False),
    "foreach, kept": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step(), True),
    "by hand in a unit": (lambda model: halve(model, "1"), False),
    "load": (lambda model: model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()}), True),
    "data": (by_data, True),
}


@three_ways
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.cpu(LATE)
@on_ranks
def test_a_step_between_forward_and_backward_is_refused(how: str, way: str) -> list[str]:
    """As the unsharded model refuses it; `weight` is in the name of what needs the old values. Then all goes on."""
    change, keep = CHANGES[how]
    model, reference = pair(way, keep)
    problems: list[str] = []
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 0)).backward()
        late = loss_of(each, inputs_of(each, reference, 1))
        change(each)
        if each is model:  # PhaseError is a RuntimeError: code that catches PyTorch's catches it
            problems += named_error(error_of(late.backward), "weight", kinds=RuntimeError)
        elif how != "data":
            assert "modified by an inplace operation" in str(error_of(late.backward))
    return problems or problems_of_a_step(model, reference, "after it", 2)


@pytest.mark.parametrize("way", ["rows", "owner"])
@pytest.mark.cpu(LATE)
@on_ranks
def test_a_step_of_one_ranks_part_is_refused_on_all(way: str) -> list[str]:
    """Owners update what they own: here one rank alone changes anything. No rank may go on, or wait for ever."""
    model, _ = pair(way)
    loss = loss_of(model, mine(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if torch.distributed.get_rank() == 1:
                parameter.to_local().mul_(0.5)
    return named_error(error_of(loss.backward), "weight")


# Steps that change nothing that a backward needs.


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_a_step_of_another_model_is_not_refused(way: str) -> list[str]:
    """As two networks are trained that look at each other's outputs."""
    model, reference = pair(way)
    other, other_reference = pair(way)
    for each, second in ((model, other), (reference, other_reference)):
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (each, second)]
        for step in range(3):
            losses = [loss_of(m, inputs_of(each, reference, step)) for m in (each, second)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()  # the second loss is still to be differentiated
                optimizer.zero_grad()
    return value_problems("one", model, reference) + value_problems("other", other, other_reference)


class TwoHeads(nn.Module):
    """One of two heads is used in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH).double()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2).double() for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


@three_ways
@on_ranks
def test_a_step_of_what_the_forward_did_not_use_is_not_refused(way: str) -> list[str]:
    reference = TwoHeads()
    model = shard(TwoHeads(), way, named("body", "heads.0", "heads.1"))
    for each in (model, reference):
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in inner(each).heads]
        for step in range(3):
            each(inputs_of(each, reference, step), 1).square().sum(1).mean().backward()
            loss = each(inputs_of(each, reference, 10 + step), 0).square().sum(1).mean()
            optimizers[1].step()  # head 1, with gradients of the first loss; the second one does not go through it
            loss.backward()
            optimizers[0].step()
            each.zero_grad()
    return value_problems("after three steps", model, reference)


# `requires_grad`, switched.

PARTS = {"all": "", "a unit": r"^0\.", "the root's own": r"^2\.|^_flat_param", "weights": "weight"}


def switch(model: nn.Module, part: str, on: bool) -> None:
    """Of parameters by a pattern of their names; those of the root stay gathered after forward."""
    for name, parameter in inner(model).named_parameters():
        if re.search(PARTS[part], name.replace("_fsdp_wrapped_module.", "")):
            parameter.requires_grad_(on)


def parts_of(way: str) -> list[str]:
    """A `FlatParameter` is switched as one."""
    return [part for part in PARTS if part != "weights" or way != "wrapper"]


def a_reference_forward(model: nn.Module, other: Tensor) -> None:
    with torch.no_grad():
        model(other)


BETWEEN: dict[str, tuple[Callable[[nn.Module, Tensor], object], tuple[bool, ...]]] = {  # and whether on again after it
    "nothing": (lambda model, other: None, (True, False)),
    "a reference's forward": (a_reference_forward, (True, False)),
    "a forward with gradients, in vain": (lambda model, other: model(other), (True,)),
    # To the batch itself: all that needs a gradient, where all parameters are switched off.
    "another batch": (lambda model, other: loss_of(model, other.clone().requires_grad_()).backward(), (True,)),
}


@three_ways
@pytest.mark.parametrize("between", BETWEEN)
@on_ranks
def test_switched_off_between_forward_and_backward(between: str, way: str) -> list[str]:
    """What is on again has its gradients; plain PyTorch gives nothing to what is left off."""
    problems: list[str] = []
    act, agains = BETWEEN[between]
    model, reference = pair(way, keep=act is a_reference_forward)
    for again in agains:
        for step, part in enumerate([*parts_of(way), "all"]):
            for each in (model, reference):
                loss = loss_of(each, inputs_of(each, reference, step))
                switch(each, part, False)
                act(each, inputs_of(each, reference, 9))
                switch(each, part, again)
                loss.backward()
            problems += gradient_problems(f"{part}, again={again}", model, reference)[:1]
            for each in (model, reference):
                each.requires_grad_(True)
                each.zero_grad()
    return problems


@three_ways
@on_ranks
def test_switched_on_between_forward_and_backward(way: str) -> list[str]:
    """What was frozen in the forward has no gradient from it; the rest has, and the next step's are complete."""
    problems: list[str] = []
    for part in parts_of(way)[1:]:  # of all: then there is nothing to differentiate
        model, reference = pair(way)
        for each in (model, reference):
            switch(each, part, False)
            loss = loss_of(each, inputs_of(each, reference, 0))
            switch(each, part, True)
            loss.backward()
        problems += gradient_problems(f"{part} thawed", model, reference)[:1]
        problems += problems_of_a_step(model, reference, f"{part}, the step after", 1)[:1]
    return problems


# backward(inputs=...): gradients for these tensors alone.


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper", "originals"])
@on_ranks
def test_backward_for_some_parameters(way: str) -> list[str]:
    """The unsharded model's gradients, or an error that says what to do; the next step has nothing of either."""
    problems = []
    for part in parts_of(way):
        model, reference = pair(way)
        chosen = []
        for each in (model, reference):
            names = inner(each).named_parameters()
            chosen.append([p for n, p in names if re.search(PARTS[part], n.replace("_fsdp_wrapped_module.", ""))])
        error = error_of(lambda: loss_of(model, mine(0)).backward(inputs=chosen[0]))  # noqa: B023
        if error is not None:
            problems += named_error(error, "inputs", where=part)
        else:
            loss_of(reference, batch(0)).backward(inputs=chosen[1])
            problems += gradient_problems(part, model, reference)
        problems += problems_of_a_step(model, reference, f"{part}, the next step", 1)
    return problems


@three_ways
@on_ranks
def test_backward_for_an_activation_leaves_parameters_alone(way: str) -> list[str]:
    """`inputs=` of a tensor that is no parameter: gradients of it, none of parameters, and none of it later."""
    model, reference = pair(way)
    found = []
    for each in (model, reference):
        x = inputs_of(each, reference, 0).requires_grad_()
        each(x).square().sum(1).sum().backward(inputs=[x])
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1].view(2, -1, WIDTH)[torch.distributed.get_rank()])
    assert all(grad is None for grad in whole_gradients(model).values())
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 1)).backward()
    return gradient_problems("the next step", model, reference)
