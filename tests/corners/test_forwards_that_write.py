"""A forward that writes to its own parameter writes to gathered memory, which is freed after it.

Such a write would be lost, or live on some ranks for a while: it raises, and names the parameter, when the unit's
forward ends. Where code only reads, or writes to what is not sharded, nothing is said.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from ways import assert_equal, every_layout, every_way, example_of, sharded, whole_gradients, whole_parameters

SECONDS = 40  # a hang is this, not a minute


class Writing(nn.Module):
    """Writes to its weight in the way that is told, before it uses it or after."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T if self.how.endswith("after") else None
        write(self.weight, self.how.removesuffix(" after"))
        return x @ self.weight.T if out is None else out


def write(weight: nn.Parameter, how: str) -> None:
    with torch.no_grad():
        if how == "clamp_":
            weight.clamp_(-0.5, 0.5)
        elif how == "copy_":
            weight.copy_(weight / weight.norm())
        elif how == "index":
            weight[0] = 0.0
        elif how == "detached":
            weight.detach().mul_(0.5)
        elif how == "foreach":
            torch._foreach_mul_([weight], 0.5)
        elif how == "out":
            torch.mul(weight, 0.5, out=weight)
        elif how == ".data =":
            weight.data = weight * 0.5
        elif how == ".data.clamp_":
            weight.data.clamp_(-0.5, 0.5)


WRITES = ["clamp_", "clamp_ after", "copy_", "index", "detached", "foreach", "out", ".data ="]


class Around(nn.Module):
    """A unit that writes, or not, between two layers, which are the root's."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(4, 4), middle, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.middle(self.before(x))))


def batch(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@every_way
@pytest.mark.parametrize("unit", ["a unit", "the root"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_a_forward_that_writes_raises_by_name(run_ranks, way, unit, grad):
    assert all(run_ranks(writing, way, unit, grad, WRITES, timeout=SECONDS))


def writing(way: str, unit: str, grad: bool, hows: list[str]) -> bool:
    """On every rank; the values are those from before, and the model trains on once it does not write."""
    for how in hows:
        example = example_of(lambda how=how: Around(Writing(how)), *(["middle"] if unit == "a unit" else []))
        model = sharded(example, way)
        before = whole_parameters(model)
        with torch.set_grad_enabled(grad):
            expect(model, how)
        assert_equal(whole_parameters(model), before, f"parameters after {how}")
        inner(model).how = "nothing"
        whole = example.make(torch.float64)
        whole.middle.how = "nothing"
        trains_as(model, whole, how)
    return True


def inner(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, Writing))


def expect(model: nn.Module, how: str) -> None:
    try:
        model(batch(dist.get_rank()))
    except fullshard.FullshardError as error:
        assert "middle.weight" in str(error), error
    else:
        raise AssertionError(f"a write by {how} went unnoticed")


def trains_as(model: nn.Module, whole: nn.Module, what: str) -> None:
    model(batch(dist.get_rank())).square().mean().backward()
    for rank in range(2):
        (whole(batch(rank)).square().mean() / 2).backward()
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, f"gradients after {what}")


@every_way
def test_a_write_through_data_raises_by_name(run_ranks, way):
    """`self.weight.data.clamp_()`, as weight clipping is usually written; autograd's version counter misses it."""
    assert all(run_ranks(writing, way, "a unit", True, [".data.clamp_"], timeout=SECONDS))


class Renormed(nn.Module):
    """Embeds its input's signs with rows of a bounded norm."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.table = nn.Embedding(2, 4, max_norm=None if functional else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).long()
        if self.functional:
            return x + nn.functional.embedding(rows, self.table.weight, max_norm=0.1)
        return x + self.table(rows)


@every_way
@pytest.mark.parametrize("functional", [False, True])
def test_max_norm_of_an_embedding_raises_by_name(run_ranks, way, functional):
    assert all(run_ranks(renormed, way, functional, timeout=SECONDS))


def renormed(way: str, functional: bool) -> bool:
    model = sharded(example_of(lambda: Around(Renormed(functional)), "middle"), way)
    with pytest.raises(fullshard.FullshardError, match=r"middle\.table\.weight"):
        model(batch(dist.get_rank()))
    return True


@every_way
@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_write_in_a_forward_hook_raises_by_name(run_ranks, way, hook):
    assert all(run_ranks(in_hook, way, hook, timeout=SECONDS))


def in_hook(way: str, hook: str) -> bool:
    model = sharded(example_of(lambda: Around(nn.Sequential(nn.Linear(4, 4))), "middle"), way)
    linear = next(m for n, m in model.named_modules() if n.endswith("0"))

    def clamp(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    (linear.register_forward_pre_hook if hook == "before" else linear.register_forward_hook)(clamp)
    with pytest.raises(fullshard.FullshardError, match=r"middle\.0\.weight"):
        model(batch(dist.get_rank()))
    return True


@every_layout
@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept after forward"])
def test_a_write_between_unshard_and_reshard_raises_by_name(run_ranks, way, kept):
    assert all(run_ranks(unsharded, way, kept, timeout=SECONDS))


def unsharded(way: str, kept: bool) -> bool:
    """At `reshard()`, or at the next forward if that comes first. Values are written through sharded parameters."""
    example = example_of(lambda: Around(nn.Linear(4, 4)), "middle")
    model = sharded(example, way)
    if kept:
        model.set_reshard_after_backward(False)
    model(batch(dist.get_rank())).sum().backward()
    model.zero_grad()
    model.middle.unshard()
    with torch.no_grad():
        model.middle.weight.mul_(2)
    with pytest.raises(fullshard.FullshardError, match=r"middle\.weight"):
        if kept:
            model(batch(dist.get_rank()))
        else:
            model.middle.reshard()
    return True


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


@every_way
def test_what_writes_to_buffers_and_activations_is_let_be(run_ranks, way):
    assert all(run_ranks(harmless, way, timeout=SECONDS))


def harmless(way: str) -> bool:
    """Steps, loads, initialisations and clipping between the forwards are no writes of a forward either."""
    model = sharded(example_of(lambda: Around(Counting()), "middle"), way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(batch(dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
            model(batch(dist.get_rank()))
        model.load_state_dict(model.state_dict())
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    model(batch(dist.get_rank())).square().mean().backward()
    return True
