"""Parameters that a model gains after it was sharded: a new head, an adapter.

They belong to no unit, so nothing would reduce their gradients and every rank would train its own: the next forward
that trains refuses them by name, before anything is changed, unless they are frozen, ignored, or sharded by now.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.runtime import runners_in
from ways import (
    LAYOUTS,
    alone,
    assert_equal,
    backward,
    batch,
    children,
    differences,
    example_of,
    inner,
    named,
    on_ranks,
    shard,
    sharded,
    two_layers,
    whole,
    whole_parameters,
    whole_state,
    wide_batch,
)
from ways import whole_gradients as gradients_of

three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])


class Net(nn.Module):
    """Two units, a head in the root, and whatever is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        out = self.head(hidden)
        return out + self.extra(hidden) if hasattr(self, "extra") else out


class Layer(nn.Module):
    """A linear layer with room for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return torch.tanh(out + x @ self.adapter if hasattr(self, "adapter") else out)


class WithPlain(Net):
    """The extra module is there from the beginning, and kept out of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 3)


NET = example_of(Net, "first", "second")


def train(model: nn.Module, number: int, all_ranks: bool = False) -> None:
    """From no gradients: on this rank's batch, or on those of all."""
    model.zero_grad()
    model(batch(number, None if all_ranks else dist.get_rank(), 4)).square().mean().backward()


def train_both(model: nn.Module, whole: nn.Module, number: int, what: str) -> None:
    """And compare gradients, but for the extra module's."""
    train(model, number)
    train(whole, number, all_ranks=True)
    want = {n: p.grad for n, p in whole.named_parameters() if not n.startswith("extra")}
    assert_equal({n: grad for n, grad in gradients_of(model).items() if not n.startswith("extra")}, want, what)


def assert_refused(model: nn.Module, name: str) -> None:
    with pytest.raises(fullshard.FullshardError, match=name):
        model(batch(0, dist.get_rank(), 4))


def layer(model: nn.Module) -> nn.Module:
    return inner(inner(model).second)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double()


def add_extra(model: nn.Module) -> None:
    inner(model).extra = linear()


def tenths() -> nn.Parameter:
    return nn.Parameter(torch.full((4, 4), 0.1, dtype=torch.float64))


ADDED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "a module in the root": (add_extra, r"extra\.weight"),
    "a new head": (lambda model: setattr(inner(model), "head", linear()), r"head\.weight"),
    "an adapter in a unit": (lambda model: setattr(layer(model), "adapter", tenths()), r"second\.adapter"),
    "a layer in a unit": (  # a module is replaced by one that contains it
        lambda model: setattr(layer(model), "linear", nn.Sequential(layer(model).linear, nn.Linear(4, 4).double())),
        r"second\.linear\.1\.weight",
    ),
    # Nothing runs it now; an optimizer would decay it on every rank all the same, and some forward may.
    "a module that is not used": (lambda model: setattr(inner(model), "later", linear()), r"later\.weight"),
}


@three_ways
@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("what", ADDED)
@on_ranks
def test_a_parameter_that_was_added_is_refused_by_name(way: str, when: str, what: str) -> None:
    """On every rank, every time, and with nothing changed."""
    model = sharded(NET, way)
    if when == "after it":
        train(model, 0)
        model.zero_grad()
    before = whole_parameters(model)
    add, name = ADDED[what]
    add(model)
    for _ in range(2):
        assert_refused(model, name)
    assert all(p.grad is None for p in model.parameters())
    after = whole_parameters(model)
    kept = {n for n in before.keys() & after.keys() if not (n.startswith("head") and what == "a new head")}
    assert_equal({n: after[n] for n in kept}, {n: before[n] for n in kept}, "parameters after the error")
    assert fullshard.memory_use(model).gathered == 0


@three_ways
@on_ranks
def test_the_refused_parameter_gone_or_frozen_training_goes_on(way: str) -> None:
    """Frozen: it takes part. Trained again: refused again. Deleted: as if it had not been."""
    model, whole = sharded(NET, way), NET.make(torch.float64)
    train(model, 0)
    add_extra(model), add_extra(whole)
    assert_refused(model, r"extra\.weight")
    for each in (model, whole):
        inner(each).extra.requires_grad_(False)
    train_both(model, whole, 1, "with a frozen extra")
    inner(model).extra.requires_grad_(True)
    assert_refused(model, r"extra\.weight")
    del inner(model).extra, inner(whole).extra
    train_both(model, whole, 2, "with the extra deleted")


