"""`MixedPrecisionPolicy(error_feedback=True)`: what rounding to 8 bits takes from a gradient is in a later one."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import packed_bytes
from fullshard.shard import units_of
from raising import raises

SIZE = 1000
"""Elements of a parameter: several blocks of 256, the last one shorter; not divisible by 3 ranks."""
MESHES = {"one axis": (3,), "hybrid": (2, 2), "replicas": (3, 1)}
EIGHT_BITS = [torch.int8, torch.float8_e5m2]


class Fixed(nn.Module):
    """Parameters whose gradients are the inputs: a block used at will, and one that always is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 1, bias=False), nn.Linear(SIZE, 1)
        self.first.extra = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, uses_first: bool = True) -> torch.Tensor:
        y = self.second(x)
        return y + self.first(x) if uses_first else y


def inputs(rank: int) -> torch.Tensor:
    """[1, SIZE]: each block has one element of magnitude 1, and others that 8 bits round away, or by a tenth."""
    generator = torch.Generator().manual_seed(rank)
    x = 10 ** -(1 + 2 * torch.rand(1, SIZE, generator=generator))
    x[:, ::100] = 1.0
    return x


def model_on(mesh: tuple[int, ...], dtype: torch.dtype | None, feedback: bool = True, **options: Any) -> Any:
    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    policy = fullshard.MixedPrecisionPolicy(scatter_dtype=dtype, all_reduce_dtype=dtype, error_feedback=feedback)
    torch.manual_seed(0)
    model = Fixed()
    for block in (model.first, model.second):
        fullshard.fully_shard(block, mp_policy=policy, layout="flat", **options)
    return fullshard.fully_shard(model, mp_policy=policy, layout="flat", **options)


