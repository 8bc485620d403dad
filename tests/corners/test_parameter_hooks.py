"""Hooks that users put on parameters, before sharding or after it: they see the reduced gradient, and may replace it.

What is right is plain PyTorch in one process: `register_hook` sees the gradient of one backward, whichever rank it came
from, before it is added to `.grad`, and may return another or change it in place; `register_post_accumulate_grad_hook`
runs once `.grad` is so; and no hook runs for a parameter that the backward did not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, optimizer_view
from models import Example, blocks_of
from ways import (
    WAYS,
    WRAPPERS,
    assert_equal,
    batch,
    children,
    example_of,
    on_ranks,
    shard,
    sharded,
    some_ways,
    synced,
    whole_gradients,
    whole_parameters,
)


class Net(nn.Module):
    """Two units and a root with parameters of its own; the second unit can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.out(x if skip else hidden)


NET = example_of(Net, "first", "second")
reference = partial(NET.make, torch.float64)
rows_and_flat = pytest.mark.parametrize("way", ["rows", "flat"])
WEIGHT = "second.weight"
Hook = Callable[[Tensor], Tensor | None]
per_parameter = pytest.mark.parametrize("way", ["rows", "flat", "originals"])
both_times = pytest.mark.parametrize("when", ["before", "after"])


def backward(model: nn.Module, number: int = 0, all_ranks: bool = False, skip: tuple[int, ...] = ()) -> None:
    """One backward: of this rank's batch, or of the mean over ranks; those in `skip` leave out a unit."""
    ranks = range(dist.get_world_size()) if all_ranks else [dist.get_rank()]
    for rank in ranks:
        (model(batch(number, rank, 4), rank in skip).square().mean() / len(ranks)).backward()


def hooked(way: str, when: str, register: Callable[[nn.Module], object]) -> tuple[nn.Module, nn.Module]:
    """The model sharded, its parameters hooked before or after that by `register(model)`; and an unsharded one."""

    def build() -> nn.Module:
        model = NET.build().double()  # at once, so that the objects with the hooks are the ones that are sharded
        if when == "before":
            register(model)
        return model

    model = sharded(Example(build, NET.units, kind="vectors"), way)
    if when == "after":
        register(model)
    return model, reference()


def compare(model: nn.Module, whole: nn.Module, what: str) -> None:
    assert_equal(whole_gradients(model), {n: p.grad for n, p in whole.named_parameters()}, what)


