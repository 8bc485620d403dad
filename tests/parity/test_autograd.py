"""What users do between and within forward and backward. Same numbers as unsharded, to double precision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from models import Example
from training import FP64, LAYOUTS, BatchOf, Options, assert_same, one_batch, parity

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def count_step(model: nn.Module) -> int:
    """How often this was asked of this model before."""
    model.steps_taken = getattr(model, "steps_taken", -1) + 1
    return model.steps_taken


def two_backwards_of_one_loss(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    loss = example.loss(model, batch_of(0))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses_of_one_forward(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    inputs, targets = batch_of(0)
    outputs = model(inputs)
    first, second = example.loss_of(outputs, targets), outputs.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def two_forwards_two_backwards(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    first, second = example.loss(model, batch_of(0)), example.loss(model, batch_of(1))
    first.backward()
    second.backward()
    return first + second


def two_forwards_two_backwards_last_first(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    first, second = example.loss(model, batch_of(0)), example.loss(model, batch_of(1))
    second.backward()
    first.backward()
    return first + second


def two_forwards_one_backward(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    loss = example.loss(model, batch_of(0)) + example.loss(model, batch_of(1))
    loss.backward()
    return loss


def evaluation_before(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    model.eval()
    with torch.no_grad():
        example.loss(model, batch_of(1))
    model.train()
    return one_batch(model, example, batch_of)


def evaluation_between_forward_and_backward(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    loss = example.loss(model, batch_of(0))
    with torch.no_grad():
        example.loss(model, batch_of(1))
    loss.backward()
    return loss


def inference_mode_before(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    with torch.inference_mode():
        example.loss(model, batch_of(1))
    return one_batch(model, example, batch_of)


def forward_without_backward(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    example.loss(model, batch_of(1))
    return one_batch(model, example, batch_of)


def gradients_zeroed_not_dropped(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    one_batch(model, example, batch_of)
    model.zero_grad(set_to_none=False)
    return one_batch(model, example, batch_of)


def gradients_kept_over_steps(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """As with `retain_graph`, but through the optimizer's eyes: two backwards with no zero_grad between."""
    first = one_batch(model, example, lambda index: batch_of(1))
    return first.detach() + one_batch(model, example, batch_of)