@three_ways
@on_ranks
def test_what_was_ignored_from_the_beginning_is_the_users_own(way: str) -> None:
    """Its gradients stay each rank's own; freezing it, training it again and new values change nothing in that."""
    torch.manual_seed(0)
    model = WithPlain().double()
    extra = model.extra
    if way in LAYOUTS:
        model = shard(model, way, named("first", "second"), ignored_params=set(extra.parameters()))
    else:
        model = shard(model, way, named(), ignored_modules=[extra])
    train(model, 0)
    extra.requires_grad_(False)
    train(model, 1)
    assert extra.weight.grad is None
    extra.requires_grad_(True)
    torch.manual_seed(0)
    whole = WithPlain().double()
    with torch.no_grad():
        extra.weight.mul_(0.5), whole.extra.weight.mul_(0.5)
    train_both(model, whole, 2, "what is sharded")
    train(whole, 2)  # this rank's batch alone
    torch.testing.assert_close(extra.weight.grad, whole.extra.weight.grad)
    if way not in LAYOUTS:  # `ignored_modules` names modules: what they hold, now or later, is the user's
        extra.more = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        train(model, 3)
        assert extra.weight.grad is not None


class Lazy(nn.Module):
    """Makes its weight when it first sees an input, as hand-written lazy layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(4, dtype=x.dtype))
        return self.linear(x) * self.late


@three_ways
@on_ranks
def test_a_parameter_made_by_the_first_forward_is_refused_at_the_second(way: str) -> None:
    model = sharded(example_of(lambda: nn.Sequential(Lazy(), nn.Linear(4, 3)), "0"), way)
    with pytest.raises(fullshard.FullshardError, match=r"0\.late"):
        for number in range(2):
            train(model, number)


@on_ranks
def test_modules_may_be_taken_away() -> None:
    """What a deleted module held gets no gradient from then on; the rest trains on exactly."""
    model, whole = sharded(NET, "rows"), NET.make(torch.float64)
    train(model, 0)
    model.head, whole.head = nn.Identity(), nn.Identity()
    for number in range(2):
        train_both(model, whole, number, "without a head")


@three_ways
@pytest.mark.parametrize("when", ["before the first step", "after it", "before its backward"])
@on_ranks
def test_what_is_sharded_and_added_is_one_of_the_roots_units(way: str, when: str) -> None:
    """With gradients of whatever ran before, and the collectives of a model that had it from the beginning."""
    model, whole = sharded(NET, way), NET.make(torch.float64)

    def add() -> None:
        inner(model).extra, whole.extra = shard(linear(), way, named()), linear()

    def losses(number: int) -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        return model(batch(number, rank, 4)).square().mean(), whole(batch(number, None, 4)).square().mean()

    def agree(what: str) -> None:
        assert_equal(gradients_of(model), {n: p.grad for n, p in whole.named_parameters()}, what)

    ahead = ()
    if when == "before its backward":
        ahead = losses(0)
    elif when == "after it":
        train_both(model, whole, 0, "before")
    add()
    if when != "before its backward":
        model.zero_grad(), whole.zero_grad()
    for number in range(1, 4):
        for loss in (*ahead, *losses(number)):
            loss.backward()
        ahead = ()
        agree(f"in step {number}")
    (root,) = {id(one.root): one.root for one in runners_in(model)}.values()
    assert [one.unit.name for one in root.units].count("extra") == 1
    with fullshard.record_events() as events:
        train(model, 5)
    reduced = [event.unit for event in events if event.verb == "reduce"]
    assert len(reduced) == len(set(reduced)) == 4, reduced


@three_ways
@on_ranks
def test_what_is_added_and_taken_away_again_and_again_leaves_nothing(way: str) -> None:
    model, whole = sharded(NET, way), NET.make(torch.float64)
    units, tensors = [], []
    for number in range(8):
        inner(model).extra, whole.extra = shard(linear(), way, named()), linear()
        for _ in range(2):
            model.zero_grad(), whole.zero_grad()
            train_both(model, whole, number, f"with extra {number}")
        model.zero_grad()
        del inner(model).extra, whole.extra
        gc.collect()
        units.append(len(next(iter(runners_in(model))).root.units))
        tensors.append(count_tensors())  # of all ranks' threads
    assert set(units) == {4} and max(tensors[4:]) <= max(tensors[:4]), (units, tensors)


def count_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


# A `Parameter` assigned to a module of a unit while a step is under way.


MOMENTS = ("between steps", "after forward", "in backward")
CASES = [
    *((way, moment) for way in ("rows", "flat", "originals") for moment in MOMENTS),
    *((layout, "after unshard") for layout in ("rows", "flat")),  # the wrapper has no unshard()
    *(("wrapper", moment) for moment in MOMENTS[:2]),
]
per_parameter = pytest.mark.parametrize("way", ["rows", "flat", "originals"])


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


@per_parameter
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


@per_parameter
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


@per_parameter
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