def zero(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()


def weight_of(model: nn.Module) -> nn.Parameter:
    """The parameter of that name in the unwrapped model."""
    return next(p for n, p in model.named_parameters() if n.replace("_fsdp_wrapped_module.", "") == WEIGHT)


def in_place(grad: Tensor) -> None:
    grad.mul_(2)


HOOKS: dict[str, Hook] = {
    "another": lambda grad: 2 * grad,
    "in place": in_place,
    "clipped": lambda grad: grad.clamp(-0.01, 0.01),  # of the mean over ranks, not of each rank's own
}


@per_parameter
@both_times
@pytest.mark.parametrize("what", HOOKS)
@on_ranks
def test_a_hook_sees_the_reduced_gradient_and_may_replace_it(way: str, when: str, what: str) -> None:
    """Steps of two reduced backwards, of one, and of one kept without sync and one reduced, for which it runs once."""
    calls: list[tuple[int, ...]] = []

    def hook(grad: Tensor) -> Tensor | None:
        calls.append(tuple(grad.shape))
        return HOOKS[what](grad)

    model, whole = hooked(way, when, lambda model: weight_of(model).register_hook(hook))
    for syncs in ((True, True), (True,), (False, True)):
        zero(model, whole)
        calls.clear()
        fresh = reference()
        for number, sync in enumerate(syncs):
            with synced(model, sync):
                backward(model, number)
            backward(fresh, number, all_ranks=True)
            assert sync or not calls
            if sync:
                grad = fresh.get_parameter(WEIGHT).grad
                given = HOOKS[what](grad)
                fresh.get_parameter(WEIGHT).grad = grad if given is None else given
                for mine, theirs in zip(whole.parameters(), fresh.parameters(), strict=True):
                    mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
                fresh.zero_grad()
        compare(model, whole, f"{syncs}")
        weight = weight_of(model)
        assert calls == [tuple(weight.shape)] * sum(syncs) or not weight.numel(), calls


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@per_parameter
@both_times
@on_ranks
def test_hooks_run_in_order_and_then_the_post_accumulate_ones(way: str, when: str) -> None:
    """Those get the parameter that the optimizer has, and see the complete gradient of every backward."""
    order: list[str] = []
    seen: list[tuple[int, Tensor]] = []

    def after(p: nn.Parameter) -> None:
        order.append("after")
        seen.append((id(p), local(p.grad).detach().clone()))

    def register(model: nn.Module) -> None:
        weight_of(model).register_hook(lambda grad: order.append("plus") or grad + 1)
        weight_of(model).register_hook(lambda grad: order.append("times") or grad * 2)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(after)

    model, whole = hooked(way, when, register)
    whole.get_parameter(WEIGHT).register_hook(lambda grad: grad + 0.5)  # a half of one for each of two ranks' backwards
    whole.get_parameter(WEIGHT).register_hook(lambda grad: grad * 2)
    for number in range(2):  # accumulated
        order.clear(), seen.clear()
        backward(model, number)
        backward(whole, number, all_ranks=True)
        compare(model, whole, f"backward {number}")
        for p in model.parameters():
            found = [grad for i, grad in seen if i == id(p)]
            assert not p.numel() or (len(found) == 1 and torch.equal(found[0], local(p.grad)))
        if weight_of(model).numel():
            assert order[order.index("plus") :][:3] == ["plus", "times", "after"]


@per_parameter
@both_times
@on_ranks
def test_hooks_stay_over_casts_and_go_when_removed(way: str, when: str) -> None:
    """Its handle works over sharding and over casts, which leave hooks where they are."""
    handles, casts = [], []

    def register(model: nn.Module) -> None:
        handles.append(weight_of(model).register_hook(lambda grad: 2 * grad))
        handles.append(weight_of(model).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(5)))

    model, whole = hooked(way, when, register)
    for factor in (10, 10, 1):
        zero(model, whole)
        backward(model)
        backward(whole, all_ranks=True)
        whole.get_parameter(WEIGHT).grad *= factor
        compare(model, whole, f"factor {factor}")
        if factor == 10 and len(casts) == 0:
            casts += [model.float().double(), whole.float().double()]
        else:
            [handle.remove() for handle in handles]


@some_ways
@pytest.mark.parametrize("takes", [False, True], ids=["kept", "taken away"])
@on_ranks
def test_hooks_of_a_parameter_that_some_ranks_use(way: str, takes: bool) -> None:
    """By turns all ranks, one, the other and none; gradients are added up, or an optimizer's hook takes them away."""
    model, whole, calls = sharded(NET, way), reference(), []
    hooked_names = [WEIGHT, "second.bias"] if way == "wrapper" else [WEIGHT]  # which are one flat parameter
    parameter = next(p for n, p in model.named_parameters() if "second" in n and "bias" not in n)
    total: Any = 0

    def after(p: nn.Parameter) -> None:
        nonlocal total
        calls.append("after")
        if takes:
            total = total + p.grad.detach().clone()
            p.grad = None

    parameter.register_hook(lambda grad: calls.append("hook") or 3 * grad)
    parameter.register_post_accumulate_grad_hook(after)
    for number, skip in enumerate([(0,), (1,), (), (0, 1), (0,), (0, 1)]):
        calls.clear()
        backward(model, number, skip=skip)
        fresh = reference()
        backward(fresh, number, all_ranks=True, skip=skip)
        for own, p in fresh.named_parameters():
            if p.grad is not None:
                mine, grad = whole.get_parameter(own), p.grad * (3 if own in hooked_names else 1)
                mine.grad = grad if mine.grad is None else mine.grad + grad
        if not takes:
            compare(model, whole, f"backward {number}, left out by {skip}")
        assert calls == ([] if skip == (0, 1) else ["hook", "after"]), (number, calls)
    if takes:
        assert parameter.grad is None
        parameter.grad = total
        compare(model, whole, "what the hook took away")


