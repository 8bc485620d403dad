"""Owners on meshes (replicate, shard): every parameter, or every element, is stepped once in the world."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import lion_pytorch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.optim.replicas import GRAIN, element_bounds
from fullshard.torch_private.local_tensor import inside

WIDE, TALL = 24, 37
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "lion": (lion_pytorch.Lion, {"lr": 0.01}),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, TALL), nn.Sequential(nn.Tanh(), nn.Linear(TALL, WIDE), nn.LayerNorm(WIDE)))


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def wrapped(mesh: Any, module: nn.Module, **settings: Any) -> nn.Module:
    return fullshard.FullyShardedDataParallel(module, device_mesh=mesh, **settings)


def in_units(shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = build()
    model[1] = shard(model[1])
    model[0].bias.requires_grad_(False)
    return shard(model)


def functional(mesh: Any, module: nn.Module, layout: Any) -> nn.Module:
    return fullshard.fully_shard(module, mesh=mesh, layout=layout)


HYBRID = fullshard.ShardingStrategy.HYBRID_SHARD
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (functional, {"layout": "rows"}),
    "flat": (functional, {"layout": "flat"}),
    "owner": (functional, {"layout": "owner"}),
    "blocks": (functional, {"layout": fullshard.Blocks("row")}),
    "wrapper": (wrapped, {"sharding_strategy": HYBRID, "use_orig_params": True}),
    "flat parameters": (wrapped, {"sharding_strategy": HYBRID}),
    "not sharded": (wrapped, {"sharding_strategy": fullshard.ShardingStrategy.NO_SHARD, "use_orig_params": True}),
}


def sharded(way: str, shape: tuple[int, ...]) -> nn.Module:
    shard, settings = WAYS[way.removesuffix(", view")]
    mesh = mesh_of((torch.Size(shape).numel(),) if way == "not sharded" else shape)
    if way == "flat parameters":  # one FlatParameter trains all of its parameters, or none
        model = build()
        model[1] = shard(mesh, model[1], **settings)
        return shard(mesh, model, **settings)  # type: ignore[no-any-return]
    return in_units(functools.partial(shard, mesh, **settings))


def groups_of(model: nn.Module, way: str) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    if way.endswith("view"):
        return [{"params": fullshard.optimizer_view(model), "weight_decay": 0.1}]
    parameters = list(model.parameters())
    return [
        {"params": parameters[:-1], "weight_decay": 0.1},
        {"params": parameters[-1:], "weight_decay": 0.0},
    ]


def owned(model: nn.Module, way: str, name: str) -> Any:
    optimizer_class, settings = CLASSES[name]
    return fullshard.OwnerOptimizer(groups_of(model, way), optimizer_class, elementwise=True, **settings)


def plain(model: nn.Module, way: str, name: str) -> torch.optim.Optimizer:
    optimizer_class, settings = CLASSES[name]
    return optimizer_class(groups_of(model, way), **settings)


def train(model: nn.Module, optimizer: Any, steps: range, scaler: Any = None) -> None:
    """On data of each rank's own; the first unit's parameters have no gradients in step 1."""
    for step in steps:
        batch = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if scaler is None:
            model(batch).square().mean().backward()
        else:
            scaler.scale(model(batch).square().mean()).backward()
            scaler.unscale_(optimizer)
        if step == 1:
            for parameter in next(iter(model.children())).parameters():
                parameter.grad = None
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(0.5)
        else:
            fullshard.clip_grad_norm_(model.parameters(), 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def differing(model: nn.Module, reference: nn.Module) -> list[str]:
    """Parameters of which this rank's part differs in any bit."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [name for (name, p), theirs in pairs if not torch.equal(inside(p.detach()), inside(theirs.detach()))]


def differences(way: str, shape: tuple[int, ...], name: str) -> list[str]:
    """To the same optimizer that steps everywhere; with schedulers, and a scaler that skips a step."""
    model, reference = sharded(way, shape), sharded(way, shape)
    pairs = [(model, owned(model, way, name)), (reference, plain(reference, way, name))]
    for module, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = fullshard.ShardedGradScaler("cpu", init_scale=2.0**8) if name == "sgd" else None
        for step in range(4):
            train(module, optimizer, range(step, step + 1), scaler)
            scheduler.step()
    assert [g["lr"] for g in pairs[0][1].param_groups] == [g["lr"] for g in pairs[1][1].param_groups]
    return differing(model, reference)


MESHES = [(2, 2), (2, 1), (1, 2), (2,)]
HYBRID_ONLY = {"wrapper", "flat parameters"}  # HYBRID_SHARD needs a mesh of two dims


