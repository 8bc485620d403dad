"""A forward that writes to its own parameter writes to gathered memory, which is freed after it.

Such a write would be lost, or live on some ranks for a while: it raises, and names the parameter, when the unit's
forward ends. Where code only reads, or writes to what is not sharded, nothing is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fullshard
from fullshard import FullyShardedDataParallel, PhaseError, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from ways import (
    PER_PARAMETER,
    WRAPPERS,
    assert_equal,
    batch,
    but_last,
    differences,
    error_of,
    example_of,
    gradient_problems,
    layers,
    loss_of,
    mine,
    named_error,
    on_ranks,
    shard,
    sharded,
    some_ways,
    whole_gradients,
    whole_parameters,
)

WRITES: dict[str, Callable[[Any], object]] = {
    "clamp_": lambda weight: weight.clamp_(-0.1, 0.1),
    "copy_": lambda weight: weight.copy_(weight / weight.norm()),
    "index": lambda weight: weight[0].zero_(),
    "detached": lambda weight: weight.detach().mul_(0.5),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "out": lambda weight: torch.mul(weight, 0.5, out=weight),
    ".data =": lambda weight: setattr(weight, "data", weight * 0.5),
    ".data.clamp_": lambda weight: weight.data.clamp_(-0.1, 0.1),  # autograd's version counter misses it
    "max_norm": lambda weight: nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=0.1),
}


class Writing(nn.Module):
    """Writes to its weight in the way that is told, before it uses it or after, or in a hook of its layer's."""

    def __init__(self, how: str, when: str) -> None:
        super().__init__()
        self.how, self.when = how, when
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_pre_hook(lambda *_: self.write("in a hook before"))
        self.layer.register_forward_hook(lambda *_: self.write("in a hook after"))

    def write(self, when: str) -> None:
        if when == self.when:
            with torch.no_grad():
                WRITES[self.how](self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.write("before")
        x = self.layer(x)
        self.write("after")
        return x


class Around(nn.Module):
    """A unit that writes, or not, between two layers, which are the root's."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(4, 4), middle, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.middle(self.before(x))))


def rows_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def step(model: nn.Module, ranks: list[int] | None = None) -> None:
    for rank in ranks or [dist.get_rank()]:
        (model(rows_of(rank)).square().mean() / len(ranks or [0])).backward()


CASES = [(how, "before") for how in WRITES]
CASES += [("clamp_", when) for when in ("after", "in a hook before", "in a hook after")]


@some_ways
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@on_ranks
def test_a_forward_that_writes_raises_by_name(way: str, grad: bool) -> list[str]:
    """On every rank; the values are those from before, and the model trains on once it does not write."""
    problems: list[str] = []
    for (how, when), units in [(case, units) for case in CASES for units in (["middle"], [])]:
        where = f"{how} {when} {units}"
        if (how == ".data =" and not units and way == "wrapper") or (how == "max_norm" and not grad):
            continue
        example = example_of(lambda how=how, when=when: Around(Writing(how, when)), *units)
        model, plain = sharded(example, way), example.make(torch.float64)
        before = whole_parameters(model)
        with torch.set_grad_enabled(grad):
            error = error_of(lambda model=model: model(rows_of(dist.get_rank())))
        problems += named_error(error, "middle.layer.weight", where=where)
        problems += differences(where, whole_parameters(model), before, 0.0)
        for module in (*model.modules(), *plain.modules()):
            if isinstance(module, Writing):
                module.when = "never"
        step(model)
        step(plain, [0, 1])
        problems += gradient_problems(where, model, plain)
    return problems


@pytest.mark.parametrize("way", ["rows", "flat"])
@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept after forward"])
def test_a_write_between_unshard_and_reshard_raises_by_name(fake_world, way, kept):
    """At `reshard()`, or at the next forward if that comes first. Values are written through sharded parameters."""
    fake_world(2)
    model: Any = sharded(example_of(lambda: Around(nn.Linear(4, 4)), "middle"), way)
    if kept:
        model.set_reshard_after_backward(False)
    step(model)
    model.zero_grad()
    model.middle.unshard()
    with torch.no_grad():
        model.middle.weight.mul_(2)
    with pytest.raises(fullshard.FullshardError, match=r"middle\.weight"):
        model(rows_of(0)) if kept else model.middle.reshard()


# What is no write to a parameter.


class Counting(nn.Module):
    """Running statistics, a spectral norm, dropout and operations in place on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.plain = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = self.plain.weight * 1.0
        weight.clamp_(-0.5, 0.5)
        return nn.functional.linear(torch.relu_(self.bounded(self.norm(x))), weight, self.plain.bias)


@some_ways
@on_ranks
def test_what_writes_to_buffers_and_activations_is_let_be(way: str) -> None:
    """Steps, loads, initialisations and clipping between the forwards are no writes of a forward either."""
    model = sharded(example_of(lambda: Around(Counting()), "middle"), way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.99)
            model(rows_of(dist.get_rank()))
        model.load_state_dict(model.state_dict())
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)
    step(model)