@rows_and_flat
@pytest.mark.parametrize("how", ["bfloat16 reductions", "offloaded", "a view"])
@on_ranks
def test_in_place_and_by_result(way: str, how: str) -> None:
    """A hook that changes its gradient in place does so whatever the dtype that was reduced in, and where it lies."""
    given: dict[str, Any] = {
        "bfloat16 reductions": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "a view": {},
    }[how]
    model, plain = (shard(reference(), way, children, **given) for _ in range(2))
    views, calls = optimizer_view(model) if how == "a view" else [], []
    for view in views:
        view.register_post_accumulate_grad_hook(lambda p: calls.append("view"))
    model.second.weight.register_hook(in_place)
    model.second.bias.register_hook(lambda grad: -grad)
    for number, skip in enumerate([(0,), (), (1,)]):
        for each in (model, plain):
            each.zero_grad()
            backward(each, number, skip=skip)
        want = dict(whole_gradients(plain))
        want[WEIGHT], want["second.bias"] = 2 * want[WEIGHT], -want["second.bias"]
        tolerance = 1e-2 if how == "bfloat16 reductions" else 1e-12
        assert_equal(whole_gradients(model), want, f"step {number}", tolerance)
    assert len(calls) == 3 * len(views)


class Tied(nn.Module):
    """A weight used twice, in two units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@rows_and_flat
@both_times
@on_ranks
def test_hooks_of_a_unit_that_gave_a_tied_weight_to_another(way: str, when: str) -> None:
    """`after`: between the two calls of `fully_shard`, of which the later one takes the shared weight away."""
    model, whole = Tied(), Tied()

    def register(m: nn.Module) -> None:
        for p, factor in ((m.first.weight, 2), (m.first.bias, 3), (m.second.bias, 5)):
            p.register_hook(lambda grad, factor=factor: factor * grad)

    if when == "before":
        register(model)
    for unit in (model.first, model.second):
        fully_shard(unit, **WAYS[way])
    if when == "after":
        register(model)
    fully_shard(model, **WAYS[way])
    register(whole)
    model(batch(0, dist.get_rank(), 4)).square().mean().backward()
    (sum(whole(batch(0, rank, 4)).square().mean() for rank in range(2)) / 2).backward()
    compare(model, whole, "tied")


@rows_and_flat
@on_ranks
def test_a_hook_may_not_return_another_shape(way: str) -> None:
    """On every rank, by name; and the model trains on once the hook is gone."""
    model, whole = sharded(NET, way), reference()
    handle = model.second.weight.register_hook(lambda grad: torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(fullshard.FullshardError, match=WEIGHT.replace(".", r"\.")):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    backward(whole, all_ranks=True)
    compare(model, whole, "after the error")


# The wrapper with one FlatParameter per instance.


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks
def test_hooks_from_before_a_flat_parameter_are_honoured(name: str) -> None:
    """The objects are gone after that: their hooks run on their parts."""
    model, whole = reference(), reference()
    hook = (lambda grad: 2 * grad) if name == "register_hook" else (lambda p: p.grad.mul_(2))
    getattr(model.get_parameter(WEIGHT), name)(hook)
    wrapped = FullyShardedDataParallel(model)
    backward(wrapped)
    backward(whole, all_ranks=True)
    whole.get_parameter(WEIGHT).grad *= 2
    compare(wrapped, whole, "a hook from before wrapping")


@some_ways
@on_ranks
def test_a_step_in_post_accumulate_hooks(way: str) -> None:
    """An optimizer in backward, on whatever `parameters()` gives."""
    model, whole = sharded(NET, way), reference()
    each = {p: torch.optim.AdamW([p], lr=1e-2, eps=1e-3) for p in model.parameters()}
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)

    def now(p: nn.Parameter) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(now)
    for number in range(3):
        backward(model, number)
        assert all(p.grad is None for p in each)
        backward(whole, number, all_ranks=True)
        theirs.step()
        theirs.zero_grad()
    assert_equal(whole_parameters(model), {n: p.detach() for n, p in whole.named_parameters()}, "parameters")


# Hooks that communicate: at the same place among the engine's own collectives on every rank.


WIDE = 8
POLLS: dict[str, Callable[[int, int], bool]] = {
    "rank 0 at once": lambda rank, asked: rank == 0,
    "rank 1 at once": lambda rank, asked: rank == 1,
    "alternating": lambda rank, asked: (rank + asked) % 2 == 0,
}


class Polled:
    """A pending collective that is waited for only when it is said to be done, or when the engine waits."""

    def __init__(self, inner: Any, comm: Differing) -> None:
        self.inner, self.comm, self.wait = inner, comm, inner.wait

    def is_completed(self) -> bool:
        self.comm.asked += 1
        if not POLLS[self.comm.polls](dist.get_rank(), self.comm.asked):
            return False
        self.wait()
        return True


class Differing(fullshard.RecordingComm):
    """Writes down what it was asked for, in `log`; its answers to polls differ between ranks."""

    def __init__(self, polls: str) -> None:
        super().__init__(fullshard.TorchComm())
        self.polls, self.asked = polls, 0
        self.log: list[str] = []

    def asks(self, verb: str, tensor: Tensor, *given: Any) -> Any:
        self.log.append(f"{verb} {tensor.numel()}")
        return Polled(getattr(self.inner, verb)(*given), self)

    def gather(self, axis: Any, out: Tensor, shard: Tensor) -> Any:
        return self.asks("gather", out, axis, out, shard)

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return self.asks("reduce", buffer, axis, out, buffer, mean)

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        return self.asks("all_reduce", tensor, axis, tensor, mean)


class Network(nn.Module):
    """Five blocks, each of another size. Of the last layer's bias one rank may hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 4 * (i + 1)), nn.Tanh(), nn.Linear(4 * (i + 1), WIDE)) for i in range(5)
        )
        self.head = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def network_of(way: str, comm: Differing, mesh: str = "1d") -> nn.Module:
    given: dict[str, Any] = {"comm": comm}
    if mesh == "hybrid":
        given["mesh"] = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return shard(Network(), way, blocks_of, **given)