@pytest.mark.parametrize(
    ("way", "shape"),
    [
        (way, shape)
        for way in (*WAYS, "rows, view", "flat, view")
        for shape in MESHES
        if len(shape) == 2 or way not in HYBRID_ONLY
    ],
    ids=str,
)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_steps_of_elements_equal_steps_of_every_replica_to_the_bit(run_ranks, way, shape):
    for name in CLASSES:
        found = run_ranks(differences, way, shape, name, world=torch.Size(shape).numel())
        assert found == [[]] * len(found), name


def state_numel(way: str, elementwise: bool) -> tuple[int, int, int, int, list[int]]:
    """Elements of momentum on this rank after a step; of its shards; steps that it took; bytes that it sent."""
    model = sharded(way, (2, 2))
    trained = [p for p in model.parameters() if p.requires_grad]
    if elementwise:
        optimizer = fullshard.OwnerOptimizer(trained, torch.optim.SGD, elementwise=True, lr=0.1, momentum=0.9)
    else:
        optimizer = fullshard.OwnerOptimizer(trained, torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, range(2, 3))
    sent: list[int] = []
    replicas = trained[0].device_mesh.get_group(0)  # type: ignore[attr-defined]

    def counted(out: Any, data: Any, out_splits: Any, splits: Any, **options: Any) -> Any:
        group = options["group"]
        if group is replicas:
            sent.append(sum(splits))
        return exchange(out, data, out_splits, splits, **options)

    exchange = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", counted):
        train(model, optimizer, range(3, 4))
    states = [state["momentum_buffer"] for state in optimizer.state.values() if state]
    local = sum(inside(parameter.detach()).numel() for parameter in trained)
    return sum(value.numel() for value in states), local, len(states), sum(p.numel() for p in trained), sent


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_state_is_in_the_world_once_and_bytes_between_replicas_are_those_of_an_all_gather(run_ranks, elementwise):
    found = run_ranks(state_numel, "rows", elementwise, world=4)
    total, steps = found[0][3], sum(count for _, _, count, *_ in found)
    assert sum(numel for numel, *_ in found) == total
    for shard in range(2):
        ranks = (found[shard], found[2 + shard])
        assert sum(sum(sent) for *_, sent in ranks) == 4 * ranks[0][1], "each element is sent once"
        assert all(len(sent) == 2 for *_, sent in ranks), "one collective per unit"
        if elementwise:
            assert sum(numel for numel, *_ in ranks) == ranks[0][1]
            assert all(abs(numel - local / 2) <= 2 * GRAIN for numel, local, *_ in ranks)
    if not elementwise:
        assert steps == 5, "each parameter is stepped once"


class Counted(torch.optim.SGD):
    stepped = 0

    def step(self, closure: Any = None) -> None:
        Counted.stepped += sum(p.grad is not None for g in self.param_groups for p in g["params"])
        super().step(closure)


def steps_of_wholes(shape: tuple[int, ...]) -> tuple[int, list[str]]:
    """How many whole parameters this rank steps, and what differs from every replica stepping its own."""
    model, reference = sharded("rows", shape), sharded("rows", shape)
    ours = fullshard.OwnerOptimizer(model.parameters(), Counted, lr=0.1)
    Counted.stepped = 0
    train(model, ours, range(2, 3))
    stepped = Counted.stepped
    train(model, ours, range(3, 6))
    ours.state_dict()
    train(model, ours, range(6, 7))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(2, 7))
    return stepped, differing(model, reference)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_a_whole_parameter_is_stepped_once_in_the_world(run_ranks, shape):
    found = run_ranks(steps_of_wholes, shape, world=torch.Size(shape).numel())
    assert sum(stepped for stepped, _ in found) == 5
    assert max(stepped for stepped, _ in found) <= 3
    assert [wrong for _, wrong in found] == [[]] * len(found)


def resumed(how: str, folder: str, way: str, shape: tuple[int, ...], elementwise: bool, save: bool) -> list[Any]:
    """Three steps and a save, or a load and three more: all values in the end."""
    model = sharded(way, shape)
    optimizer = owned(model, way, "adamw") if elementwise else plain(model, way, "adamw")
    gradient = torch.randn(WIDE * TALL, generator=torch.Generator().manual_seed(0))

    def steps() -> None:
        for step in range(3):
            batch = gradient[step * WIDE : (step + 2) * WIDE].view(2, WIDE)  # the same on every rank
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if save:
        steps()
    if how == "fullshard":
        (fullshard.save if save else fullshard.load)(folder, model, optimizer)
    else:
        state = {"model": model.state_dict(), "optimizer": fullshard.optimizer_state_dict(model, optimizer)}
        (dcp.save if save else dcp.load)(state, checkpoint_id=folder)
        if not save:
            model.load_state_dict(state["model"])
            fullshard.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    steps()  # after a save, too: state goes back to its owners
    values: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).numpy() for value in values]


