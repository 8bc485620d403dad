"""An optimizer's step between a forward and its backward: plain PyTorch raises where a changed weight is needed, and
so do we; what is not needed by that backward may change. And `backward(inputs=...)` with sharded parameters.

    loss = model(x)      saves the weights that backward needs
    optimizer.step()     changes them
    loss.backward()      has no right answer: an error, on every rank, before any gradient is delivered
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from training import assert_same
from ways import (
    LAYOUTS,
    WAYS,
    WIDTH,
    batch,
    but_last,
    error_of,
    every_way,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named,
    named_error,
    shard,
    value_problems,
    whole_gradients,
)


def inputs_of(model: nn.Module, reference: nn.Module, seed: int) -> Tensor:
    return batch(seed) if model is reference else mine(seed)


# Steps that change what a backward still needs.


def by_optimizer(model: nn.Module, kind: Callable = torch.optim.SGD, **settings: object) -> None:
    kind(model.parameters(), lr=0.1, **settings).step()


def by_for_loop(model: nn.Module) -> None:
    by_optimizer(model, foreach=False)


def by_foreach(model: nn.Module) -> None:
    by_optimizer(model, foreach=True)


def by_adamw(model: nn.Module) -> None:
    by_optimizer(model, torch.optim.AdamW)


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def by_hand_in_a_unit(model: nn.Module) -> None:
    """A weight that the unit's backward needs, of a unit that is freed in between."""
    with torch.no_grad():
        for parameter in inner(model)[1].parameters():
            parameter.mul_(0.5)


def by_load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


CHANGES = {f.__name__: f for f in (by_for_loop, by_foreach, by_adamw, by_hand, by_hand_in_a_unit, by_load)}


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["default", "kept"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_between_forward_and_backward_is_refused(run_ranks, change, keep, way):
    assert_same(run_ranks(refused, change, keep, way, timeout=20))


def refused(change: str, keep: bool, way: str) -> list[str]:
    """As the unsharded model refuses it; `weight` is in the name of what needs the old values. Then all goes on."""
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    problems: list[str] = []
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 0)).backward()
        late = loss_of(each, inputs_of(each, reference, 1))
        CHANGES[change](each)
        error = error_of(late.backward)
        if each is reference:
            assert "modified by an inplace operation" in str(error)
        else:  # PhaseError is a RuntimeError: code that catches PyTorch's catches it
            problems += named_error(error, "weight", kinds=RuntimeError)
    if problems:
        return problems
    for each in (model, reference):
        each.zero_grad()
        loss_of(each, inputs_of(each, reference, 2)).backward()
    return value_problems("after it", model, reference) + gradient_problems("after it", model, reference)


def test_data_assigned_between_forward_and_backward_is_refused(run_ranks):
    """Plain PyTorch says nothing, and computes with the new values; what is gathered may be of the old ones."""
    for way, keep in itertools.product(WAYS, (False, True)):
        problems = run_ranks(assigned, way, keep)
        assert problems == [[], []], (way, keep, problems)


def assigned(way: str, keep: bool) -> list[str]:
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    problems: list[str] = []
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 0)).backward()
        late = loss_of(each, inputs_of(each, reference, 1))
        for parameter in inner(each)[1].parameters():
            parameter.data = parameter.data * 0.5
        if each is model:
            problems = named_error(error_of(late.backward), "weight", kinds=RuntimeError)
        each.zero_grad()
        loss_of(each, inputs_of(each, reference, 2)).backward()
    return problems + value_problems("after it", model, reference) + gradient_problems("after it", model, reference)


@every_way
def test_two_losses_with_a_step_between_their_backwards(run_ranks, way):
    """Forward, forward, backward, step, backward: the classic."""
    assert_same(run_ranks(second_refused, way, timeout=20))


def second_refused(way: str) -> list[str]:
    model = shard(layers(), way, but_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = loss_of(model, mine(0)), loss_of(model, mine(1))
    first.backward()
    optimizer.step()
    return named_error(error_of(second.backward), "weight")


@pytest.mark.parametrize("way", LAYOUTS)
def test_a_step_of_one_ranks_part_is_refused_on_all(run_ranks, way):
    """Owners update what they own: here one rank alone changes anything. No rank may go on, or wait for ever."""
    assert_same(run_ranks(refused_everywhere, way, timeout=20))


def refused_everywhere(way: str) -> list[str]:
    model = shard(layers(), way, but_last)
    loss = loss_of(model, mine(0))
    with torch.no_grad():
        for parameter in model.parameters():
            held = parameter.to_local()
            if torch.distributed.get_rank() == 1 and held.numel():
                held.mul_(0.5)
    return named_error(error_of(loss.backward), "weight")


# Steps that change nothing that a backward needs.


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["default", "kept"])
def test_a_step_of_another_model_is_not_refused(run_ranks, keep, way):
    """As two networks are trained that look at each other's outputs."""
    assert_same(run_ranks(two_models, keep, way))


