"""A `Parameter` assigned to a module of a unit while a step is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from training import assert_same
from ways import LAYOUTS, alone, backward, children, differences, shard, two_layers, whole, whole_state, wide_batch

MOMENTS = ("between steps", "after forward", "in backward")
CASES = [
    *((way, moment) for way in (*LAYOUTS, "originals") for moment in MOMENTS),
    *((layout, "after unshard") for layout in LAYOUTS),  # the wrapper has no unshard()
]


def owner_of(model: Any, way: str, name: str) -> nn.Module:
    """The layer whose weight is assigned."""
    if way in LAYOUTS:
        return model[int(name)]
    layer = model.module[int(name)]
    return layer.module if isinstance(layer, fullshard.FullyShardedDataParallel) else layer


def assigns(layer: nn.Module, form: str) -> None:
    """Another Parameter of sevens: whole, or in the form of the one that is there."""
    new = torch.full((6, 6), 7.0) if form == "whole" else torch.full_like(layer.weight.detach(), 7.0)
    layer.weight = nn.Parameter(new)


def assigned(way: str, form: str, moment: str, units: bool) -> list[str]:
    """Taken over, in the next forward and in the state dict; or refused by the parameter's name, by then."""
    problems = []
    for name in ("0", "2"):
        model = shard(two_layers(), way, children if units else alone)
        layer = owner_of(model, way, name)
        try:
            disturbed_step(model, layer, lambda layer=layer: assigns(layer, form), moment)
            out = model(wide_batch(1, dist.get_rank())).detach()
        except fullshard.FullshardError as error:
            problems += [] if "weight" in str(error) else [f"{name}: {error}"]
            continue
        want = two_layers()
        with torch.no_grad():
            want[int(name)].weight.fill_(7.0)
        problems += differences(f"{name} out", {"": out}, {"": want(wide_batch(1, dist.get_rank())).detach()})
        problems += differences(f"{name} values", whole_state(model), dict(want.state_dict()))
    return problems


def disturbed_step(model: Any, layer: nn.Module, assign: Callable[[], None], moment: str) -> None:
    out = model(wide_batch(0, dist.get_rank()))
    if moment == "after forward":
        assign()
    if moment == "in backward":

        def now(gradient: Tensor) -> None:
            assign()

        out.register_hook(now)
    out.square().mean().backward()
    if moment == "between steps":
        assign()
    if moment == "after unshard":
        model.unshard()
        assign()
        model.reshard()
    model.zero_grad()


@pytest.mark.parametrize("units", [False, True], ids=["one_unit", "units"])
@pytest.mark.parametrize("form", ["same", "whole"])
@pytest.mark.parametrize(("way", "moment"), CASES)
def test_a_parameter_assigned_during_a_step_is_not_dropped(run_ranks, way, moment, form, units):
    assert_same(run_ranks(assigned, way, form, moment, units, timeout=20))


@pytest.mark.parametrize("moment", ["between steps", "after forward"])
def test_a_parameter_assigned_beside_a_flat_parameter_is_not_dropped(run_ranks, moment):
    assert_same(run_ranks(assigned, "wrapper", "whole", moment, True, timeout=20))


class Assigning(nn.Linear):
    """A layer that assigns a weight to `target` before it computes, or after it did."""

    target: nn.Module | None = None
    late = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late and self.target is not None:
            assigns(self.target, "same")
        out = super().forward(x)
        if self.late and self.target is not None:
            assigns(self.target, "same")
        return out


def assigning(way: str, late: bool, units: bool, name: str) -> tuple[nn.Module, Assigning]:
    """A model whose first layer assigns the weight of layer `name`, and that layer."""
    inner = two_layers()
    torch.manual_seed(3)
    inner[0] = Assigning(6, 6, bias=False)
    model = shard(inner, way, children if units else alone)
    first: Any = owner_of(model, way, "0")
    first.__dict__.update(late=late, target=owner_of(model, way, name))
    return model, first


def assigned_inside(way: str, late: bool, units: bool, after: int) -> list[str]:
    """In the forward of its own unit, or before that of a later one: refused by name, and by all ranks."""
    problems = []
    for name in ("0", "2"):
        if units and name == "2" and not after:
            continue  # another unit's, in the first pass: see below
        model, first = assigning(way, late, units, name)
        target, first.__dict__["target"] = first.target, None
        for _ in range(after):
            model(wide_batch(0, dist.get_rank())).sum().backward()
        first.__dict__["target"] = target
        with pytest.raises(fullshard.PhaseError, match=f"{name}.weight"):
            model(wide_batch(0, dist.get_rank()))
        if fullshard.memory_use(model).gathered:
            problems.append(f"{name}: stays gathered")
    return problems


@pytest.mark.parametrize("units", [False, True], ids=["one_unit", "units"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", [*LAYOUTS, "originals"])
def test_a_parameter_assigned_inside_a_forward_is_refused(run_ranks, way, late, units):
    assert_same(run_ranks(assigned_inside, way, late, units, 0, timeout=20))


@pytest.mark.parametrize("way", [*LAYOUTS, "originals"])
def test_a_parameter_assigned_inside_a_later_forward_is_refused(run_ranks, way):
    assert_same(run_ranks(assigned_inside, way, False, True, 2, timeout=20))


def assigned_ahead(way: str) -> list[str]:
    """Before another unit's forward, from the first pass on: that computes with the new one, and trains it."""
    model, _ = assigning(way, False, True, "2")
    out = model(wide_batch(0, dist.get_rank()))
    out.square().mean().backward()
    want = two_layers()
    with torch.no_grad():
        torch.manual_seed(3)
        want[0].weight.copy_(nn.Linear(6, 6, bias=False).weight)
        want[2].weight.fill_(7.0)
    problems = differences("out", {"": out.detach()}, {"": want(wide_batch(0, dist.get_rank())).detach()})
    backward(want, 0, [0, 1])
    weight = owner_of(model, way, "2").weight
    expected = want[2].weight.grad
    if way not in LAYOUTS:
        expected = (
            expected.flatten()[: weight.numel()] if dist.get_rank() == 0 else expected.flatten()[-weight.numel() :]
        )
    return problems + differences("gradient", {"": whole(weight.grad)}, {"": expected})


@pytest.mark.parametrize("way", [*LAYOUTS, "originals"])
def test_a_parameter_assigned_ahead_of_its_unit_is_the_one_that_computes(run_ranks, way):
    assert_same(run_ranks(assigned_ahead, way, timeout=20))


def gradients_of_what_was_used(way: str) -> list[str]:
    """The backward of a forward that came before the assignment gives the gradients of what that computed with."""
    model = shard(two_layers(), way)
    layer = owner_of(model, way, "2")
    old = layer.weight
    out = model(wide_batch(0, dist.get_rank()))
    assigns(layer, "same")
    out.square().mean().backward()
    want = two_layers()
    backward(want, 0, [0, 1])
    problems = [] if layer.weight.grad is None else ["the new parameter has a gradient"]
    expected = want[2].weight.grad
    if way not in LAYOUTS:  # the first elements on rank 0, the last on rank 1
        expected = expected.flatten()
        expected = expected[: old.numel()] if dist.get_rank() == 0 else expected[-old.numel() :]
    return problems + differences("", {"": whole(old.grad)}, {"": expected})


@pytest.mark.parametrize("way", [*LAYOUTS, "originals"])
def test_gradients_are_those_of_the_parameter_that_was_used(run_ranks, way):
    assert_same(run_ranks(gradients_of_what_was_used, way, timeout=20))
