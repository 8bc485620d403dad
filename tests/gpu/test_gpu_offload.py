"""CPU offload on one GPU: the same numbers, state in page-locked host memory, less memory on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]

WIDTH, BLOCKS = 1024, 4


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with real communication."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def train(model: nn.Module) -> tuple[list[float], torch.optim.Optimizer, int]:
    """Losses of three steps of two batches each, clipped; the optimizer; the device's peak in bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(3):
        for part in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part)).cuda()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        if isinstance(model, fullshard.FullyShardedDataParallel):
            model.clip_grad_norm_(0.01)
        else:
            fullshard.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("pin", [True, False])
def test_functional(one_rank: DeviceMesh, layout: str, pin: bool) -> None:
    results = []
    for policy in (fullshard.OffloadPolicy(), fullshard.CPUOffloadPolicy(pin_memory=pin)):
        model = build()
        for block in model:
            fullshard.fully_shard(block, mesh=one_rank, layout=layout, offload_policy=policy)
        fullshard.fully_shard(model, mesh=one_rank, layout=layout, offload_policy=policy)
        losses, optimizer, peak = train(model)
        results.append((losses, peak))
        where = {p.device.type for p in model.parameters()}
        state = {v.device.type for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)}
        if isinstance(policy, fullshard.CPUOffloadPolicy):
            assert where == {"cpu"}
            assert "cuda" not in state
            assert all(p._local_tensor.is_pinned() == pin for p in model.parameters())
        del model, optimizer
        torch.cuda.empty_cache()
    assert torch.allclose(torch.tensor(results[0][0]), torch.tensor(results[1][0]), rtol=1e-5)
    assert results[1][1] < 0.8 * results[0][1]  # no shard, gradient or optimizer state on the device


@pytest.mark.parametrize("orig", [False, True])
def test_wrapper(one_rank: DeviceMesh, orig: bool) -> None:
    results = []
    for offload in (False, True):
        model = fullshard.FullyShardedDataParallel(
            build(),
            device_mesh=one_rank,
            cpu_offload=fullshard.CPUOffload(offload_params=offload),
            auto_wrap_policy={nn.Sequential},
            use_orig_params=orig,
        )
        losses, _, peak = train(model)
        assert {p.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}
        results.append((losses, peak, {k: v.cpu() for k, v in model.state_dict().items()}))
        del model
        torch.cuda.empty_cache()
    assert torch.allclose(torch.tensor(results[0][0]), torch.tensor(results[1][0]), rtol=1e-5)
    assert results[1][1] < 0.8 * results[0][1]
    for name, value in results[0][2].items():
        assert torch.allclose(results[1][2][name], value, rtol=1e-4, atol=1e-6)