def two_models(keep: bool, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    other, other_reference = shard(layers(), way, but_last, keep=keep), layers()
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


@every_way
def test_a_step_of_what_the_forward_did_not_use_is_not_refused(run_ranks, way):
    assert_same(run_ranks(other_head_stepped, way))


def other_head_stepped(way: str) -> list[str]:
    model, reference = TwoHeads(), TwoHeads()
    sharded = shard(model, way, named("body", "heads.0", "heads.1"))
    for each in (sharded, reference):
        heads = inner(each).heads
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
        for step in range(3):
            each(inputs_of(each, reference, step), 1).square().sum(1).mean().backward()
            loss = each(inputs_of(each, reference, 10 + step), 0).square().sum(1).mean()
            optimizers[1].step()  # head 1, with gradients of the first loss; the second one does not go through it
            loss.backward()
            optimizers[0].step()
            each.zero_grad()
    return value_problems("after three steps", sharded, reference)


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["default", "kept"])
def test_a_step_after_a_forward_whose_graph_is_gone_is_not_refused(run_ranks, keep, way):
    assert_same(run_ranks(dropped_forward, keep, way))


def dropped_forward(keep: bool, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        for step in range(3):
            loss_of(each, inputs_of(each, reference, step)).backward()
            loss_of(each, inputs_of(each, reference, 9)).item()  # looked at, with gradients, and dropped
            optimizer.step()
            optimizer.zero_grad()
    return value_problems("after three steps", model, reference)


@every_way
def test_an_optimizer_in_backward_is_not_refused(run_ranks, way):
    """Each parameter is stepped by its own hook, while the backward of the units before it is still to come."""
    assert_same(run_ranks(stepped_in_backward, way))


def stepped_in_backward(way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    for each in (model, reference):
        own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in each.parameters()}

        def now(parameter: Tensor, own: dict = own) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(now)
        for step in range(3):
            loss_of(each, inputs_of(each, reference, step)).backward()
    return value_problems("after three steps", model, reference)


# backward(inputs=...): gradients for these tensors alone.


def gradients_for(reference: nn.Module, which: Callable[[str], bool], seed: int) -> None:
    wanted = [parameter for name, parameter in reference.named_parameters() if which(name)]
    loss_of(reference, batch(seed)).backward(inputs=wanted)


WHICH: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "a unit": lambda name: ".module.0." in f".module.{name}".replace("_fsdp_wrapped_module.", ""),
    "weights": lambda name: "weight" in name,
    "the last": lambda name: name.replace("_fsdp_wrapped_module.", "").startswith("2."),
}


FOR_SOME = [(which, way) for which in WHICH for way in WAYS if (which, way) != ("weights", "wrapper")]


@pytest.mark.parametrize(("which", "way"), FOR_SOME)
def test_backward_for_some_parameters(run_ranks, which, way):
    """The unsharded model's gradients, or an error that names a parameter and says what to do. Never nothing."""
    assert_same(run_ranks(for_some, which, way, timeout=20))


def for_some(which: str, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    wanted = [parameter for name, parameter in model.named_parameters() if WHICH[which](name)]
    if way == "wrapper":  # one for all of a unit
        flat = {"a unit": inner(model)[0].parameters(), "the last": inner(model).parameters(recurse=False)}
        wanted = [*flat.get(which, wanted)]
    assert wanted
    error = error_of(lambda: loss_of(model, mine(0)).backward(inputs=wanted))
    if error is not None:
        return named_error(error, "inputs")
    gradients_for(reference, WHICH[which], 0)
    return gradient_problems(which, model, reference)


@every_way
@pytest.mark.parametrize("how", ["backward", "grad"])
def test_the_step_after_a_backward_for_some_parameters_is_right(run_ranks, how, way):
    """Whatever became of it: the next ordinary step has nothing of it."""
    assert_same(run_ranks(after_for_some, how, way, timeout=20))


def after_for_some(how: str, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    wanted = list(model.parameters())[:2]
    if how == "backward":
        error_of(lambda: loss_of(model, mine(0)).backward(inputs=wanted))
    else:
        error = error_of(lambda: torch.autograd.grad(loss_of(model, mine(0)), wanted))
        if error is None:
            return ["torch.autograd.grad of sharded parameters says nothing"]
    model.zero_grad()
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 1)).backward()
    return gradient_problems("the next step", model, reference)


@every_way
def test_backward_for_an_activation_leaves_parameters_alone(run_ranks, way):
    """`inputs=` of a tensor that is no parameter: gradients of it, none of parameters, and none of it later."""
    assert_same(run_ranks(for_an_activation, way))


def for_an_activation(way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last), layers()
    found = []
    for each in (model, reference):
        x = inputs_of(each, reference, 0).requires_grad_()
        (each(x).square().sum(1).sum()).backward(inputs=[x])
        found.append(x.grad)
    problems = [] if torch.allclose(found[0], found[1].view(2, -1, WIDTH)[torch.distributed.get_rank()]) else ["x.grad"]
    problems += [f"{name} has a gradient" for name, grad in whole_gradients(model).items() if grad is not None]
    for each in (model, reference):
        loss_of(each, inputs_of(each, reference, 1)).backward()
    return problems + gradient_problems("the next step", model, reference)
