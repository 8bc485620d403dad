"""Parameters that a model gains after it was sharded: a new head, an adapter.

They belong to no unit, so nothing would reduce their gradients and every rank would train its own: the next forward
that trains refuses them by name, before anything is changed, unless they are frozen, ignored, or sharded by now.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from ways import (
    LAYOUTS,
    assert_equal,
    every_layout,
    every_way,
    every_wrapper,
    example_of,
    named,
    shard,
    sharded,
    whole_gradients,
    whole_parameters,
)

SECONDS = 40  # a hang is this, not a minute
TRAINING = {"lr": 0.05, "eps": 1e-3}


class Net(nn.Module):
    """Two units, a head in the root, and whatever is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        out = self.head(hidden)
        if hasattr(self, "extra"):
            out = out + self.extra(hidden)
        return out


class Layer(nn.Module):
    """A linear layer with room for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if hasattr(self, "adapter"):
            out = out + x @ self.adapter
        return torch.tanh(out)


NET = example_of(Net, "first", "second")


def inner(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def layer(model: nn.Module) -> nn.Module:
    return inner(inner(model).second)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def train(model: nn.Module, number: int, ranks: tuple[int, ...] = ()) -> None:
    for rank in ranks or (dist.get_rank(),):
        (model(batch(rank, number)).square().mean() / max(len(ranks), 1)).backward()


def add_extra(model: nn.Module) -> None:
    inner(model).extra = linear()


def replace_head(model: nn.Module) -> None:
    inner(model).head = linear()


def add_adapter(model: nn.Module) -> None:
    layer(model).adapter = nn.Parameter(torch.full((4, 4), 0.1, dtype=torch.float64))


def add_within(model: nn.Module) -> None:
    """A module in a unit is replaced by one that contains it."""
    unit = layer(model)
    unit.linear = nn.Sequential(unit.linear, nn.Linear(4, 4).double())


def add_unused(model: nn.Module) -> None:
    """Nothing runs it now; an optimizer would decay it on every rank all the same, and some forward may."""
    inner(model).later = linear()


ADDED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "a module in the root": (add_extra, r"extra\.weight"),
    "a new head": (replace_head, r"head\.weight"),
    "an adapter in a unit": (add_adapter, r"second\.adapter"),
    "a layer in a unit": (add_within, r"second\.linear\.1\.weight"),
    "a module that is not used": (add_unused, r"later\.weight"),
}


@every_way
@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("what", ADDED)
def test_a_parameter_that_was_added_is_refused_by_name(run_ranks, way, when, what):
    assert all(run_ranks(added, way, when, what, timeout=SECONDS))


def added(way: str, when: str, what: str) -> bool:
    """On every rank, every time, and with nothing changed."""
    model = sharded(NET, way)
    if when == "after it":
        train(model, 0)
        model.zero_grad()
    before = {name: p.clone() for name, p in whole_parameters(model).items()}
    add, name = ADDED[what]
    add(model)
    for _ in range(2):
        with pytest.raises(fullshard.FullshardError, match=name):
            model(batch(dist.get_rank()))
    assert all(p.grad is None for p in model.parameters())
    after = whole_parameters(model)
    kept = before.keys() & after.keys()
    kept -= {"head.weight", "head.bias"} if what == "a new head" else set()
    assert_equal({n: after[n] for n in kept}, {n: before[n] for n in kept}, "parameters after the error")
    assert fullshard.memory_use(model).gathered == 0
    return True


@every_way
def test_the_refused_parameter_gone_or_frozen_training_goes_on(run_ranks, way):
    assert all(run_ranks(goes_on, way, timeout=SECONDS))


def goes_on(way: str) -> bool:
    """Frozen: it takes part. Trained again: refused again. Deleted: as if it had not been."""
    model, whole = sharded(NET, way), NET.make(torch.float64)
    train(model, 0)
    model.zero_grad()
    add_extra(model)
    add_extra(whole)
    with pytest.raises(fullshard.FullshardError, match=r"extra\.weight"):
        model(batch(dist.get_rank()))
    for each in (model, whole):
        inner(each).extra.requires_grad_(False)
    train(model, 1)
    train(whole, 1, (0, 1))
    assert_equal(of_trained(whole_gradients(model)), gradients_of(whole), "with a frozen extra")
    inner(model).extra.requires_grad_(True)
    model.zero_grad()
    whole.zero_grad()
    with pytest.raises(fullshard.FullshardError, match=r"extra\.weight"):
        model(batch(dist.get_rank()))
    del inner(model).extra, inner(whole).extra
    train(model, 2)
    train(whole, 2, (0, 1))
    assert_equal(of_trained(whole_gradients(model)), gradients_of(whole), "with the extra deleted")
    return True


def of_trained(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: grad for name, grad in found.items() if not name.startswith("extra")}


def gradients_of(whole: nn.Module) -> dict[str, Tensor | None]:
    return of_trained({name: p.grad for name, p in whole.named_parameters()})


# What may be added.


@every_way
@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("what", ["a module in the root", "a new head", "an adapter in a unit"])
def test_a_frozen_parameter_may_be_added(run_ranks, way, when, what):
    assert all(run_ranks(frozen, way, when, what, timeout=SECONDS))


def frozen(way: str, when: str, what: str) -> bool:
    model, whole = sharded(NET, way), NET.make(torch.float64)
    if when == "after it":
        train(model, 0)
        model.zero_grad()
    for each in (model, whole):
        known = {id(p) for p in each.parameters()}
        ADDED[what][0](each)
        for p in each.parameters():
            if id(p) not in known:
                p.requires_grad_(False)
    for number in range(2):
        train(model, number)
        train(whole, number, (0, 1))
        got = {name: grad for name, grad in whole_gradients(model).items() if grad is not None}
        want = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        assert_equal(got, want, f"step {number}")
        model.zero_grad()
        whole.zero_grad()
    return True


@every_way
@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_a_unit_of_its_own_may_be_added(run_ranks, way, when):
    assert all(run_ranks(unit_added, way, when, timeout=SECONDS))


def unit_added(way: str, when: str) -> bool:
    """`fully_shard` or the wrapper, called on the new module: it trains as the others do."""
    model, whole = sharded(NET, way), NET.make(torch.float64)
    ours, theirs = (torch.optim.AdamW(each.parameters(), **TRAINING) for each in (model, whole))

    def step(number: int) -> None:
        train(model, number)
        train(whole, number, (0, 1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()

    if when == "after it":
        step(0)
    extra = linear()
    extra = shard(extra, way)
    inner(model).extra, whole.extra = extra, linear()
    ours.add_param_group({"params": list(extra.parameters())})
    theirs.add_param_group({"params": list(whole.extra.parameters())})
    for number in range(1, 4):
        step(number)
    want = {name: p.detach() for name, p in whole.named_parameters()}
    assert_equal(whole_parameters(model), want, "parameters", 1e-11)
    return True


class WithPlain(Net):
    """The extra module is there from the beginning, and kept out of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 3)