@pytest.mark.parametrize("how", ["fullshard", "dcp"])
@pytest.mark.gloo("processes")
def test_checkpoints_of_elements_load_on_other_worlds_and_without_owners(run_ranks, tmp_path: Path, how):
    for number, (way, elementwise) in enumerate([("rows", True), ("flat", True), ("rows", False)]):
        folder = str(tmp_path / str(number))
        expected = run_ranks(resumed, how, folder, way, (2, 2), elementwise, True, world=4)
        for shape, other, owners in (
            ((2, 2), way, True),
            ((2, 2), way, False),
            ((1, 3), way, True),
            ((2, 1), way, True),
            ((1,), way, False),
        ):
            world = torch.Size(shape).numel()
            for values in run_ranks(resumed, how, folder, other, shape, owners, False, world=world):
                for value, theirs in zip(values, expected[0], strict=True):
                    torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs), rtol=1e-4, atol=1e-6)


def resumed_wrapper(folder: str, way: str) -> list[str]:
    """A save and a load with the same wrapper, owners before and none after, and the other way round."""
    wrong = []
    for first, second in ((owned, plain), (plain, owned), (owned, owned)):
        model, other = sharded(way, (2, 2)), sharded(way, (2, 2))
        ours, theirs = first(model, way, "adamw"), second(other, way, "adamw")
        train(model, ours, range(2))
        fullshard.save(folder, model, ours, step=1)
        fullshard.load(folder, other, theirs)
        train(model, ours, range(2, 4)), train(other, theirs, range(2, 4))
        wrong += differing(model, other)
        state = fullshard.FullyShardedDataParallel.optim_state_dict(model, ours)
        loadable = fullshard.FullyShardedDataParallel.optim_state_dict_to_load(other, theirs, state)
        theirs.load_state_dict(loadable)
        train(model, ours, range(4, 5)), train(other, theirs, range(4, 5))
        wrong += differing(model, other)
    return wrong


@pytest.mark.parametrize("way", ["wrapper", "flat parameters", "not sharded"])
@pytest.mark.gloo("processes")
def test_state_of_the_wrapper_goes_on_without_owners_and_back(run_ranks, tmp_path: Path, way):
    assert run_ranks(resumed_wrapper, str(tmp_path), way, world=4) == [[]] * 4


def whole_state_loads(name: str) -> list[str]:
    """SOAP, or 8-bit AdamW, whose state has shapes of its own, on whole parameters: a save, and a load."""
    import pytorch_optimizer

    optimizer_class, settings = {
        "soap": (pytorch_optimizer.SOAP, {"lr": 0.1, "precondition_frequency": 2}),
        "8 bits": (bitsandbytes.optim.AdamW8bit, {"lr": 0.1, "min_8bit_size": 8}),
    }[name]
    wrong = []
    for shape in ((2, 2), (4, 1)):
        model, reference = sharded("rows", shape), sharded("rows", shape)
        ours = fullshard.OwnerOptimizer(model.parameters(), optimizer_class, **settings)
        theirs = fullshard.OwnerOptimizer(reference.parameters(), optimizer_class, **settings)
        train(model, ours, range(2, 4)), train(reference, theirs, range(2, 4))
        again: Any = fullshard.OwnerOptimizer(model.parameters(), optimizer_class, **settings)
        state = ours.state_dict()
        for one in state["state"].values():  # every replica can save it
            assert all(value.sum().isfinite() for value in map(inside, one.values()) if isinstance(value, torch.Tensor))
        again.load_state_dict(state)
        train(model, again, range(4, 6)), train(reference, theirs, range(4, 6))
        wrong += differing(model, reference) if name == "8 bits" else []
        if name == "soap":
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            wrong += [str(p.shape) for p, q in pairs if not torch.allclose(inside(p), inside(q), rtol=1e-3, atol=1e-4)]
    return wrong


@pytest.mark.parametrize("name", ["soap", "8 bits"])
@pytest.mark.gloo("processes")
def test_state_of_other_shapes_reaches_every_replica(run_ranks, name):
    assert run_ranks(whole_state_loads, name, world=4) == [[]] * 4


