"""`ShardedGradScaler`: ranks agree on infs; against an unscaled step, and against PyTorch's scaler on its wrapper."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import ShardedGradScaler
from training import full, full_parameters
from ways import on_ranks


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def sharded(kind: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model and what its optimizer holds. plain: whole on every rank, gradients are each rank's own."""
    model = small_model()
    if kind != "plain":
        fullshard.fully_shard(model, layout="flat" if kind == "flat" else "rows")
    return model, fullshard.optimizer_view(model) if kind == "view" else list(model.parameters())


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def spoil_first(parameters: list[torch.Tensor], value: float) -> None:
    """One element of this rank's gradients, after the reduction."""
    next(local(p.grad) for p in parameters if local(p.grad).numel()).view(-1)[0] = value


@pytest.mark.parametrize(
    ("kind", "value", "by_hand", "fused"),
    [
        ("rows", torch.inf, False, False),
        ("flat", torch.nan, True, False),
        ("plain", torch.nan, True, False),
        ("view", torch.inf, False, True),
    ],
)
@on_ranks
def test_an_inf_on_one_rank_skips_the_step_on_all(kind: str, value: float, by_hand: bool, fused: bool) -> None:
    model, parameters = sharded(kind)
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=fused)
    scaler = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(5):
        before = full_parameters(model)
        loss = model(batch(step)).square().mean()
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1:
            spoil_first(parameters, value)
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(p, before[n]) for n, p in full_parameters(model).items())
        assert changed == (step != 1), f"step {step}"
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0]
    assert scaler.state_dict()["_growth_tracker"] == 1
    again = ShardedGradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 64.0


@on_ranks
def test_each_optimizer_is_skipped_by_itself() -> None:
    model, parameters = sharded("rows")
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    before = full_parameters(model)
    scaler.scale(model(batch(0)).square().mean()).backward()
    if dist.get_rank() == 0:
        spoil_first(parameters[2:], torch.inf)
    scaler.unscale_(optimizers[0])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    after = full_parameters(model)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["0.weight", "0.bias"]
    assert scaler.get_scale() == 4.0


@on_ranks
def test_memory_is_unscaled_once_and_ranks_without_gradients_take_part() -> None:
    """A gradient reachable in two ways is unscaled once; a rank without gradients takes part."""
    model, _ = sharded("rows")
    (view,) = fullshard.optimizer_view(model)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0)).square().mean()).backward()
    expected = {n: full(p.grad) / 8 for n, p in model.named_parameters()}
    both = torch.optim.SGD([view, *model.parameters()], lr=0.1)  # kept: scalers know optimizers by their ids
    scaler.unscale_(both)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), expected[name], rtol=0, atol=0)
    own = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([own], lr=1.0)
    if dist.get_rank() == 0:
        own.grad = torch.full((3,), torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert own.tolist() == [1.0] * 3 and scaler.get_scale() == 4.0


@on_ranks
def test_only_the_given_group_agrees() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model, parameters = sharded("plain")
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=group)
    scaler.scale(model(batch(0)).square().mean()).backward()
    if dist.get_rank() == 1:
        spoil_first(parameters, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if dist.get_rank() == 0 else 4.0)


def train_both(ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    model = small_model()
    if ours:
        fullshard.fully_shard(model, layout="flat")
        scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        scaler = Theirs("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for step in range(6):
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step in {1, 4} and dist.get_rank() == step % 2:
            spoil_first([p for p in model.parameters() if p.grad is not None], torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    if ours:
        return scales, full_parameters(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return scales, {n: p.detach().clone() for n, p in model.module.named_parameters()}


@on_ranks
def test_the_same_scales_and_parameters_as_pytorchs_on_its_wrapper() -> None:
    (scales, got), (expected_scales, expected) = train_both(True), train_both(False)
    assert scales == expected_scales == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0]
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)


def test_signature_dtypes_and_single_process() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    mine, expected = (inspect.signature(cls).parameters for cls in (ShardedGradScaler, Theirs))
    assert [(n, p.default) for n, p in mine.items()] == [(n, p.default) for n, p in expected.items()]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    one = torch.ones((), dtype=torch.bfloat16)
    scaled = scaler.scale([one, (one, one.float())])
    assert isinstance(scaled, list) and isinstance(scaled[1], tuple)
    assert [t.dtype for t in (scaled[0], *scaled[1])] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [t.item() for t in scaler.scale(iter([one, one]))] == [4.0, 4.0]
    with pytest.raises(ValueError, match="outputs"):
        scaler.scale(3)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.full_like(half, 4.0)
    optimizer = torch.optim.SGD([half], lr=1.0)
    copied = copy.deepcopy(scaler)
    scaler.unscale_(optimizer)
    assert half.grad.tolist() == [1.0, 1.0] and copied.get_scale() == 4.0