# What only reads weights is no change of them.


NO_SHARD = ShardingStrategy.NO_SHARD


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().norm()


def write_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.cpu("its last refusal comes at once on a CPU; on a device two backwards later")
@on_ranks
def test_whole_values_are_read_between_a_forward_and_its_backward() -> None:
    """`writeback` is on by default; only a write is a change."""
    plain = layers()
    loss_of(plain, batch(0)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for way in WRAPPERS:
        for settings in ({}, {"sharding_strategy": NO_SHARD}):
            for options in ({}, {"with_grads": True}, {"offload_to_cpu": True}, {"recurse": False}):
                model = shard(layers(), way, but_last, **settings)
                loss = loss_of(model, mine(0))
                with FSDP.summon_full_params(model, **options):
                    read(model)
                loss.backward()
                assert_equal(whole_gradients(model), wanted, f"{way} {settings} {options}")
            loss = loss_of(model, mine(0))
            with FSDP.summon_full_params(model):
                write_all(model)
            with pytest.raises(PhaseError, match="were changed between a forward and its backward"):
                loss.backward()


@on_ranks
def test_what_is_not_split_is_written_to_inside_summon_full_params() -> None:
    """One FlatParameter over a shard that is the whole: what is shown is its memory."""
    for way in WRAPPERS:
        for writeback in (True, False):
            model = shard(layers(), way, but_last, sharding_strategy=NO_SHARD)
            for _ in range(2):
                with FSDP.summon_full_params(model, writeback=writeback):
                    for parameter in model.parameters():
                        parameter.detach().add_(1.0) if parameter.dim() > 1 else parameter.data.zero_()
            for name, value in whole_parameters(model).items():
                expected = layers().get_parameter(name) + 2 if value.dim() > 1 else torch.zeros_like(value)
                assert torch.allclose(value, expected), f"{way} writeback={writeback} {name}"
            loss_of(model, mine(0)).backward()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Inverted(Doubled):
    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Emptied(Doubled):
    """In place: a change."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.zero_()


@contextlib.contextmanager
def doubled(layer: nn.Module, parametrization: nn.Module) -> Iterator[None]:
    parametrize.register_parametrization(layer, "weight", parametrization)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


class Experts(nn.Module):
    """Weights of three dims, which its forward computes with doubled."""

    def __init__(self, parametrization: Callable[[], nn.Module] = Doubled) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(3, 5, 5))
        self.outer = nn.Linear(5, 5)
        self.parametrization = parametrization

    def forward(self, x: Tensor) -> Tensor:
        with doubled(self.inner, self.parametrization()):
            x = torch.tanh(torch.einsum("ni,eio->no", x, self.inner.weight))
        return self.outer(x)


def two_experts(parametrization: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(Experts(parametrization), Experts(parametrization))


@on_ranks
def test_a_parametrization_in_a_forward_is_no_change() -> None:
    """PEFT's LoRA with `target_parameters` does this, around experts."""
    example = example_of(partial(two_experts, Doubled), "0", "1")
    plain = example.make(torch.float64)
    loss_of(plain, batch(0)).backward()
    for way in PER_PARAMETER:  # a FlatParameter's are not registered on their modules, in PyTorch either
        for keep in (False, True):
            model = sharded(example, way, keep=keep)
            for _ in range(2):
                loss_of(model, mine(0)).backward()
            wanted = {name: 2 * p.grad for name, p in plain.named_parameters()}
            assert_equal(whole_gradients(model), wanted, f"{way} keep={keep}")
            assert_equal(whole_parameters(model), dict(plain.named_parameters()), f"{way} keep={keep}")
        for parametrization in (Inverted, Emptied):
            model = sharded(example_of(partial(two_experts, parametrization), "0", "1"), way)
            with pytest.raises(PhaseError, match="was written to"):
                model(mine(0))
