"""Several gloo ranks on one GPU: real communication between ranks, on one device. The same on the CPU, anywhere.

What the CPU shows of these is that the tests themselves are right; streams, and memory that runs out, a GPU shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.agreement import exchange
from training import assert_same

WIDTH, BLOCKS, STEPS = 64, 3, 3
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that --gpu=tests shows")
PROCESSES = pytest.mark.gloo("collectives of a device, its memory and its threads")
ON_GPU = [pytest.mark.gpu, NO_GPU, PROCESSES]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
FRONTS = pytest.mark.parametrize("front", ["rows", "flat", "wrapper"])


def build(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(width, 3))


def shard(front: str, model: nn.Sequential, device: str, hybrid: bool = False) -> nn.Module:
    """Every block a unit, and the whole; with `hybrid`, two replicas of two shards each."""
    world = dist.get_world_size()
    if hybrid:
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (world,))
    if front == "wrapper":
        strategy = fullshard.ShardingStrategy.HYBRID_SHARD if hybrid else fullshard.ShardingStrategy.FULL_SHARD
        given: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": strategy, "use_orig_params": True}
        for index in range(BLOCKS):
            model[index] = fullshard.FullyShardedDataParallel(model[index], **given)
        return fullshard.FullyShardedDataParallel(model, **given)
    for block in list(model)[:BLOCKS]:
        fullshard.fully_shard(block, mesh=mesh, layout=front)
    return fullshard.fully_shard(model, mesh=mesh, layout=front)


def batch(step: int, rank: int, device: str, width: int = WIDTH) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    return torch.randn(4, width, generator=generator, device="cpu").to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().cpu() for n, v in state.items()}


def differences(model: nn.Module, plain: nn.Module, where: str) -> list[str]:
    found, wanted = whole_parameters(model), whole_parameters(plain)
    far = {name: (found[name] - value).norm() / value.norm() for name, value in wanted.items()}
    return [f"{where}: {name} is off by {distance:.1e}" for name, distance in far.items() if distance > 1e-4]


def train(model: nn.Module, plain: nn.Module, device: str, steps: range) -> None:
    """Both, SGD by hand; `plain` on the batches of all ranks."""
    ranks = range(dist.get_world_size())
    for one, mine in ((model, [dist.get_rank()]), (plain, list(ranks))):
        for step in steps:
            loss_of(one, torch.cat([batch(step, rank, device) for rank in mine])).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:  # of the wrapper's, this rank may hold nothing
                        parameter.sub_(parameter.grad, alpha=0.1)
            one.zero_grad()


@on_each_device
@FRONTS
def test_two_ranks_train_as_one_process(run_ranks, front, device):
    assert_same(run_ranks(trains, front, device, False, world=2))


@on_each_device
@FRONTS
def test_a_hybrid_mesh_trains_as_one_process(run_ranks, front, device):
    assert_same(run_ranks(trains, front, device, True, world=4))


@on_each_device
@FRONTS
def test_the_default_device_is_the_users_own(run_ranks, front, device):
    """What the host keeps lies on the CPU, page-locked, all the same."""
    assert_same(run_ranks(trains_by_default, front, device, world=2))


def trains_by_default(front: str, device: str) -> list[str]:
    with torch.device(device):
        return trains(front, device, False)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_shards_moved_away_from_their_mesh_are_refused(run_ranks, layout, device):
    """Of CPUs, as `gloo` alone says: nobody would wait for the device's streams, and gradients were wrong at random."""
    for error in run_ranks(moved, layout, device, world=2):
        assert "not its mesh's" in error and "init_device_mesh('cuda'" in error


def moved(layout: str, device: str) -> str:
    with torch.device("meta"):
        model = shard(layout, build(), "cpu")
    model.to_empty(device=device)
    with pytest.raises(fullshard.ConfigError) as raised:
        model(torch.ones(2, WIDTH, device=device))
    return str(raised.value)


@pytest.mark.gloo("saves in the background are another process's")
@on_each_device
@pytest.mark.parametrize("front", ["rows", "flat"])
def test_a_save_in_the_background_keeps_what_was(run_ranks, tmp_path, front, device):
    """Training goes on while it is written, and the same follows its load, bit by bit."""
    assert_same(run_ranks(saves, str(tmp_path), front, device, world=2))