def sent(model: Any, steps: int, **how: Any) -> dict[str, torch.Tensor]:
    """The sum of the gradients of some steps, whole, by parameter."""
    for _ in range(steps):
        model(inputs(dist.get_rank()), **how).sum().backward()
    sums = {name: p.grad.full_tensor().flatten() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return sums


def exact() -> torch.Tensor:
    return torch.cat([inputs(rank) for rank in range(dist.get_world_size())]).mean(0)


def roundings(model: Any, dtype: torch.dtype, steps: int, **how: Any) -> dict[str, float]:
    """By weight, the largest error of a sum of `steps` gradients, in roundings of the largest gradient, which is 1."""
    step = 0.5 / 127 if dtype == torch.int8 else 1 / 16
    sums = sent(model, steps, **how)
    return {
        name: float((total - steps * exact()).abs().max()) / step
        for name, total in sums.items()
        if name.endswith("weight")
    }


def errors_of_sums(mesh: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, float]]:
    """With feedback and without, of 100 steps."""
    return [roundings(model_on(mesh, dtype, feedback), dtype, 100) for feedback in (True, False)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_sum_of_gradients_is_off_by_a_rounding_at_most(run_ranks, mesh, dtype):
    shape = MESHES[mesh]
    for kept, lost in run_ranks(errors_of_sums, shape, dtype, world=math.prod(shape)):
        assert set(kept) == {"first.weight", "second.weight"}
        assert max(kept.values()) < 3, kept  # three packings, of which each keeps up to one
        assert min(lost.values()) > 8, lost


def residuals_of(model: Any) -> dict[str, torch.Tensor]:
    """Those of the first block."""
    return units_of(model.first)[0].gradients[0].residuals


def errors_after(mesh: tuple[int, ...], event: str) -> list[float]:
    """Errors, in roundings, of sums of 50 steps, some of which are as `event` says."""
    model = model_on(mesh, torch.int8, unused="zeros" if event == "not used here" else "error")
    measure = partial(roundings, model, torch.int8)
    if event == "not used":
        sums = [sent(model, 25), sent(model, 25, uses_first=False), sent(model, 25)]
        assert "first.weight" not in sums[1]
        return [float((sums[0]["first.weight"] + sums[2]["first.weight"] - 50 * exact()).abs().max()) * 254]
    if event == "not used here":
        sums = sent(model, 25, uses_first=dist.get_rank() == 0)
        expected = 25 * inputs(0).flatten() / dist.get_world_size()
        return [float((sums["first.weight"] - expected).abs().max()) * 254]
    if event == "frozen":
        before = sent(model, 25)
        model.first.weight.requires_grad_(False)
        assert "first.weight" not in sent(model, 3)
        model.first.weight.requires_grad_(True)
        return [float((before["first.weight"] + sent(model, 25)["first.weight"] - 50 * exact()).abs().max()) * 254]
    if event == "without sync":
        x = inputs(dist.get_rank())
        for call in range(50):
            model.set_requires_gradient_sync(call % 5 == 4)
            model(x).sum().backward()
        return [float((model.first.weight.grad.full_tensor() - 50 * exact()).abs().max()) * 254 / 5]
    if event == "broken off":
        sent(model, 3)
        hook = model.first.register_full_backward_hook(lambda *_: 1 / 0)
        x = inputs(dist.get_rank()).requires_grad_()
        with raises("ZeroDivisionError: "):
            model(x).sum().backward()
        hook.remove()
        model.zero_grad()
    if event == "parked":
        before = sent(model, 25)
        lost = {name: residual.cpu().clone() for name, residual in residuals_of(model).items()}
        fullshard.park(model)
        assert all(residual.device.type == "cpu" for residual in residuals_of(model).values())
        fullshard.resume(model)
        assert residuals_of(model).keys() == lost.keys() == {"gradients", *(["slice", "sum"] if len(mesh) > 1 else [])}
        assert all(torch.equal(residual.cpu(), lost[name]) for name, residual in residuals_of(model).items())
        return [float((before["first.weight"] + sent(model, 25)["first.weight"] - 50 * exact()).abs().max()) * 254]
    return list(measure(50).values())


@pytest.mark.parametrize("event", ["not used", "not used here", "frozen", "without sync", "broken off", "parked"])
@pytest.mark.parametrize("mesh", ["one axis", "hybrid"])
def test_what_is_kept_outlasts(run_ranks, mesh, event):
    shape = MESHES[mesh]
    for errors in run_ranks(errors_after, shape, event, world=math.prod(shape)):
        assert max(errors) < 6, errors  # without feedback 12


def after_nan(mesh: tuple[int, ...], steps: int) -> tuple[int, list[float]]:
    """Whether a NaN and an infinity of rank 0 in step number `steps` come through; the roundings of 50 steps after."""
    model = model_on(mesh, torch.int8)
    sent(model, steps - 1)
    x = inputs(dist.get_rank())
    if dist.get_rank() == 0:
        x[0, 7], x[0, 777] = math.nan, math.inf
    model(x).sum().backward()
    nonfinite = ~model.first.weight.grad.full_tensor().isfinite().flatten()
    model.zero_grad()
    return bool(nonfinite[7] and nonfinite[777]), list(roundings(model, torch.int8, 50).values())


@pytest.mark.parametrize("steps", [1, 2, 300])
@pytest.mark.parametrize("mesh", ["one axis", "hybrid"])
def test_a_nan_comes_through_and_does_not_stay(run_ranks, mesh, steps):
    shape = MESHES[mesh]
    for came, errors in run_ranks(after_nan, shape, steps, world=math.prod(shape)):
        assert came
        assert max(errors) < 4, errors


def kept(mesh: tuple[int, ...]) -> dict[str, Any]:
    model = model_on(mesh, torch.int8)
    empty = fullshard.memory_use(model)
    sent(model, 2)
    units = units_of(model)
    gradients = [of_bucket for unit in units for of_bucket in unit.gradients if of_bucket.bucket.trains]
    expected = 0
    for of_bucket in gradients:
        layout, axes = of_bucket.bucket.layout, of_bucket.bucket.axes
        expected += layout.world * packed_bytes(layout.shard_numel) if axes.shard.size > 1 else 0
        if axes.copies > 1:
            expected += (axes.copies + 1) * packed_bytes(-(-layout.shard_numel // axes.copies))
    use = fullshard.memory_use(model)
    on_host = next(model.parameters()).device.type == "cpu"
    facts = {
        "expected": expected,
        "host": use.host == (use.parameters + use.gradients if on_host else 0),
        "residuals": sum(of_bucket.residual_bytes for of_bucket in gradients),
        "counted": use.gradients - sum(g.held_bytes for g in gradients),
        "before": empty.gradients,
        "words": fullshard.describe(model, plans=True),
        "keys": set(model.state_dict()) == set(Fixed().state_dict()),
        "copied": sum(g.residual_bytes for unit in units_of(copy.deepcopy(model)) for g in unit.gradients),
    }
    model.to_empty(device="cpu")
    facts["emptied"] = sum(g.residual_bytes for unit in units_of(model) for g in unit.gradients)
    return facts


@pytest.mark.parametrize("mesh", MESHES)
def test_memory_is_what_is_said_and_not_in_checkpoints_or_copies(run_ranks, mesh):
    shape = MESHES[mesh]
    for facts in run_ranks(kept, shape, world=math.prod(shape)):
        assert facts["residuals"] == facts["counted"] == facts["expected"] > 0
        assert facts["before"] == facts["copied"] == facts["emptied"] == 0
        assert facts["keys"] and facts["host"]
        assert "in int8 with error feedback" in facts["words"]
        assert "of it for the next" in facts["words"]


def test_it_needs_a_reduction_in_eight_bits():
    with raises("ConfigError: MixedPrecisionPolicy(error_feedback=True) needs gradients that are sent in 8 bits."):
        fullshard.MixedPrecisionPolicy(gather_dtype=torch.int8, error_feedback=True)
