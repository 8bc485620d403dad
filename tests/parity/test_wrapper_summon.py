"""`summon_full_params`: values, writeback, ranks, devices, gradients, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.api.wrapper import summon
from fullshard.checkpoint.whole import Batch
from fullshard.forms import Place
from ways import on_ranks

SHARDED = fullshard.FullyShardedDataParallel
both = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


class Net(nn.Module):
    """Odd sizes, a buffer, and a frozen instance: padding and empty shards on two and four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(3, 5)
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        self.frozen = nn.Linear(7, 1)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.first(x))
        return self.last(x) + self.frozen(x)


def build(orig: bool, strategy: str = "FULL_SHARD") -> tuple[Net, nn.Module]:
    """The plain model, and the same wrapped: root, inner, and the frozen part."""
    plain, model = Net(), Net()
    settings = {"use_orig_params": orig, "sharding_strategy": fullshard.ShardingStrategy[strategy]}
    model.inner = SHARDED(model.inner, **settings)
    model.frozen = SHARDED(model.frozen, **settings)
    return plain, SHARDED(model, **settings)


@both
@pytest.mark.parametrize(
    ("how", "writeback", "to_cpu"),
    [
        ("in place", True, False),
        ("in place", False, True),
        ("data", True, True),
        ("assign", True, False),
        ("assign", False, False),
    ],
)
@on_ranks
def test_writeback(orig: bool, writeback: bool, how: str, to_cpu: bool) -> None:
    """Write to a whole parameter in one of three ways; what a later summon shows, and what the forward computes."""
    plain, model = build(orig)
    target = torch.arange(15.0).view(5, 3) / 15
    with SHARDED.summon_full_params(model, writeback=writeback, offload_to_cpu=to_cpu), torch.no_grad():
        weight = model.module.first.weight
        if how == "in place":
            weight.copy_(target)
        elif how == "data":
            weight.data = target.clone()
        else:
            model.module.first.weight = nn.Parameter(target.clone())
    if writeback:
        plain.first.weight.data.copy_(target)
    with SHARDED.summon_full_params(model, writeback=False):
        assert torch.equal(model.module.first.weight, plain.first.weight), "value"
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(x), plain(x), atol=1e-6), "forward"
    assert len(list(model.parameters())) == (10 if orig else 3), f"{len(list(model.parameters()))} parameters"


@both
@on_ranks
def test_rank0_only(orig: bool) -> list[str]:
    plain, model = build(orig, "SHARD_GRAD_OP")
    before = [tuple(p.shape) for p in model.parameters()]
    with SHARDED.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        whole = [tuple(p.shape) for p in model.parameters()]
    wanted = [tuple(p.shape) for p in plain.parameters()] if dist.get_rank() == 0 else before
    return [] if whole == wanted else [f"{whole}"]


@both
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_shows_nothing_keeps_no_whole_value(fake_world, orig: bool, rank: int) -> None:
    fake_world(2, rank)
    _, model = build(orig)
    pack, buffers = Batch.pack, list[weakref.ref[torch.UntypedStorage]]()

    def counted(batch: Batch) -> None:
        pack(batch)
        assert batch._buffer is not None
        buffers.append(weakref.ref(batch._buffer.untyped_storage()))

    summoned = SHARDED.summon_full_params(model, rank0_only=True, writeback=False)
    with mock.patch.object(Batch, "pack", counted), summoned:
        assert [ref() is not None for ref in buffers] == [rank == 0] * 3


@both
@pytest.mark.parametrize("what", ["Place.register", "summon._point"])
def test_memory_that_runs_out_while_parameters_are_shown(fake_world, orig: bool, what: str) -> None:
    fake_world(2, 0)
    _, model = build(orig)
    before = [(name, p, p.shape, p.data_ptr()) for name, p in model.named_parameters()]
    owner, name = (Place, "register") if what == "Place.register" else (summon, "_point")
    call, calls = getattr(owner, name), itertools.count()

    def fails(*args: object) -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("planted")
        call(*args)

    raises = pytest.raises(torch.OutOfMemoryError, match="planted") if orig or owner is Place else nullcontext()
    with mock.patch.object(owner, name, fails), raises, SHARDED.summon_full_params(model):
        pass
    after = [(name, p, p.shape, p.data_ptr()) for name, p in model.named_parameters()]
    assert all(a[1] is b[1] and a[2:] == b[2:] for a, b in zip(after, before, strict=True))
    model(torch.ones(2, 3)).sum().backward()


