"""CPU offload on one GPU: the same numbers, state in page-locked host memory, less memory on the device."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that --gpu=tests shows"),
]

WIDTH, BLOCKS = 1024, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def train(model: nn.Module) -> tuple[list[torch.Tensor], torch.optim.Optimizer, int]:
    """Losses of three steps of two batches each, clipped; the optimizer; the device's peak in bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(3):
        for part in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part)).cuda()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if isinstance(model, fullshard.FullyShardedDataParallel):
            model.clip_grad_norm_(0.01)
        else:
            fullshard.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer, torch.cuda.max_memory_allocated()


def allocated() -> int:
    """Bytes on the device, of tests before and of the library of matrix products, which keeps what it takes."""
    build().cuda()(torch.ones(8, WIDTH, device="cuda")).sum().backward()
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("pin", [True, False])
def test_functional(one_rank: DeviceMesh, layout: str, pin: bool) -> None:
    results = []
    for policy in (fullshard.OffloadPolicy(), fullshard.CPUOffloadPolicy(pin_memory=pin)):
        before = allocated()
        model = build()
        for block in model:
            fullshard.fully_shard(block, mesh=one_rank, layout=layout, offload_policy=policy)
        fullshard.fully_shard(model, mesh=one_rank, layout=layout, offload_policy=policy)
        losses, optimizer, peak = train(model)
        results.append((losses, peak - before))
        where = {p.device.type for p in model.parameters()}
        state = {v.device.type for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)}
        if isinstance(policy, fullshard.CPUOffloadPolicy):
            assert where == {"cpu"}
            assert "cuda" not in state
            assert all(p._local_tensor.is_pinned() == pin for p in model.parameters())
        del model, optimizer
        torch.cuda.empty_cache()
    same(results[1][0], results[0][0])
    assert results[1][1] < 0.8 * results[0][1]  # no shard, gradient or optimizer state on the device


@pytest.mark.parametrize("orig", [False, True])
def test_wrapper(one_rank: DeviceMesh, orig: bool) -> None:
    results = []
    for offload in (False, True):
        before = allocated()
        model = fullshard.FullyShardedDataParallel(
            build(),
            device_mesh=one_rank,
            cpu_offload=fullshard.CPUOffload(offload_params=offload),
            auto_wrap_policy={nn.Sequential},
            use_orig_params=orig,
        )
        losses, optimizer, peak = train(model)
        assert {p.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}
        results.append((losses, peak - before, {k: v.cpu() for k, v in model.state_dict().items()}))
        del model, optimizer
        torch.cuda.empty_cache()
    same(results[1][0], results[0][0])
    assert results[1][1] < 0.8 * results[0][1]
    for name, value in results[0][2].items():
        assert torch.allclose(results[1][2][name], value, rtol=1e-4, atol=1e-6)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Losses, read to the host only now."""
    assert torch.allclose(torch.stack(got).cpu(), torch.stack(want).cpu(), rtol=1e-5)


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()


def sharded(mesh: DeviceMesh, layout: str, offload: bool) -> nn.Sequential:
    model = build()
    policy = fullshard.CPUOffloadPolicy(pin_memory=True) if offload else fullshard.OffloadPolicy()
    mixed = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in [*model, model]:
        fullshard.fully_shard(block, mesh=mesh, layout=layout, offload_policy=policy, mp_policy=mixed)
    return model


@torch.no_grad()
def swap(model: nn.Module, other: list[torch.Tensor]) -> None:
    """Exchange the weights and `other`'s, on the host if they are there."""
    for parameter, average in zip(model.parameters(), other, strict=True):
        kept = parameter.detach().clone()
        parameter.copy_(average)
        average.copy_(kept)


def losses_with_averages(model: nn.Module) -> list[torch.Tensor]:
    """Of training steps, and of evaluations between them with other weights: nothing in here waits for the device.

    The weights are put in right before an evaluation and taken out right after it, while kernels are still queued: a
    shard that was read later than that would have been one of the other weights'.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    average = [torch.full_like(parameter, 0.01).detach() for parameter in model.parameters()]
    busy = torch.randn(4096, 4096, device="cuda")
    losses = []
    for step in range(4):
        loss = model(batch(step).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swap(model, average)
        with torch.no_grad():
            for _ in range(20):  # the device falls behind the host
                busy = busy @ busy / 4096
            evaluated = model(batch(100 + step).bfloat16()).float().square().mean()
        swap(model, average)
        losses += [loss.detach(), evaluated]
    return losses


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_weights_are_swapped_around_an_evaluation(one_rank: DeviceMesh, layout: str) -> None:
    want = losses_with_averages(sharded(one_rank, layout, offload=False))
    same(losses_with_averages(sharded(one_rank, layout, offload=True)), want)


def losses_under_streams(model: nn.Sequential, side: torch.Stream | None) -> list[torch.Tensor]:
    """Of training steps; units are gathered, freed and evaluated under `side`, which nobody here waits for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = [batch(step).bfloat16() for step in range(6)]
    torch.accelerator.synchronize()
    losses = []
    first, last = model[0], model[-1]
    for x in inputs:
        with side or nullcontext():
            first.unshard(async_op=True)
            last.unshard()
            last.reshard()
            with torch.no_grad():
                model(x)
        loss = model(x).float().square().mean()
        loss.backward()
        filler = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda") for _ in range(4)]
        with side or nullcontext():  # whoever is given memory too early writes over it
            filler += [torch.full((WIDTH, WIDTH), float("nan"), device="cuda") for _ in range(4)]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_units_are_unsharded_under_a_side_stream(one_rank: DeviceMesh, layout: str, offload: bool) -> None:
    want = losses_under_streams(sharded(one_rank, layout, offload), None)
    same(losses_under_streams(sharded(one_rank, layout, offload), torch.Stream("cuda")), want)


@pytest.mark.parametrize("inside", [False, True])
def test_state_on_host(one_rank: DeviceMesh, inside: bool) -> None:
    """The same weights; between steps half of what AdamW's parameters and state take is on the device."""
    results = []
    for hosted in (True, False):
        before = allocated()
        model = build().cuda()
        for block in model:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        state = fullshard.optimizer_state_on_host(optimizer) if hosted else None
        if inside:
            fullshard.step_in_backward(optimizer)
        for step in range(4):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = [entries["exp_avg"].to_local() for entries in optimizer.state.values()]
        assert all(moment.is_pinned() if hosted else moment.is_cuda for moment in moments)
        assert state is None or state.nbytes >= sum(2 * moment.nbytes for moment in moments)
        held = torch.cuda.memory_allocated() - before
        weights = [p.to_local().detach().clone() for p in model.parameters()]
        results.append((weights, [moment.cuda() for moment in moments], held))
        del model, optimizer, state, moments
    (mine, my_state, mine_held), (others, other_state, other_held) = results
    assert all(map(torch.equal, mine, others)) and all(map(torch.equal, my_state, other_state))
    assert mine_held < 0.5 * other_held