def order_of_blocks_changes(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """Every call of the model goes through its blocks in the other direction than the last."""
    model.blocks = nn.ModuleList(reversed(model.blocks))
    loss = one_batch(model, example, batch_of)
    model.blocks = nn.ModuleList(reversed(model.blocks))
    return loss + one_batch(model, example, lambda index: batch_of(1))


def block_left_out_every_other_time(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """The second block runs in the first forward only; its gradient comes from there alone."""
    loss = one_batch(model, example, batch_of)
    blocks = model.blocks
    model.blocks = nn.ModuleList([blocks[0]])
    loss = loss + one_batch(model, example, lambda index: batch_of(1))
    model.blocks = blocks
    return loss


def frozen_for_one_step_in_two(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """`requires_grad` of some parameters changes from step to step."""
    step = count_step(model)
    for module in (model.blocks[0].attention, model.blocks[1], model.head):
        module.requires_grad_(step % 2 == 0)
    return one_batch(model, example, batch_of)


def gradients_changed_by_the_user(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """In place and by assignment, with a second backward on top of what the user left."""
    loss = one_batch(model, example, batch_of)
    for index, p in enumerate(model.parameters()):
        if index % 3 == 0:
            p.grad.mul_(0.5)
        elif index % 3 == 1:
            p.grad = p.grad * 0.25
        else:
            p.grad = None
    return loss.detach() + one_batch(model, example, lambda index: batch_of(1))


def parameters_changed_in_place(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    return one_batch(model, example, batch_of)


def parameters_assigned_through_data(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """PyTorch's DTensor ignores this without a word."""
    for p in model.parameters():
        p.data = p.data * 0.9
    return one_batch(model, example, batch_of)


AS_PYTORCH = [
    two_backwards_of_one_loss,
    two_losses_of_one_forward,
    two_forwards_two_backwards,
    two_forwards_one_backward,
    evaluation_before,
    gradients_zeroed_not_dropped,
    gradients_kept_over_steps,
]
BEYOND_PYTORCH = [  # compared with single-process training only: PyTorch's own raises or does not promise it
    two_forwards_two_backwards_last_first,
    evaluation_between_forward_and_backward,
    inference_mode_before,
    forward_without_backward,
    order_of_blocks_changes,
    block_left_out_every_other_time,
    frozen_for_one_step_in_two,
    gradients_changed_by_the_user,
    parameters_changed_in_place,
    parameters_assigned_through_data,
]


@both_layouts
@pytest.mark.parametrize("scenario", AS_PYTORCH, ids=lambda scenario: scenario.__name__)
def test_scenario_as_pytorch(run_ranks, scenario, layout):
    options = Options(layout=layout, dtype=torch.float64, scenario=scenario)
    assert_same(run_ranks(parity, "gpt", options, FP64))


@both_layouts
@pytest.mark.parametrize("scenario", BEYOND_PYTORCH, ids=lambda scenario: scenario.__name__)
def test_scenario_beyond_pytorch(run_ranks, scenario, layout):
    options = Options(layout=layout, dtype=torch.float64, scenario=scenario)
    assert_same(run_ranks(parity, "gpt", options, FP64, check_torch=False))


@both_layouts
@pytest.mark.parametrize(
    "name", ["tied_across", "checkpoint_outside_reentrant", "checkpoint_outside_nested", "nested", "repeated"]
)
def test_two_forwards_on_harder_models(run_ranks, name, layout):
    for scenario in (two_forwards_two_backwards, two_forwards_one_backward):
        options = Options(layout=layout, dtype=torch.float64, scenario=scenario)
        assert_same(run_ranks(parity, name, options, FP64, check_torch=False))


@both_layouts
@pytest.mark.parametrize("scenario", [two_forwards_two_backwards, two_backwards_of_one_loss])
def test_scenario_with_parameters_kept(run_ranks, scenario, layout):
    options = Options(layout=layout, dtype=torch.float64, scenario=scenario, reshard=False)
    assert_same(run_ranks(parity, "gpt", options, FP64))


class Mishap(Exception):
    """What a user's code raises in the middle of a step."""


def interrupted(model: nn.Module, example: Example, batch_of: BatchOf, place: str, phase: str) -> Tensor:
    """A step in which the module at `place` raises in `phase`; then zero_grad, and the step again."""

    def mishap(*_: object) -> None:
        raise Mishap

    def in_forward(module: nn.Module, inputs: object, output: Tensor) -> None:
        if phase == "backward":
            output.register_hook(mishap)
        else:
            mishap()

    hook = model.get_submodule(place).register_forward_hook(in_forward)
    try:
        with torch.set_grad_enabled(phase != "forward without gradients"):
            example.loss(model, batch_of(1)).backward()
    except Mishap:
        pass
    else:
        raise AssertionError("the step was not interrupted")
    finally:
        hook.remove()
    model.zero_grad()
    return one_batch(model, example, batch_of)


@dataclass(frozen=True)
class Interrupted:
    """`interrupted` as a scenario."""

    place: str
    phase: str

    def __call__(self, model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
        return interrupted(model, example, batch_of, self.place, self.phase)


def interrupted_later(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """A good step at first, then one interrupted in backward and one in forward."""
    step = count_step(model)
    if step == 1:
        return interrupted(model, example, batch_of, "blocks.0.mlp", "backward")
    if step == 2:
        return interrupted(model, example, batch_of, "blocks.1.attention", "forward")
    return one_batch(model, example, batch_of)


@both_layouts
@pytest.mark.parametrize("place", ["blocks.0.attention", "blocks.1.mlp", "norm"])
@pytest.mark.parametrize("phase", ["forward", "forward without gradients", "backward"])
def test_exception_and_recovery(run_ranks, phase, place, layout):
    options = Options(layout=layout, dtype=torch.float64, scenario=Interrupted(place, phase))
    assert_same(run_ranks(parity, "gpt", options, FP64, check_torch=False))


@both_layouts
def test_exception_and_recovery_after_a_good_step(run_ranks, layout):
    """The schedule is recorded by then, and prefetches are in flight."""
    options = Options(layout=layout, dtype=torch.float64, scenario=interrupted_later, steps=4)
    for kept in (options, replace(options, reshard=False)):
        assert_same(run_ranks(parity, "gpt", kept, FP64, check_torch=False))