@every_way
@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_what_was_ignored_from_the_beginning_is_the_users_own(run_ranks, way, when):
    assert all(run_ranks(ignored, way, when, timeout=SECONDS))


def ignored(way: str, when: str) -> bool:
    """Its gradients stay each rank's own; freezing it, training it again and new values change nothing in that."""
    torch.manual_seed(0)
    model = WithPlain().double()
    extra = model.extra
    if way in LAYOUTS:
        model = shard(model, way, named("first", "second"), ignored_params=set(extra.parameters()))
    else:
        model = shard(model, way, named(), ignored_modules=[extra])
    if when == "after it":
        train(model, 0)
        model.zero_grad()
    extra.requires_grad_(False)
    train(model, 1)
    assert extra.weight.grad is None
    extra.requires_grad_(True)
    with torch.no_grad():
        extra.weight.mul_(0.5)
    model.zero_grad()
    train(model, 2)
    torch.manual_seed(0)
    whole = WithPlain().double()
    with torch.no_grad():
        whole.extra.weight.mul_(0.5)
    train(whole, 2)  # this rank's batch alone
    torch.testing.assert_close(extra.weight.grad, whole.extra.weight.grad)
    whole.zero_grad()
    train(whole, 2, (0, 1))
    assert_equal(of_trained(whole_gradients(model)), gradients_of(whole), "what is sharded")
    return True


@every_wrapper
def test_an_ignored_module_may_gain_parameters(run_ranks, way):
    """`ignored_modules` names modules: what they hold, now or later, is the user's."""
    assert all(run_ranks(gaining, way, timeout=SECONDS))


def gaining(way: str) -> bool:
    torch.manual_seed(0)
    model = WithPlain().double()
    wrapped = shard(model, way, named(), ignored_modules=[model.extra])
    train(wrapped, 0)
    model.extra.more = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    wrapped.zero_grad()
    train(wrapped, 1)
    assert model.extra.weight.grad is not None
    return True


# Made inside of a forward.


class Lazy(nn.Module):
    """Makes its weight when it first sees an input, as hand-written lazy layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(4, dtype=x.dtype))
        return self.linear(x) * self.late


LAZY = example_of(lambda: nn.Sequential(Lazy(), nn.Linear(4, 3)), "0")


@every_way
def test_a_parameter_made_by_the_first_forward_is_refused_at_the_second(run_ranks, way):
    assert all(run_ranks(lazily, way, timeout=SECONDS))


def lazily(way: str) -> bool:
    model = sharded(LAZY, way)
    with pytest.raises(fullshard.FullshardError, match=r"0\.late"):
        for number in range(2):
            train(model, number)
            model.zero_grad()
    return True


@every_layout
def test_modules_may_be_taken_away(run_ranks, way):
    """What a deleted module held gets no gradient from then on; the rest trains on exactly."""
    assert all(run_ranks(taken_away, way, timeout=SECONDS))


def taken_away(way: str) -> bool:
    model, whole = sharded(NET, way), NET.make(torch.float64)
    train(model, 0)
    model.zero_grad()
    model.head, whole.head = nn.Identity(), nn.Identity()
    for number in range(2):
        train(model, number)
        train(whole, number, (0, 1))
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, "without a head")
    return True