def step_of(model: nn.Module, step: int) -> None:
    x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()


def add_hooks(model: nn.Module, kind: str, hook: Callable[[str], object]) -> None:
    """`hook(name)` at each of the places of that kind."""
    if kind == "post-accumulate":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: hook(name) and None)
    else:
        for name, module in model.named_modules():
            if isinstance(module, fullshard.FSDPModule):
                module.set_all_reduce_hook(lambda reduced, name=name: hook(name) and None)


def places(way: str, kind: str, mesh: str, polls: str) -> list[list[str]]:
    """What the engine asked for and which hooks ran, in order, in each of three steps.

    Hooks all-reduce which one they are: on every rank the same.
    """
    comm = Differing(polls)
    model = network_of(way, comm, mesh)
    numbers = {name: float(number) for number, (name, _) in enumerate(model.named_modules())}
    numbers |= {name: float(number) for number, (name, _) in enumerate(model.named_parameters())}

    def hook(name: str) -> None:
        comm.log.append(f"hook of {name}")
        dist.all_reduce(total := torch.tensor([numbers[name]]))
        assert total.item() == numbers[name] * dist.get_world_size(), f"{name}: another rank ran another hook"

    add_hooks(model, kind, hook)
    logs = []
    for step in range(3):
        comm.log = []
        step_of(model, step)
        model.zero_grad()
        logs.append(list(comm.log))
    return logs


CASES = [
    *[(way, "post-accumulate", "1d") for way in ("rows", "flat", "wrapper", "originals")],
    ("rows", "all-reduce", "1d"),
    *[("flat", kind, "hybrid") for kind in ("post-accumulate", "all-reduce")],
]


@pytest.mark.parametrize(("way", "kind", "mesh"), CASES)
def test_hooks_run_at_the_same_place_on_every_rank(run_ranks, way, kind, mesh):
    """And may communicate; also of parameters of which a rank holds nothing."""
    for polls in POLLS:
        first, *others = run_ranks(places, way, kind, mesh, polls)
        hooks = {entry for entry in first[0] if "hook" in entry}
        assert hooks and (kind == "all-reduce" or len(hooks) == {"wrapper": 6}.get(way, 22)), hooks
        assert all(other == first for other in others), polls


@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_clipping_inside_backward(way: str) -> list[str]:
    """The usual way to step in backward; the norm is a collective."""
    results = []

    def step(parameter: Any) -> None:
        if parameter.grad is None:
            return
        total = parameter.grad.norm()
        if way in WRAPPERS:
            dist.all_reduce(total.square_())
            total = total.sqrt()
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        with torch.no_grad():
            parameter.add_(parameter.grad * (0.1 / (total + 1e-3)), alpha=-1.0)
        parameter.grad = None

    for hooked in (True, False):
        model = network_of(way, Differing("alternating"))
        for parameter in model.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(2):
            step_of(model, index)
            for parameter in model.parameters() if not hooked else ():
                step(parameter)
        results.append([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    return [n for n, a, b in zip(names, *results, strict=True) if not torch.allclose(a, b, atol=1e-6)]