def saves(folder: str, front: str, device: str) -> list[str]:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            loss = loss_of(model, batch(step, dist.get_rank(), device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model = shard(front, build().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, range(3))
    saving = fullshard.save(folder, model, optimizer, step=3, asynchronous=True)
    went_on = trained(model, optimizer, range(3, 6))
    saving.wait()
    other = shard(front, build().to(device), device)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    fullshard.load(folder, other, again)
    loaded = trained(other, again, range(3, 6))
    return [] if torch.equal(torch.stack(loaded), torch.stack(went_on)) else [f"{front}: {loaded} after {went_on}"]


def trains(front: str, device: str, hybrid: bool) -> list[str]:
    model, plain = shard(front, build().to(device), device, hybrid), build().to(device)
    train(model, plain, device, range(STEPS))
    return differences(model, plain, front)


@contextlib.contextmanager
def side_stream(device: str) -> Iterator[None]:
    """Another stream than the one that computes, with work in it that takes a while; nothing on a CPU."""
    if device == "cpu":
        yield
        return
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        yield


@on_each_device
@pytest.mark.parametrize("front", ["rows", "flat"])
def test_units_unsharded_under_a_side_stream(run_ranks, front, device):
    assert_same(run_ranks(unshards_aside, front, device, world=2))


def unshards_aside(front: str, device: str) -> list[str]:
    """Gathers issued and waited for on one stream, computed with on another, and freed again."""
    model, plain = shard(front, build().to(device), device), build().to(device)
    for step in range(STEPS):
        with side_stream(device):
            handles = [block.unshard(async_op=True) for block in list(model)[:BLOCKS]]
            for handle in handles[::2]:
                handle.wait()
        for handle in handles[1::2]:
            handle.wait()
        train(model, plain, device, range(step, step + 1))
    return differences(model, plain, front)


@on_each_device
@pytest.mark.parametrize("front", ["rows", "flat"])
def test_a_forward_under_a_side_stream(run_ranks, front, device):
    assert_same(run_ranks(runs_aside, front, device, world=2))


def runs_aside(front: str, device: str) -> list[str]:
    """Evaluation on a stream of its own between steps on the other one; the caller orders what the caller owns."""
    model, plain = shard(front, build().to(device), device), build().to(device)
    problems = []
    for step in range(STEPS):
        train(model, plain, device, range(step, step + 1))
        x = batch(step, 0, device)
        if device == "cuda":
            torch.cuda.synchronize()
        with side_stream(device), torch.no_grad():
            out = model(x)
        if device == "cuda":
            torch.cuda.synchronize()
        if not torch.allclose(out, plain(x), rtol=1e-4, atol=1e-5):
            problems.append(f"step {step}: another output")
    return problems + differences(model, plain, front)


@on_each_device
def test_sums_over_meshes_of_two_sizes_arrive_late(run_ranks, device):
    assert_same(run_ranks(sums_late, device, world=4))


def sums_late(device: str) -> list[str]:
    """What ranks agree on after a backward is on its way to the host while the next ones run, of both meshes at once.

    gloo's all-reduce waits for the device: the copy that follows it is what comes late here.
    """

    def slow(values: Tensor, out: Tensor) -> torch.Event:
        if values.is_cuda:
            torch.cuda._sleep(50_000_000)
        return begin(values, out)

    mesh, begin = init_device_mesh(device, (2, 2), mesh_dim_names=("ep", "edp")), exchange.begin_copy_to_host
    whole = init_device_mesh(device, (4,))
    weights = []
    for copy in (begin, slow):
        model = build().to(device)
        for number, block in enumerate(list(model)[:BLOCKS]):
            fullshard.fully_shard(block, mesh=mesh["edp"] if number % 2 else whole)
        fullshard.fully_shard(model, mesh=whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(exchange, "begin_copy_to_host", copy):
            for step in range(2 * STEPS):
                loss_of(model, batch(step, dist.get_rank(), device)).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(whole_parameters(model))
    return [f"{name} is another" for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]


@pytest.mark.gpu
@NO_GPU
@PROCESSES
@FRONTS
@pytest.mark.parametrize("clears", [True, False])
def test_running_out_of_memory_leaves_the_next_step_right(run_ranks, front, clears):
    assert_same(run_ranks(runs_out, front, clears, world=2, timeout=120))


def runs_out(front: str, clears: bool) -> list[str]:
    """Both ranks may have little more than what they hold, by several amounts; then as much as they like.

    Args:
        clears: by `zero_grad`; else gradients are set to None, which nobody notices before the next forward.
    """
    device, world = "cuda", dist.get_world_size()
    model, plain = shard(front, build(1024).to(device), device), build(1024).to(device)
    problems: list[str] = []
    unit = 4 * (1024 * 1024 + 3 * 1024)  # bytes of a block
    failed = 0
    for left in range(0, 8 * unit, unit // 2):
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_allocated() + left + 2 * unit
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            loss_of(model, batch(0, dist.get_rank(), device, 1024)).backward()
        except torch.OutOfMemoryError:
            failed += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        dist.barrier()
        if clears:
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        plain.zero_grad()
        loss_of(model, batch(1, dist.get_rank(), device, 1024)).backward()
        loss_of(plain, torch.cat([batch(1, rank, device, 1024) for rank in range(world)])).backward()
        got = model.clip_grad_norm_(1e9) if front == "wrapper" else fullshard.clip_grad_norm_(model.parameters(), 1e9)
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        if not torch.allclose(got.cpu(), want.cpu(), rtol=1e-3):
            problems.append(f"{left} bytes left: gradient norm {got} where {want} is right")
    return problems if failed else ["memory never ran out: the limits are not where they should be"]
