"""Optimizers on owners, and steps during the backward, on a device: two ranks over gloo, or one over NCCL."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_gpu_ranks import BLOCKS, NO_GPU, STEPS, batch, build, loss_of, on_each_device, whole_parameters
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from training import assert_same

LAYOUTS = pytest.mark.parametrize("layout", ["rows", "flat"])
OFFLOADS = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])

WHOLE: dict[str, Any] = {"adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}


def sharded(layout: str, device: str, offload: bool = False) -> Any:
    mesh, model = init_device_mesh(device, (torch.distributed.get_world_size(),)), build().to(device)
    options: dict[str, Any] = {"layout": layout, "mesh": mesh}
    if offload:
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=device == "cuda")
    for block in list(model)[:BLOCKS]:
        fullshard.fully_shard(block, **options)
    return fullshard.fully_shard(model, **options)


def optimizers(model: nn.Module, name: str, owners: bool) -> list[torch.optim.Optimizer]:
    if name in WHOLE:
        if owners:
            return [fullshard.OwnerOptimizer(model.parameters(), WHOLE[name], lr=0.01)]
        return [WHOLE[name](model.parameters(), lr=0.01)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)
    if name == "torch's muon":
        return [fullshard.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02), others]
    return [(fullshard.Muon if owners else torch.optim.Muon)(matrices, lr=0.02), others]


def train(model: nn.Module, steppers: list[torch.optim.Optimizer], device: str) -> None:
    """Of the same batch on every rank, and one that makes gradients of full rank: orthogonalising adds to rounding."""
    for step in range(STEPS):
        x = torch.cat([batch(step, rank, device) for rank in range(64)])
        loss_of(model, x).backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()


@on_each_device
@LAYOUTS
@OFFLOADS
@pytest.mark.parametrize("name", ["muon", "torch's muon", "adafactor"])
def test_whole_matrices_as_in_one_process(run_ranks, name, layout, offload, device):
    assert_same(run_ranks(on_owners, name, layout, offload, device, world=2))


def on_owners(name: str, layout: str, offload: bool, device: str) -> list[str]:
    model, plain = sharded(layout, device, offload), build().to(device)
    train(model, optimizers(model, name, owners=True), device)
    train(plain, optimizers(plain, "muon" if "muon" in name else name, owners=False), device)
    ours, theirs = whole_parameters(model), whole_parameters(plain)
    far = {key: ((ours[key] - value).norm() / value.norm()).item() for key, value in theirs.items()}
    return [f"{key} is off by {distance:.1e}" for key, distance in far.items() if distance > 2e-3]


@on_each_device
@LAYOUTS
@OFFLOADS
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
def test_steps_in_the_backward_are_those_after_it(run_ranks, layout, offload, clips, device):
    assert_same(run_ranks(in_backward, layout, offload, clips, device, world=2))


def in_backward(layout: str, offload: bool, clips: bool, device: str) -> list[str]:
    """Bit for bit."""
    models = [sharded(layout, device, offload) for _ in range(2)]
    steppers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    steps = fullshard.step_in_backward(steppers[1], max_norm=0.01 if clips else None)
    for step in range(STEPS):
        x = batch(step, torch.distributed.get_rank(), device)
        if clips:
            with steps.measure():
                loss_of(models[1], x).backward()
        for model, stepper in zip(models, steppers, strict=True):
            loss_of(model, x).backward()
            if clips and model is models[0]:
                fullshard.clip_grad_norm_(model.parameters(), 0.01)
            stepper.step()
            stepper.zero_grad()
    after, inside = map(whole_parameters, models)
    return [f"{name} is another" for name, value in after.items() if not torch.equal(value, inside[name])]


@pytest.mark.gpu
@NO_GPU
@LAYOUTS
@pytest.mark.parametrize("name", ["muon", "adamw"])  # torch's Adafactor reads norms to the host
def test_the_host_waits_nowhere(one_rank: DeviceMesh, layout, name):
    model = sharded(layout, "cuda")
    steppers = optimizers(model, name, owners=True)
    train(model, steppers, "cuda")
    x = batch(0, 0, "cuda")
    loss_of(model, x).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for stepper in steppers:
            stepper.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NO_GPU
@LAYOUTS
def test_gradients_of_few_units_are_alive(one_rank: DeviceMesh, layout):
    """Bytes of the device at the highest: with steps in the backward, less by all but few units."""
    highest = {}
    for inside in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*[nn.Linear(1024, 1024, device="cuda") for _ in range(16)])
        for block in model:
            fullshard.fully_shard(block, mesh=one_rank, layout=layout)
        fullshard.fully_shard(model, mesh=one_rank, layout=layout)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        if inside:
            fullshard.step_in_backward(stepper)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
            highest[inside] = torch.cuda.max_memory_allocated()
        del model, stepper
        gc.collect()
    unit = 4 * 1024 * 1025
    assert highest[False] - highest[True] > 10 * unit, highest