def test_a_refused_parameter_leaves_no_other_whole(fake_world) -> None:
    """In another bucket of its unit: one trains, one is frozen."""
    fake_world(2, 0)
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    model = SHARDED(layer, use_orig_params=True)
    assert len(model._runner().unit.buckets) == 2
    for name in ("weight", "bias"):
        before = [p.shape for p in layer.parameters()]
        with pytest.raises(fullshard.ConfigError, match=name), SHARDED.summon_full_params(model):
            setattr(layer, name, nn.Parameter(torch.zeros(3)))
        assert [p.shape for p in layer.parameters()] == before
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("orig", "writeback", "to_cpu"),
    [(False, True, False), (False, True, True), (False, False, True), (True, True, True), (True, False, False)],
)
@on_ranks
def test_gradients(orig: bool, writeback: bool, to_cpu: bool) -> list[str]:
    """PyTorch's has them with original parameters and without offloading only."""
    plain, model = build(orig)
    plain, model = plain.double(), model.double()
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for one in (plain, model):
        one(x).square().sum().backward()
    problems = []
    with SHARDED.summon_full_params(model, with_grads=True, writeback=writeback, offload_to_cpu=to_cpu):
        for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            if (p.grad is None) != (q.grad is None):
                problems.append(f"{name}: {q.grad}")
            elif p.grad is not None:
                assert torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-14), name
                q.grad.mul_(2)
                if writeback:
                    p.grad.mul_(2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for optimizer in optimizers:
        optimizer.step()
    with SHARDED.summon_full_params(model, writeback=False):
        for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-12, atol=1e-14), f"{name} after the step"
    return problems


@both
@on_ranks
def test_refusals(orig: bool) -> list[str]:
    """What is refused, how, and that the model trains on afterwards."""
    _, model = build(orig)
    summon, said = SHARDED.summon_full_params, []

    def attempt(what, kinds, text):
        try:
            what()
        except kinds as error:
            assert text in str(error), f"{error}"
        else:
            said.append(f"{text}: not refused")

    def entered(**arguments):
        with summon(model, **arguments):
            return

    def nested():
        with summon(model), summon(model):
            return

    def other_shape():
        with summon(model):
            model.module.first.weight = nn.Parameter(torch.ones(2, 2))

    both_types = (NotImplementedError, fullshard.ConfigError)
    attempt(lambda: entered(rank0_only=True, writeback=True), both_types, "writeback=True and rank0_only=True")
    attempt(nested, AssertionError, "already unsharding")
    attempt(other_shape, fullshard.ConfigError, "first.weight")
    hook = model.module.first.register_forward_hook(lambda *args: entered())
    attempt(lambda: model(torch.ones(2, 3)), AssertionError, "during forward/backward")
    hook.remove()
    y = model(torch.ones(2, 3))
    y.register_hook(lambda grad: entered())
    attempt(lambda: y.sum().backward(), AssertionError, "during forward/backward")
    model.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    assert not any(p.grad is None for p in model.parameters() if p.requires_grad and (p.numel() or not orig))
    return said


@both
@on_ranks
def test_which_instances(orig: bool) -> None:
    """Without recurse, one instance alone; nested by hand inside out; a module that only contains instances."""
    plain, model = build(orig)
    with SHARDED.summon_full_params(model, recurse=False):
        assert model.module.first.weight.shape == (5, 3), "own"
        assert not any(p.shape == (7, 5) for p in model.parameters()), "inner was summoned"
        with SHARDED.summon_full_params(model.module.inner):
            assert torch.equal(model.module.inner.module[0].weight, plain.inner[0].weight), "inner"
    outer = nn.Sequential(copy.deepcopy(plain.first), model)
    with SHARDED.summon_full_params(outer):
        assert len(list(outer.parameters())) == 12, "contained"


@pytest.mark.parametrize(("orig", "summoned"), [(False, True), (True, False)])
@on_ranks
def test_apply(orig: bool, summoned: bool) -> list[str]:
    """`apply` sees whole parameters, and what it writes stays; by itself, and where they are shown already."""
    plain, model = build(orig)
    shapes: dict[str, list[tuple[int, ...]]] = {"plain": [], "model": []}

    def init(key):
        def fn(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                shapes[key].append(tuple(module.weight.shape))
                with torch.no_grad():
                    module.weight.fill_(module.weight.numel())

        return fn

    plain.apply(init("plain"))
    with SHARDED.summon_full_params(model) if summoned else nullcontext():
        model.apply(init("model"))
    problems = [] if shapes["plain"] == shapes["model"] else [f"{shapes}"]
    state = model.state_dict()
    return problems + [name for name, p in plain.named_parameters() if not torch.equal(state[name], p)]
