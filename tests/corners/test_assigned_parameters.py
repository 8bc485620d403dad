"""A `Parameter` assigned to a module of a unit while a step is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from ways import (
    LAYOUTS,
    alone,
    backward,
    children,
    differences,
    inner,
    on_ranks,
    shard,
    two_layers,
    whole,
    whole_state,
    wide_batch,
)

MOMENTS = ("between steps", "after forward", "in backward")
CASES = [
    *((way, moment) for way in ("rows", "flat", "originals") for moment in MOMENTS),
    *((layout, "after unshard") for layout in ("rows", "flat")),  # the wrapper has no unshard()
    *(("wrapper", moment) for moment in MOMENTS[:2]),
]
three_ways = pytest.mark.parametrize("way", ["rows", "flat", "originals"])


def layer_of(model: nn.Module, name: str) -> Any:
    return inner(inner(model)[int(name)])


def my_batch(step: int = 0) -> Tensor:
    return wide_batch(step, dist.get_rank())


def assign(layer: nn.Module, form: str = "same") -> None:
    """Another Parameter of sevens: whole, or in the form of the one that is there."""
    new = torch.full((6, 6), 7.0) if form == "whole" else torch.full_like(layer.weight.detach(), 7.0)
    layer.weight = nn.Parameter(new)


def disturbed_step(model: Any, act: Callable[[], None], moment: str) -> None:
    out = model(my_batch())
    if moment == "after forward":
        act()
    if moment == "in backward":
        out.register_hook(lambda gradient: act())
    out.square().mean().backward()
    if moment == "between steps":
        act()
    if moment == "after unshard":
        model.unshard()
        act()
        model.reshard()
    model.zero_grad()


@pytest.mark.parametrize(("way", "moment"), CASES)
@on_ranks
def test_a_parameter_assigned_during_a_step_is_not_dropped(way: str, moment: str) -> list[str]:
    """Taken over, in the next forward and in the state dict; or refused by the parameter's name, by then."""
    problems = []
    forms = ("whole",) if way == "wrapper" else ("same", "whole")
    for name, form, units in [(n, f, u) for n in ("0", "2") for f in forms for u in (children, alone)]:
        model = shard(two_layers(), way, units)
        layer, where = layer_of(model, name), f"{name} {form} {units.__name__}"
        try:
            disturbed_step(model, lambda layer=layer, form=form: assign(layer, form), moment)
            out = model(my_batch(1)).detach()
        except fullshard.FullshardError as error:
            problems += [] if "weight" in str(error) else [f"{where}: {error}"]
            continue
        want = two_layers()
        with torch.no_grad():
            want[int(name)].weight.fill_(7.0)
        problems += differences(f"{where} out", {"": out}, {"": want(my_batch(1)).detach()})
        problems += differences(f"{where} values", whole_state(model), dict(want.state_dict()))
    return problems


class Assigning(nn.Linear):
    """A layer that assigns a weight to `target` before it computes, or after it did."""

    target: nn.Module | None = None
    late = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late and self.target is not None:
            assign(self.target)
        out = super().forward(x)
        if self.late and self.target is not None:
            assign(self.target)
        return out


def assigning(way: str, late: bool, units: Any, name: str, after: int = 0) -> nn.Module:
    """A model whose first layer assigns the weight of layer `name`, from the forward after so many steps on."""
    plain = two_layers()
    torch.manual_seed(3)  # as `two_layers`
    plain[0] = Assigning(6, 6, bias=False)
    model = shard(plain, way, units)
    for _ in range(after):
        model(my_batch()).sum().backward()
    layer_of(model, "0").__dict__.update(late=late, target=layer_of(model, name))
    return model


@three_ways
@on_ranks
def test_a_parameter_assigned_inside_a_forward_is_refused(way: str) -> list[str]:
    """In the forward of its own unit, or, once the order is known, before that of a later one."""
    problems = []
    own = [(late, units, name, 0) for late in (False, True) for units in (alone, children) for name in ("0", "2")]
    for late, units, name, after in [*own, (False, children, "0", 2), (False, children, "2", 2)]:
        if units is children and name == "2" and not after:
            continue  # another unit's, in the first pass: see below
        model = assigning(way, late, units, name, after)
        with pytest.raises(fullshard.PhaseError, match=f"{name}.weight"):
            model(my_batch())
        if fullshard.memory_use(model).gathered:
            problems.append(f"{name} {late} {units.__name__} {after}: stays gathered")
    return problems


def part(whole_gradient: Tensor, parameter: Tensor, way: str) -> Tensor:
    """What this rank has of it: with the wrapper rank 0 the first elements, and rank 1 the last."""
    if way in LAYOUTS:
        return whole_gradient
    flat, numel = whole_gradient.flatten(), parameter.numel()
    return flat[:numel] if dist.get_rank() == 0 else flat[-numel:]


@three_ways
@on_ranks
def test_a_parameter_assigned_before_its_units_forward(way: str) -> list[str]:
    """Before another unit's forward, from the first pass on: that computes with the new one, and trains it."""
    model = assigning(way, False, children, "2")
    out = model(my_batch())
    out.square().mean().backward()
    want = two_layers()
    with torch.no_grad():
        want[2].weight.fill_(7.0)
    problems = differences("out", {"": out.detach()}, {"": want(my_batch()).detach()})
    backward(want, 0, [0, 1])
    weight = layer_of(model, "2").weight
    return problems + differences("gradient", {"": whole(weight.grad)}, {"": part(want[2].weight.grad, weight, way)})


@three_ways
@on_ranks
def test_a_parameter_assigned_after_its_units_forward(way: str) -> list[str]:
    """The backward of a forward that came before the assignment gives the gradients of what that computed with."""
    model = shard(two_layers(), way)
    layer = layer_of(model, "2")
    old = layer.weight
    out = model(my_batch())
    assign(layer)
    out.square().mean().backward()
    want = two_layers()
    backward(want, 0, [0, 1])
    problems = [] if layer.weight.grad is None else ["the new parameter has a gradient"]
    return problems + differences("old", {"": whole(old.grad)}, {"": part(want[2].weight.grad, old, way)})
