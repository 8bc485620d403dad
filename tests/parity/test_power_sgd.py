"""`comm_hooks.powerSGD_hook`: matrices of gradients between replicas at low rank, on both front-ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import comm_hooks
from fullshard.shard import units_of
from fullshard.torch_private.local_tensor import inside
from raising import raises

WIDTH, RANK = 24, 2
MESHES = {"hybrid": (2, 2), "uneven": (2, 3), "replicas": (3, 1)}
WAYS = ["rows", "flat", "owner", "wrapper", "one flat parameter"]
EXACT = {"matrix_approximation_rank": 100, "start_powerSGD_iter": 0, "min_compression_rate": 0}


class Blocks(nn.Module):
    """Matrices of odd sizes, a stack of them, a transposed weight, vectors, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 37), nn.Tanh(), nn.Linear(37, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)
        )
        self.blocks[1][0].weight = nn.Parameter(torch.randn(WIDTH, 37).mul_(0.2).T)
        self.stack = nn.Parameter(torch.randn(5, WIDTH, 3) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.einsum("bi,eio->beo", x, self.stack).tanh()


def sharded(way: str, mesh: tuple[int, ...], **options: Any) -> Any:
    torch.manual_seed(0)
    model = Blocks()
    model.blocks[0][0].bias.requires_grad_(way == "one flat parameter")
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    if way in ("wrapper", "one flat parameter"):
        strategy = "NO_SHARD" if mesh[-1] == 1 else "HYBRID_SHARD"
        return fullshard.FullyShardedDataParallel(
            model,
            sharding_strategy=fullshard.ShardingStrategy[strategy],
            device_mesh=device_mesh if strategy == "HYBRID_SHARD" else None,
            auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({nn.Sequential}),
            use_orig_params=way == "wrapper",
            **options,
        )
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=device_mesh, layout=way, **options)
    return fullshard.fully_shard(model, mesh=device_mesh, layout=way, **options)


def backward(model: Any, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(4, WIDTH, generator=generator)
    (model(x).square().mean() * scale).backward()


def local_gradients(model: Any) -> list[torch.Tensor]:
    return [inside(p.grad).clone().flatten() for p in model.parameters() if p.grad is not None]


def replicas_differ(model: Any, mesh: tuple[int, int]) -> bool:
    group = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))["replicate"].get_group()
    mine = torch.cat(local_gradients(model))
    copies = [torch.empty_like(mine) for _ in range(mesh[0])]
    dist.all_gather(copies, mine, group=group)
    return not all(torch.equal(copy, mine) for copy in copies)


def registered(model: Any, **settings: Any) -> Any:
    model.register_comm_hook(comm_hooks.PowerSGDState(None, **settings), comm_hooks.powerSGD_hook)
    return model


def wrong_at_full_rank(way: str, mesh: tuple[int, int]) -> tuple[list[str], int]:
    """Gradients of three steps of full rank that are not plain averages to rounding, and how many were compressed.

    The first step is not.
    """
    plain = sharded(way, mesh)
    model = registered(sharded(way, mesh), **{**EXACT, "start_powerSGD_iter": 1})
    wrong = []
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            backward(each, step)
        pairs = list(zip(local_gradients(model), local_gradients(plain), strict=True))
        assert pairs
        close = [torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6) for ours, theirs in pairs]
        wrong += [f"step {step}, {i}" for i, same in enumerate(close) if not same]
        wrong += [f"step {step}: compressed"] if not step and not all(torch.equal(*pair) for pair in pairs) else []
        wrong += [f"step {step}: replicas differ"] if replicas_differ(model, mesh) else []
    kept = [g.residuals for unit in units_of(model) for g in unit.gradients]
    return wrong, sum(name.startswith("Q of") for residuals in kept for name in residuals)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("way", WAYS)
def test_full_rank_is_the_average(run_ranks, way, mesh):
    shape = MESHES[mesh]
    if way in ("wrapper", "one flat parameter") and mesh == "uneven":
        shape = (3, 2)
    results = run_ranks(wrong_at_full_rank, way, shape, world=math.prod(shape))
    assert not any(wrong for wrong, _ in results), results
    assert sum(count for _, count in results) >= 5 * shape[0]  # of an owner, a replica's five matrices lie anywhere


