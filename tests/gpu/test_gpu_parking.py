"""`park` and `resume` on one GPU: the device's memory really is given back, and training goes on as if nothing was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that --gpu=tests shows"),
]

WIDTH, BLOCKS = 1024, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))).cuda()


def shard(front: str, mesh: DeviceMesh) -> nn.Module:
    if front in ("wrapper", "originals"):
        policy = fullshard.wrap.ModuleWrapPolicy({nn.Linear})
        given: dict[str, Any] = {"use_orig_params": front == "originals", "auto_wrap_policy": policy}
        return fullshard.FullyShardedDataParallel(build(), device_mesh=mesh, **given)
    model = build()
    for block in model:
        fullshard.fully_shard(block, mesh=mesh, layout=front)
    return fullshard.fully_shard(model, mesh=mesh, layout=front)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parked: bool, pin: bool) -> Tensor:
    """Losses of three steps; with `parked` a rest before each backward's end, step and clearing."""

    def rest() -> None:
        if parked:
            fullshard.park(model, optimizer, pin_memory=pin)
            fullshard.resume(model, optimizer)

    losses = []
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        rest()
        optimizer.step()
        rest()
        optimizer.zero_grad()
        rest()
    return torch.stack(losses)


@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("front", ["rows", "flat", "wrapper", "originals"])
def test_the_same_numbers(one_rank: DeviceMesh, front: str, pin: bool) -> None:
    results = []
    for parked in (False, True):
        model = shard(front, one_rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        results.append(train(model, optimizer, parked, pin))
    assert torch.equal(*results)


@pytest.mark.parametrize("front", ["rows", "flat", "wrapper", "originals"])
def test_the_memory_is_given_back(one_rank: DeviceMesh, front: str) -> None:
    before = torch.cuda.memory_allocated()
    model = shard(front, one_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(torch.randn(8, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    del loss
    held = torch.cuda.memory_allocated() - before
    use = fullshard.memory_use(model, optimizer)
    whole = BLOCKS * WIDTH * (WIDTH + 1) * 4
    assert use.total >= 4 * whole and held >= 4 * whole

    moved = fullshard.park(model, optimizer)
    assert moved.moved >= 4 * whole
    assert torch.cuda.memory_allocated() - before < 0.02 * held  # unsharded parameters of no memory, step counters
    parked = fullshard.memory_use(model, optimizer)
    assert parked.total == parked.host == use.total
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.grad is not None and parameter.grad.device.type == "cpu"
    with pytest.raises(fullshard.PhaseError, match=r"fullshard\.resume"):
        model(torch.randn(8, WIDTH, device="cuda"))
    state = {name: _whole(value).cpu() for name, value in model.state_dict().items()}

    assert fullshard.resume(model, optimizer).moved == moved.moved
    assert abs(torch.cuda.memory_allocated() - before - held) < 0.02 * held
    for name, value in model.state_dict().items():
        assert torch.equal(_whole(value).cpu(), state[name])
    for parameter in model.parameters():
        assert parameter.device.type == "cuda" and parameter.grad is not None
    optimizer.step()


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach()