def refusals() -> dict[str, str]:
    model = sharded("rows", (2, 2))
    errors = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except fullshard.FullshardError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    attempt("whole", lambda: fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, elementwise=True))
    eight = fullshard.OwnerOptimizer(
        model.parameters(), bitsandbytes.optim.AdamW8bit, elementwise=True, lr=0.1, min_8bit_size=8
    )
    train(model, eight, range(2, 3))
    attempt("state", eight.state_dict)
    one = fullshard.OwnerOptimizer(model.parameters(), torch.optim.SGD, elementwise=True, lr=0.1)
    model(torch.ones(2, WIDE)).sum().backward()
    if dist.get_rank() == 3:
        model[1][1].weight.grad = None
    attempt("gradient", one.step)
    two = fullshard.OwnerOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    attempt("whole gradient", two.step)
    other = sharded("rows", (2, 2))
    classes = torch.optim.AdamW if dist.get_rank() == 3 else torch.optim.SGD
    three = fullshard.OwnerOptimizer(other.parameters(), classes, lr=0.1)
    other(torch.ones(2, WIDE)).sum().backward()
    attempt("class", three.step)
    return errors


@pytest.mark.gloo("processes")
def test_what_cannot_be_exact_is_refused_on_every_rank(run_ranks):
    for rank, errors in enumerate(run_ranks(refusals, world=4)):
        assert "Adafactor, whose step of an element depends on other elements" in errors["whole"]
        assert errors["state"].startswith("CheckpointError") and "one value per element" in errors["state"]
        cases = {"gradient": "1.1.weight", "whole gradient": "1.1.weight", "class": "by AdamW"}
        if rank in (0, 2):  # if elementwise, they exchange nothing with ranks 1 and 3
            assert "gradient" not in errors
            del cases["gradient"]
        for case, named in cases.items():
            assert errors[case].startswith("DivergenceError") and named in errors[case], errors
            assert "rank:" in errors[case] and "3" in errors[case]


class SometimesUnused(nn.Module):
    """A parameter of few elements, so that some ranks have none of it, which is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.odd, self.use_odd = nn.Linear(8, 8), nn.Parameter(torch.ones(3, 5)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).square().sum()
        return y + self.odd.square().sum() if self.use_odd else y


def unused_in_some_steps() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for build in (torch.optim.AdamW, functools.partial(fullshard.OwnerOptimizer, optimizer_class=torch.optim.AdamW)):
        torch.manual_seed(0)
        model = fullshard.FullyShardedDataParallel(
            SometimesUnused(),
            sharding_strategy=fullshard.ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_mesh=mesh,
        )
        elementwise = {"elementwise": True} if build is not torch.optim.AdamW else {}
        optimizer = build(model.parameters(), lr=0.1, **elementwise)
        for step in range(4):
            model.module.use_odd = step != 2
            model(torch.ones(2, 8) * (step + dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    return results


@pytest.mark.gloo("processes")
def test_ranks_without_elements_of_an_unused_parameter_step_on(run_ranks):
    """They have no gradient to miss, so ranks of one shard axis see different sets of gradients."""
    for plain, owners in run_ranks(unused_in_some_steps, world=4):
        assert torch.equal(plain, owners)


@given(st.lists(st.integers(0, 500), max_size=8), st.integers(1, 5))
def test_runs_cover_every_element_once_and_are_balanced(sizes, replicas):
    bounds = element_bounds(sizes, replicas)
    shares = [0] * replicas
    for size, cuts in zip(sizes, bounds, strict=True):
        assert cuts[0] == 0 and cuts[-1] == size and cuts == sorted(cuts) and len(cuts) == replicas + 1
        assert all(cut == size or cut % GRAIN == 0 for cut in cuts)
        shares = [share + stop - start for share, start, stop in zip(shares, cuts, cuts[1:], strict=False)]
    assert sum(shares) == sum(sizes)
    assert all(abs(share - sum(sizes) / replicas) < 2 * GRAIN for share in shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("replicas", [2, 3])
def test_kernels_of_the_cpu_round_runs_as_they_round_the_whole(replicas, dtype):
    """Fused SGD rounds the elements that do not fill a register otherwise: cuts are at multiples of `GRAIN`."""
    generator = torch.Generator().manual_seed(0)
    value, gradient = torch.randn(2, 1000, generator=generator).to(dtype)
    (bounds,) = element_bounds([1000], replicas)
    runs = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    whole, pieces = nn.Parameter(value.clone()), [nn.Parameter(value[run].clone()) for run in runs]
    whole.grad = gradient.clone()
    for piece, run in zip(pieces, runs, strict=True):
        piece.grad = gradient[run].clone()
    optimizers = [torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True) for params in ([whole], pieces)]
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([piece.detach() for piece in pieces]), whole.detach())