def compressed(way: str, mesh: tuple[int, int], feedback: bool) -> tuple[bool, list[float], int, int, int]:
    """Whether replicas ever differ; the errors of a sum of 40 equal gradients, by parameter, over its norm; bytes of
    float32 all-reduces between replicas in a step, those expected, and those without compression."""
    comm = fullshard.RecordingComm(fullshard.TorchComm())
    options = {} if way in ("wrapper", "one flat parameter") else {"comm": comm}
    model = sharded(way, mesh, **options)
    settings = {"matrix_approximation_rank": RANK, "start_powerSGD_iter": 2, "use_error_feedback": feedback}
    registered(model, **settings)
    plain, different = sharded(way, mesh), False
    backward(plain, 0)
    for step in range(42):
        if step == 2:  # the first two are plain averages
            model.zero_grad()
        comm.calls.clear()
        backward(model, 0)
        different |= replicas_differ(model, mesh)
    errors = [
        float((ours - 40 * theirs).norm() / theirs.norm())
        for ours, theirs in zip(local_gradients(model), local_gradients(plain), strict=True)
        if theirs.norm()
    ]
    kind = "all_reduce", mesh[0], torch.float32
    sent = sum(call.nbytes for call in comm.calls if (call.verb, call.world, call.dtype) == kind)
    whole = expected = 0
    state = comm_hooks.PowerSGDState(None, **settings)
    for unit in units_of(model):
        for bucket in unit.buckets if any(b.trains for b in unit.buckets) else ():
            whole += 4 * bucket.layout.shard_numel
            if not bucket.trains:
                continue
            elements = ranks = 0
            for member in bucket.members:
                shape = member.slot.shape if member.part.numel == member.slot.numel else member.part.shape
                matrix = torch.empty(shape[0], math.prod(shape[1:])) if member.part.numel and len(shape) > 1 else None
                rank = 0 if matrix is None else state.rank_of(matrix)
                ranks += rank
                elements += sum(matrix.shape) * rank if matrix is not None and rank else member.part.numel
            expected += 4 * (elements if ranks else bucket.layout.shard_numel)
    return different, errors, sent, expected, whole


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@pytest.mark.parametrize("mesh", ["hybrid", "replicas"])
def test_with_feedback_nothing_is_lost_and_fewer_bytes_are_sent(run_ranks, way, mesh):
    shape = MESHES[mesh]
    results = [run_ranks(compressed, way, shape, feedback, world=math.prod(shape)) for feedback in (True, False)]
    for (different, errors, sent, expected, whole), (_, lost, *_) in zip(*results, strict=True):
        assert not different
        assert max(errors) < 8, errors  # a few gradients of forty
        assert max(lost) > 2 * max(errors), (lost, errors)
        if way == "rows" or (way == "flat" and mesh == "replicas"):
            assert sent == expected < 0.75 * whole


def recovers(mesh: tuple[int, int], steps: int) -> tuple[bool, bool]:
    """Whether a NaN of rank 0 reaches all, and whether steps after it are as if it had not been."""
    model = registered(sharded("rows", mesh), **EXACT)
    plain = sharded("rows", mesh)
    for step in range(steps):
        model.zero_grad()
        backward(model, step % 3, math.nan if step == steps - 1 and dist.get_rank() == 0 else 1.0)
    came = all(bool(grad.isnan().any()) for grad in local_gradients(model) if grad.numel())
    close = []
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            backward(each, step)
        pairs = zip(local_gradients(model), local_gradients(plain), strict=True)
        close.append(all([torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in pairs]))
    return came, all(close)


@pytest.mark.parametrize("steps", [1, 300])
def test_a_nan_comes_through_and_does_not_stay(run_ranks, steps):
    assert run_ranks(recovers, (2, 1), steps, world=2) == [(True, True)] * 2


def refusals() -> None:
    state, hook = comm_hooks.PowerSGDState(None), comm_hooks.powerSGD_hook
    with raises("ConfigError: PowerSGD reduces gradients between replicas, and this model has none. ... hybrid mesh"):
        sharded("rows", (dist.get_world_size(),)).register_comm_hook(state, hook)
    with raises("ConfigError: PowerSGD reduces gradients between replicas"):
        fullshard.FullyShardedDataParallel(Blocks()).register_comm_hook(state, hook)
    with raises("UsageError: Communication hooks do not work with hybrid strategies. ... powerSGD_hook"):
        sharded("rows", (2, 2)).register_comm_hook(None, print)
    eight = fullshard.MixedPrecisionPolicy(all_reduce_dtype=torch.int8)
    with raises("ConfigError: A communication hook and MixedPrecisionPolicy(all_reduce_dtype=) both"):
        sharded("rows", (2, 2), mp_policy=eight).register_comm_hook(state, hook)
    for shape, dtype in (((4,), "scatter_dtype"), ((4, 1), "all_reduce_dtype")):
        eight = fullshard.MixedPrecisionPolicy(**{dtype: torch.int8})
        with raises(f"ConfigError: A communication hook and MixedPrecisionPolicy({dtype}=) both"):
            sharded("rows", shape, mp_policy=eight).register_comm_hook(None, print)
    with raises(
        "ConfigError: The process group of the communication hook's state is not that of the replicas. ... [0, 1, 2, 3]"
    ):
        other = comm_hooks.PowerSGDState(dist.group.WORLD)
        sharded("rows", (2, 2)).register_comm_hook(other, hook)
    with raises("ConfigError: a communication hook, which scales gradients itself, cannot be combined with reduction="):
        sharded("rows", (2, 2), reduction="sum").register_comm_hook(state, hook)
    model = registered(sharded("rows", (2, 2)))
    with raises("UsageError: a communication hook is already registered"):
        model.register_comm_hook(state, hook)
    with raises("ConfigError: a gradient divide factor cannot be combined with a communication hook, which averages."):
        model.set_gradient_divide_factor(2.0)
    with raises("ConfigError: powerSGD_hook must be registered together with a PowerSGDState. ... state None"):
        sharded("rows", (4, 1)).register_comm_hook(None, hook)
    registered(sharded("rows", (1, 4)))  # a script for several machines, on one
    with raises("ConfigError: powerSGD_hook must be registered together with a PowerSGDState. ... call with Tensor"):
        hook(state, torch.ones(3))


def test_what_is_refused(run_ranks):
    run_ranks(refusals, world=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("matrix_approximation_rank", 0),
        ("matrix_approximation_rank", 1.5),
        ("start_powerSGD_iter", -1),
        ("min_compression_rate", math.nan),
        ("use_error_feedback", "no"),
        ("warm_start", 1),
        ("random_seed", 1.5),
    ],
)
def test_invalid_settings(name, value):
    with raises(f"ConfigError: PowerSGDState({name}=) is invalid. ... {value}"):
        comm_hooks.PowerSGDState(None, **{name: value})
